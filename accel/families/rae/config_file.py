"""Read RAE's configuration files, YAML with the sections stage_1, stage_2, transport, sampler,
guidance and misc, as its sample_ddp.py reads them. Imports no torch.
"""

import re
from math import sqrt
from pathlib import Path
from typing import Any

from accel.errors import InputRef, shown
from accel.families.configuration import Configuration, Entries, Size, plain, warn_uninterpreted
from accel.families.rae.decoder_facts import HEADS_BY_WIDTH, IMAGENET, LAYER_NORM_EPS
from accel.io.filesystem import read_json

# Entry → the original's default, supported value, and the option that replaces it. The option
# "config" replaces nothing.
SUPPORTED: dict[str, tuple[Any, Any, str]] = {
    "stage_1.target": (None, "stage1.RAE", "vae"),
    "stage_1.ckpt": (None, None, "vae"),
    "stage_1.params.reshape_to_2d": (True, True, "config"),
    "stage_1.params.eps": (1e-5, 1e-5, "config"),
    "transport.params.path_type": ("Linear", "Linear", "config"),
    "transport.params.prediction": ("velocity", "velocity", "config"),
    "sampler.mode": ("ODE", "ODE", "config"),
    "sampler.params.reverse": (False, False, "config"),
    "sampler.params.sampling_method": ("dopri5", "euler", "sampler"),
}
# The same for a network, without the option.
SUPPORTED_NETWORK: dict[str, tuple[Any, Any]] = {
    "target": (None, "stage2.models.DDT.DiTwDDTHead"),
    "params.patch_size": (1, 1),
    "params.use_rope": (True, True),
    "params.use_swiglu": (True, True),
    "params.use_rmsnorm": (True, True),
    "params.use_pos_embed": (True, True),
    "params.wo_shift": (False, False),
}
# All entries that the sampling program reads, by section. Entries without code below do not affect
# pictures, or the tensors contain them too.
ENTRIES = {
    "stage_1.params": {
        *("encoder_cls", "encoder_config_path", "encoder_input_size", "encoder_params"),
        *("decoder_config_path", "decoder_patch_size", "pretrained_decoder_path"),
        *("noise_tau", "reshape_to_2d", "normalization_stat_path", "eps"),
    },
    "stage_2.params": {
        *("input_size", "patch_size", "in_channels", "hidden_size", "depth", "num_heads"),
        *("mlp_ratio", "class_dropout_prob", "num_classes", "use_qknorm", "use_swiglu"),
        *("use_rope", "use_rmsnorm", "wo_shift", "use_pos_embed"),
    },
    "transport.params": {
        *("path_type", "prediction", "loss_weight", "train_eps", "sample_eps", "time_dist_type"),
    },
    "sampler": {"mode", "params"},
    "sampler.params": {"sampling_method", "num_steps", "atol", "rtol", "reverse"},
    "guidance": {"method", "scale", "t_min", "t-min", "t_max", "t-max", "guidance_model"},
    "misc": {
        *("latent_size", "num_classes", "null_label"),
        *("time_dist_shift_dim", "time_dist_shift_base"),
    },
}
# Entries of the published decoders' config.json that affect pixels and that no tensor contains.
DECODER_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": LAYER_NORM_EPS,
    "num_channels": 3,
    "qkv_bias": True,
}
# Names of published decoders and encoders, which have these facts.
PUBLISHED = re.compile("(^|/)ViT(B|L|XL)/?$|^facebook/(dinov2|vit-mae)")


def read(content: Any, given: InputRef) -> Configuration | None:
    """Return the options of a configuration, None for another program's. Raises UsageError for
    corrupt entries.
    """
    if not isinstance(content, dict) or not content.keys() & {"stage_1", "stage_2"}:
        return None
    file = RAEEntries(content, given)
    for name, (default, supported, option) in SUPPORTED.items():
        file.require(name, default, supported, option)
    file.read_stages()
    file.read_sampler()
    file.read_guidance()
    unread = {
        f"{section}.{name}": value
        for section, names in ENTRIES.items()
        for name, value in file.section(section).items()
        if name not in names
    }
    warn_uninterpreted(given, unread)
    return Configuration(file.options, file.refused, file.missing, fetch, tuple(file.sizes))


def fetch(paths: list[str]) -> str:
    """Return the command that fetches missing files, "" if some are not in the repository."""
    if not all(path.startswith("models/") for path in paths):
        return ""
    names = " ".join(path.removeprefix("models/") for path in paths)
    return f"hf download nyu-visionx/RAE-collections {names} --local-dir models"


