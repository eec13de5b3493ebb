"""Read RAE's configuration files, YAML with the sections stage_1, stage_2, transport, sampler,
guidance and misc, as its sample_ddp.py reads them. Imports no torch.
"""

import re
from math import sqrt
from pathlib import Path
from typing import Any

from accel.errors import InputRef, shown
from accel.families.configuration import Configuration
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
NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+")  # PyYAML parses 1e-6 as a string
# Names of published decoders and encoders, which have these facts.
PUBLISHED = re.compile("(^|/)ViT(B|L|XL)/?$|^facebook/(dinov2|vit-mae)")


def read(content: Any, given: InputRef) -> Configuration | None:
    """Return the options of a configuration, None for another program's. Raises UsageError for
    corrupt entries.
    """
    if not isinstance(content, dict) or not content.keys() & {"stage_1", "stage_2"}:
        return None
    file = Reader(content, given)
    for name, (default, supported, option) in SUPPORTED.items():
        file.require(name, default, supported, option)
    file.take_network("ckpt", "stage_2")
    file.take_file("vae", "stage_1.params.pretrained_decoder_path")
    file.require_decoder("decoder_config_path", "vit_mae-base", "config.json", DECODER_DEFAULTS)
    file.require_decoder(
        "encoder_config_path", "facebook/dinov2-base", "preprocessor_config.json", IMAGENET
    )
    file.take_file("latent_stats", "stage_1.params.normalization_stat_path")
    latents = file.read_sampler()
    file.read_guidance()
    unread = [
        f"{section}.{name}={shown(str(value))}"
        for section, names in ENTRIES.items()
        for name, value in file.get(section, {}).items()
        if name not in names
    ]
    if unread:
        given.warn(f"arguments not interpreted: {', '.join(unread)}")
    return Configuration(file.options, file.refused, file.missing, fetch, latents)


def fetch(paths: list[str]) -> str:
    """Return the command that fetches missing files, "" if some are not in the repository."""
    if not all(path.startswith("models/") for path in paths):
        return ""
    names = " ".join(path.removeprefix("models/") for path in paths)
    return f"hf download nyu-visionx/RAE-collections {names} --local-dir models"


