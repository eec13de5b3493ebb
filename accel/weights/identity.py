"""What weights say of themselves: which model they are of, its classes, its resolution.

Shapes decide. What a training run or a pipeline stored beside the tensors is believed: DiT's train.py keeps its
arguments, a diffusers folder its config.json.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from accel.errors import UsageError
from accel.families.dit.network import DiT
from accel.families.large_dit.network import Large_DiT_models
from accel.families.sit.network import SiT
from accel.network import MODELS

LABELS = "y_embedder.embedding_table.weight"
PATCHES = "x_embedder.proj.weight"  # of a DiT, a convolution (D, C, p, p)
LAST = "final_layer.linear.weight"
QK_NORM = "layers.0.attention.q_norm.weight"  # a weight of a Large-DiT with qk_norm only
OF_A_FLOW = {"path_type": ("Linear", "linear"), "prediction": ("velocity", "v")}  # of SiT's and REPA's training: args

Shapes = dict[str, tuple]


class Identity(NamedTuple):
    """What options follow from weights, and the module that they fit."""

    model: str
    build: Callable[..., torch.nn.Module]  # (input_size=, num_classes=) → a module of their shape
    patch_size: int
    num_classes: int
    null_class: bool = True  # whether the label table has a row for the unconditional estimate, after the classes'
    learn_sigma: bool = True
    latent_size: int | None = None  # side of the latents that they were trained on, where they say so
    vae: str | None = None
    class_names: tuple[str, ...] = ()
    flow: bool = False  # whether their output is a velocity
    channels: int = 4  # of the latents


class _NoInitialisation(TorchFunctionMode):
    """On the meta device there is nothing to draw, but trying makes torch import its compiler: up to three seconds."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        draws = function in (torch.Tensor.uniform_, torch.Tensor.normal_)
        if draws or getattr(function, "__module__", None) == "torch.nn.init":
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords or {})


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no values: parameters on the meta device, nothing is initialised."""
    with torch.device("meta"), _NoInitialisation():
        yield


def identify(
    source: str, state: dict[str, torch.Tensor], said: dict[str, Any], model: str | None, num_classes: int | None
) -> Identity:
    """The identity of the weights `state`, which the user named `source`.

    said: what lies beside the tensors: model, num_classes, image_size, vae, num_heads, class_names. model, num_classes:
    what the user said, which goes first. Raises UsageError for weights of another model, of none, and for
    contradictions.
    """
    flow, have = is_flow(source, said, model), shapes_of(state)
    classes, null_class = _classes(source, have, said, num_classes)
    how = dict(num_classes=classes, class_dropout_prob=0.1 if null_class else 0.0)
    wrong, fits = {}, None
    alike = [name for name in MODELS if name.startswith("SiT") == flow]
    for name in sorted(alike, key=lambda name: name not in (model, "DiT-XL/2", "SiT-XL/2")):  # the likely ones first
        build = _constructor(name, have)
        wrong[name] = different(have, module := _made(build, **how))
        if not wrong[name]:
            fits = name
            break
    if fits is None and (own := _custom(have, said, flow)) and not different(have, module := _made(own[1], **how)):
        fits, build = own
    if fits is None:
        raise UsageError(_why_none(source, have, model, wrong))
    if model not in (None, fits):
        raise UsageError(f"`ckpt={source}`: holds the weights of {fits}, not of {model}; use `model={fits}`")
    heads = dict(num_heads=said["num_heads"]) if _divides(said.get("num_heads"), have) else {}
    build = partial(build, class_dropout_prob=how["class_dropout_prob"], **heads)
    side = have.get("pos_embed") and isqrt(state["pos_embed"].shape[1]) * have[PATCHES][-1]
    size = said["image_size"] // 8 if type(said.get("image_size")) is int else None  # their training's own factor
    vae = said.get("vae")
    vae = vae if isinstance(vae, str) and (vae in ("ema", "mse") or Path(vae).is_dir()) else None
    names = tuple(said.get("class_names", ()))
    said_classes = num_classes is not None or "num_classes" in said
    if not said_classes and classes != 1000 and classes != _made(build).y_embedder.num_classes:
        rows = classes + null_class
        print(f"{source}: {classes} classes and the null class (all {rows} are classes? then --num-classes {rows})")
    learn_sigma = module.final_layer.linear.out_features == 2 * module.in_channels * module.patch_size**2
    how = classes, null_class, learn_sigma, side or size, vae, names
    return Identity(fits, build, module.patch_size, *how, flow, module.in_channels)


def shapes_of(state: dict[str, torch.Tensor]) -> Shapes:
    """Shape of every entry; position tables of all square grids have the same, (1, "T", D)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    table = shapes.get("pos_embed", ())
    if len(table) == 3 and table[0] == 1 and table[1] == isqrt(table[1]) ** 2 > 0:
        shapes["pos_embed"] = (1, "T", table[2])
    return shapes