class RAEEntries(Entries):
    """A configuration, with the options, refusals and missing files found in it."""

    def __init__(self, content: dict, given: InputRef):
        super().__init__(content, given)
        self.folder = Path(given.name).parent
        self.options: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.sizes: list[Size] = []

    def read_stages(self) -> None:
        """Read the files of network and decoder."""
        self.take_file("ckpt", "stage_2.ckpt")
        self.require_network("stage_2", "ckpt")
        self.take_file("vae", "stage_1.params.pretrained_decoder_path")
        self.require_decoder("decoder_config_path", "vit_mae-base", "config.json", DECODER_DEFAULTS)
        self.require_decoder(
            "encoder_config_path", "facebook/dinov2-base", "preprocessor_config.json", IMAGENET
        )
        self.take_file("latent_stats", "stage_1.params.normalization_stat_path")

    def require_decoder(self, entry: str, default: str, name: str, facts: dict[str, Any]) -> None:
        """Refuse a decoder whose file `name` differs from the one that a configuration entry names.

        The entry names a folder that contains the file, or the file itself. facts: the published
        values, which replace missing ones.
        """
        folder = str(self.get(f"stage_1.params.{entry}") or default)
        decoder = Path(self.options.get("vae", ""))
        own = (decoder if decoder.is_dir() else decoder.parent) / name
        places = [Path(folder), self.folder / folder]
        named = next(filter(Path.is_file, [*(place / name for place in places), *places]), None)
        try:
            taken = read_json(own) if own.is_file() else {}
            wanted = read_json(named) if named else taken  # the user may have copied it
        except (OSError, ValueError):
            return self.refuse("vae", f"names {shown(folder)}, whose {name} cannot be read; fix it")
        heads = HEADS_BY_WIDTH.get((wanted | taken).get("decoder_hidden_size", 0))
        facts = facts | {"decoder_num_attention_heads": heads}
        differing = [
            f"{fact} {plain(wanted.get(fact, value))}"
            for fact, value in facts.items()
            if wanted.get(fact, value) != taken.get(fact, value)
        ]
        if differing or not (PUBLISHED.search(folder) or named or taken):
            reason = f"has {differing[0]}" if differing else "is not here"
            self.refuse(
                "vae",
                f"names {shown(folder)}, whose {name} {reason}; copy it into the decoder's folder",
            )

    def read_sampler(self) -> None:
        """Read latents, times and steps."""
        size = self.get("misc.latent_size", [768, 16, 16])
        whole = isinstance(size, list) and all(type(part) is int for part in size)
        if not whole or len(size) != 3 or size[1] != size[2] or min(size) < 1 or max(size) > 8192:
            raise self.error(f"has misc.latent_size {plain(size)}, which must be C, L, L")
        channels, side, _ = size
        self.sizes += [
            Size("config", "channels of misc.latent_size", "in_channels", channels),
            Size("config", "a side of misc.latent_size", "input_size", side),
        ]
        classes = self.number("misc.num_classes", 1000, 1, 10**6, int)
        if classes != self.number("stage_2.params.num_classes", 1000, 1, 10**6, int):
            self.refuse("num_classes", "misc and stage_2 differ in num_classes; give `num_classes`")
        numbers = self.number("misc.time_dist_shift_dim", channels * side**2, 1e-9, 1e12)
        sigma = sqrt(numbers / self.number("misc.time_dist_shift_base", 4096, 1e-9, 1e12))
        if not 1 <= sigma <= 100:
            self.refuse(
                "timestep_shift",
                f"shifts times by √(time_dist_shift_dim/time_dist_shift_base) = {sigma:g}, which "
                "must be from 1 to 100; give `timestep_shift`, its inverse",
            )
        patch = self.number("stage_1.params.decoder_patch_size", 16, 1, 10**6, int)
        self.options |= dict(
            image_size=patch * side,
            guidance_channels=channels,
            num_classes=classes,
            timestep_shift=1 / sigma,
            sampler="euler",
            # The file counts time points: one more than steps.
            num_sampling_steps=self.number("sampler.params.num_steps", 50, 2, 1001, int) - 1,
        )

    def read_guidance(self) -> None:
        """Read scale, interval and the second network of guidance."""
        scale = self.number("guidance.scale", 1.0, -1e6, 1e6)
        # The original also reads the names with a dash.
        low = self.number("guidance.t_min", self.get("guidance.t-min", 0.0), 0, 1)
        high = self.number("guidance.t_max", self.get("guidance.t-max", 1.0), 0, 1)
        if low >= high:
            raise self.error(f"has guidance t_min {low:g} and t_max {high:g}")
        # A scale below 1 is no guidance, as 1 is.
        self.options |= dict(cfg_scale=max(scale, 1.0), guidance_interval=(low, high))
        method = self.get("guidance.method", "cfg")
        classes = self.options["num_classes"]
        null = self.number("misc.null_label", classes, 0, 10**6, int)
        if method == "autoguidance":
            self.take_file("guide", "guidance.guidance_model.ckpt")
            self.require_network("guidance.guidance_model", "guide")
        elif method != "cfg":
            self.refuse("config", f"has guidance.method {plain(method)}, not cfg or autoguidance")
        elif null != classes and scale > 1:
            self.refuse("config", f"has misc.null_label {null}, and only {classes} is supported")

    def require_network(self, section: str, option: str) -> None:
        """Refuse an unsupported network. Record the sizes that its tensors must have."""
        for name, (default, supported) in SUPPORTED_NETWORK.items():
            self.require(f"{section}.{name}", default, supported, option)
        heads = self.get(f"{section}.params.num_heads")  # tensors contain all other sizes
        if heads is not None:
            pair = tuple(heads) if isinstance(heads, list) else (heads, heads)
            self.sizes.append(Size(option, f"{section}.params.num_heads", "num_heads", pair))

    def require(self, name: str, default: Any, supported: Any, option: str) -> None:
        """Refuse an unsupported value of an entry."""
        reason = self.unsupported(name, default, supported)
        if reason:
            self.refuse(option, reason + ("" if option == "config" else f"; give `{option}`"))

    def take_file(self, option: str, name: str) -> None:
        """Set an option to a file's path, relative to the current folder or the configuration's."""
        given = self.get(name)
        if not isinstance(given, str):
            self.refuse(option, f"has no {name}; give `{option}`")
            return
        found = [place for place in (Path(given), self.folder / given) if place.exists()]
        self.options[option] = str(found[0] if found else given)
        if not found:
            self.missing[option] = given

    def refuse(self, option: str, reason: str) -> None:
        """Record why an option's value is not supported; the first reason counts."""
        self.refused.setdefault(option, reason)