class Reader:
    """Read a configuration: the options, refusals and missing files in it. given: for errors."""

    def __init__(self, content: dict[str, Any], given: InputRef):
        self.content = content
        self.given = given
        self.options: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry by its dotted name, such as sampler.params.num_steps, or `default` if it
        is missing or null.
        """
        value: Any = self.content
        for part in name.split("."):
            if not isinstance(value, dict):
                raise self.given.error(f"has {shown(value)} in place of a section of {name}")
            value = value.get(part)
            if value is None:
                return default
        return value

    def number(self, name: str, default: float, low: float, high: float = 1e12) -> Any:
        """Return a number, or `default` if it is missing; a whole number if the default is one."""
        value = self.get(name, default)
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        kind = type(default)
        if type(value) not in (int, float) or not low <= value <= high or kind(value) != value:
            word = "whole number" if kind is int else "number"
            raise self.given.error(
                f"has {name} {shown(value)}, which must be a {word} from {low:g} to {high:g}"
            )
        return kind(value)

    def require_decoder(self, entry: str, default: str, name: str, facts: dict[str, Any]) -> None:
        """Refuse a decoder whose file `name` differs from the one that a configuration entry names.

        The entry names a folder that contains the file, or the file itself. facts: the published
        values, which replace missing ones.
        """
        folder = self.get(f"stage_1.params.{entry}", default)
        decoder = Path(self.options.get("vae", ""))
        own = (decoder if decoder.is_dir() else decoder.parent) / name
        near = Path(self.given.name).parent / folder
        places = Path(folder, name), near / name, Path(folder), near
        named = next(filter(Path.is_file, places), None)
        try:
            taken = read_json(own) if own.is_file() else {}
            wanted = read_json(named) if named else taken  # the user may have copied it
        except (OSError, ValueError):
            return self.refuse("vae", f"names {shown(folder)}, whose {name} cannot be read; fix it")
        width = (wanted | taken).get("decoder_hidden_size", 0)
        facts = {**facts, "decoder_num_attention_heads": HEADS_BY_WIDTH.get(width)}
        for fact, value in facts.items():
            if wanted.get(fact, value) != taken.get(fact, value):
                self.refuse(
                    "vae",
                    f"names {shown(folder)}, whose {name} has {fact} "
                    f"{shown(wanted.get(fact, value))}; copy it into the decoder's folder",
                )
        if not (PUBLISHED.search(folder) or named or taken):
            self.refuse("vae", f"names {shown(folder)}; copy its {name} into the decoder's folder")

    def read_sampler(self) -> tuple[int, int]:
        """Read latents, times and steps. Return the latents' channels and side."""
        size = self.get("misc.latent_size", [768, 16, 16])
        whole = isinstance(size, list) and all(type(part) is int for part in size)
        if not whole or len(size) != 3 or size[1] != size[2] or min(size) < 1 or max(size) > 8192:
            raise self.given.error(f"has misc.latent_size {shown(size)}, which must be C, L, L")
        channels, side, _ = size
        sigma = sqrt(
            self.number("misc.time_dist_shift_dim", float(channels * side**2), 1)
            / self.number("misc.time_dist_shift_base", 4096.0, 1)
        )
        if not 1 <= sigma <= 100:
            self.refuse(
                "timestep_shift",
                f"shifts times by √(time_dist_shift_dim/time_dist_shift_base) = {sigma:g}, which "
                "must be from 1 to 100; give `timestep_shift`, its inverse",
            )
        self.options |= dict(
            image_size=self.number("stage_1.params.decoder_patch_size", 16, 1) * side,
            guidance_channels=channels,
            num_classes=self.number("misc.num_classes", 1000, 1),
            timestep_shift=1 / sigma,
            sampler="euler",
            # The file counts time points: one more than steps.
            num_sampling_steps=self.number("sampler.params.num_steps", 50, 2, 1001) - 1,
        )
        return channels, side

    def read_guidance(self) -> None:
        """Read scale, interval and the second network of guidance."""
        scale = self.number("guidance.scale", 1.0, -1e6, 1e6)
        # The original also reads the names with a dash.
        low, high = (
            self.number(f"guidance.t_{end}", self.number(f"guidance.t-{end}", default, 0, 1), 0, 1)
            for end, default in (("min", 0.0), ("max", 1.0))
        )
        if low >= high:
            raise self.given.error(f"has guidance t_min {low:g} and t_max {high:g}")
        # A scale below 1 is no guidance, as 1 is.
        self.options |= dict(cfg_scale=max(scale, 1.0), guidance_interval=(low, high))
        method = self.get("guidance.method", "cfg")
        classes = self.options["num_classes"]
        null = self.number("misc.null_label", classes, 0)
        if method == "autoguidance":
            self.take_network("guide", "guidance.guidance_model")
        elif method != "cfg":
            self.refuse("config", f"has guidance.method {shown(method)}, not cfg or autoguidance")
        elif null != classes and scale > 1:
            self.refuse("config", f"has misc.null_label {null}, and only {classes} is supported")

    def take_network(self, option: str, section: str) -> None:
        """Set an option to a network's file. Refuse an unsupported network."""
        self.take_file(option, f"{section}.ckpt")
        for name, (default, supported) in SUPPORTED_NETWORK.items():
            self.require(f"{section}.{name}", default, supported, option)

    def require(self, name: str, default: Any, supported: Any, option: str) -> None:
        """Refuse an unsupported value of an entry. A pair of equal numbers counts as one number."""
        value = self.get(name, default)
        if value not in (supported, [supported, supported]):
            remedy = "" if option == "config" else f"; give `{option}`"
            self.refuse(
                option,
                f"has {name} {shown(value)}, and only {shown(supported)} is supported{remedy}",
            )

    def take_file(self, option: str, name: str) -> None:
        """Set an option to a file's path, relative to the current folder or the configuration's."""
        path = self.get(name)
        if not isinstance(path, str):
            return self.refuse(option, f"has no {name}; give `{option}`")
        near = Path(self.given.name).parent / path
        found = near if near.exists() and not Path(path).exists() else Path(path)
        self.options[option] = str(found)
        if not found.exists():
            self.missing[option] = path

    def refuse(self, option: str, reason: str) -> None:
        """Record why an option's value is not supported; the first reason counts."""
        self.refused.setdefault(option, reason)