def different(have: Shapes, module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """The entries in which weights of shapes `have` and those of `module` differ: (there, wanted) by name."""
    want = shapes_of(module.state_dict())
    # The module's own order: the first difference is then the nearest to the input.
    return {name: (have.get(name), want.get(name)) for name in {**want, **have} if have.get(name) != want.get(name)}


def is_flow(source: str, said: dict[str, Any], model: str | None = None) -> bool:
    """Whether weights are a SiT's. They have DiT's names and shapes and mean a velocity, so what was said decides: by
    training, else by the user, else by the file's name. Arguments as `identify` has them. Raises UsageError."""
    for name, known in OF_A_FLOW.items():
        if said.get(name, known[0]) not in known:
            raise UsageError(f"`ckpt={source}`: was trained with {name} {said[name]}, and only {known[0]} is sampled")
    name, flow, what = said.get("model"), None, next((f"{one} {said[one]}" for one in OF_A_FLOW if one in said), None)
    if what is not None:
        flow = True
    elif isinstance(name, str) and name.startswith(("SiT", "DiT", "Large-DiT")):
        flow, what = name.startswith("SiT"), f"model {name}"
    if model is None:
        named = re.match(r"sit\b|sit[-_]", source.replace("\\", "/").rpartition("/")[2].lower())
        return bool(named) if flow is None else flow
    wanted = model.startswith("SiT")
    if flow not in (None, wanted):
        raise UsageError(
            f"`ckpt={source}`: was trained as a {'SiT' if flow else 'DiT'} ({what}), not as {model}; drop `model`"
        )
    return wanted


def _classes(source, have, said, wanted):
    """(number of classes, whether a null class follows them), from the rows of the label table."""
    table, n = have.get(LABELS, (1001,)), said.get("num_classes")
    rows = table[0]
    if wanted is None and type(n) is int:
        if rows not in (n, n + 1):
            raise UsageError(
                f"`ckpt={source}`: says num_classes {n}, and its label table has {rows} rows; give `num_classes`"
            )
        return n, rows == n + 1
    if wanted is not None:
        if rows not in (wanted, wanted + 1):
            known = f"`num_classes={rows - 1}`" if rows > 1 else "`num_classes=1`"
            raise UsageError(
                f"`num_classes={wanted}`: the label table in {source} has {rows} rows, one for each class and one for "
                f"no class; use {known}"
            )
        return wanted, rows == wanted + 1
    return (rows - 1, True) if rows > 1 else (1, False)


def like_dit(have: Shapes, num_heads: int, network: type[DiT] = DiT) -> Callable[..., torch.nn.Module]:
    """The constructor of models.DiT, or of a `network` like it, in the sizes of weights of shapes `have`, which hold
    all but the heads. Raises KeyError where one is missing."""
    width, channels, patch, _ = have[PATCHES]
    return partial(
        network,
        hidden_size=width,
        patch_size=patch,
        in_channels=channels,
        num_heads=num_heads,
        depth=sum(name.endswith(".attn.qkv.weight") for name in have),
        mlp_ratio=(have["blocks.0.mlp.fc1.weight"][0] + 0.5) / width,
        learn_sigma=have[LAST][0] == 2 * channels * patch**2,
    )


def _made(build, **how):
    with shapes_only():
        return build(**how)


def _constructor(name, have):
    """The entry `name` of MODELS with what it leaves open, by the shapes `have`."""
    if name in Large_DiT_models:
        return partial(MODELS[name], qk_norm=QK_NORM in have)
    patch, channels = int(name.rpartition("/")[2]), have[PATCHES][1] if len(have.get(PATCHES, ())) == 4 else 4
    return partial(MODELS[name], in_channels=channels, learn_sigma=have.get(LAST, (0,))[0] != channels * patch**2)


def _divides(heads, have):
    """Whether `heads` is a number of heads for the width in `have`."""
    return type(heads) is int and heads > 0 and have.get(PATCHES, (1,))[0] % heads == 0


def _custom(have, said, flow):
    """(name, constructor) of a DiT or SiT of other sizes, where the number of heads was said; None where it was not."""
    try:
        width, channels, patch, _ = have[PATCHES]
        if not _divides(said.get("num_heads"), have):
            return None
        network = SiT if flow else DiT
        build = like_dit(have, said["num_heads"], network)
    except (KeyError, ValueError):
        return None
    return f"{network.__name__}-{build.keywords['depth']}x{width}/{patch}", build


def _why_none(source, have, model, wrong):
    """The line for weights that fit no model."""
    name = model or min(wrong, key=lambda name: len(wrong[name]))
    entry, (there, wanted) = next(iter(wrong[name].items()))
    own, names = "", ", ".join(one for one in MODELS if one in wrong)
    if len(have.get(PATCHES, ())) == 4 and "blocks.0.attn.qkv.weight" in have and there and wanted:
        own = "; for a DiT of other sizes load it into its class and use accel.Sampler(module)"
    return (
        f"`ckpt={source}`: fits none of {names} ({len(wrong[name])} entries differ, first {entry}: "
        f"{there or 'missing'}, {name} has {wanted or 'none'}){own}"
    )
