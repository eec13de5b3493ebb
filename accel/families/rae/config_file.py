"""Read RAE's configuration files, YAML with the sections stage_1, stage_2, transport, sampler,
guidance and misc, as its sample_ddp.py reads them. Imports no torch.
"""

import os
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

from accel.errors import UsageError, shown
from accel.families.config_file import ConfigFile, Size
from accel.files import read_json

REPOSITORY = "nyu-visionx/RAE-collections"
FOLDER = "models"  # where RAE's README has it
STAGES = ("stage_1", "stage_2")

# Section → (entry, value where it is missing, computed value, option that replaces it). The
# option "config" replaces nothing.
COMPUTED: Mapping[str, tuple[tuple[str, Any, Any, str], ...]] = {
    "stage_1": (
        ("target", None, "stage1.RAE", "vae"),
        ("ckpt", None, None, "vae"),
    ),
    "stage_1.params": (
        ("reshape_to_2d", True, True, "config"),
        ("eps", 1e-5, 1e-5, "config"),
    ),
    "transport.params": (
        ("path_type", "Linear", "Linear", "config"),
        ("prediction", "velocity", "velocity", "config"),
    ),
    "sampler.params": (
        ("reverse", False, False, "config"),
        ("sampling_method", "dopri5", "euler", "sampler"),
    ),
}
# The same of a network.
OF_NETWORK = (
    ("patch_size", 1, 1),
    ("use_rope", True, True),
    ("use_swiglu", True, True),
    ("use_rmsnorm", True, True),
    ("use_pos_embed", True, True),
    ("wo_shift", False, False),
)
NETWORK = "stage2.models.DDT.DiTwDDTHead"
# Entries of a network that its tensors say too; pairs are of trunk and head.
OF_TENSORS = ("hidden_size", "depth", "num_heads", "in_channels", "input_size", "use_qknorm")
PAIRS = ("hidden_size", "depth", "num_heads")
# Sections with all their entries that the original takes: it reads others nowhere, or fails.
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
ENTRIES["guidance.guidance_model.params"] = ENTRIES["stage_2.params"]
# Encoders whose pictures are normalised by ImageNet's mean and deviation.
IMAGENET_ENCODERS = {"Dinov2withNorm", "MAEwNorm"}
PIXEL_STATISTICS = "preprocessor_config.json"  # of other encoders
DECODERS = {"ViTB", "ViTL", "ViTXL"}  # whose heads follow from their width
WIDTHS_AND_HEADS = ([768, 12], [1024, 16], [1152, 16])  # of these decoders
LAYER_NORM_EPS = 1e-12  # of these decoders
# Width and depth of the trunk, of models with the usual head.
SIZES = {(1152, 28): "XL", (1024, 24): "L", (768, 12): "B", (384, 12): "S"}
HEAD = (2048, 2)


def read(content: Any, path: Path) -> ConfigFile | None:
    """Return the options of a configuration, None if it is another program's. Raises UsageError
    for entries that are damaged.
    """
    if not isinstance(content, dict) or not content.keys() & {*STAGES}:
        return None
    file = Reader(content, path)
    file.read_stages()
    file.read_sampler()
    file.read_guidance()
    return ConfigFile(file.options, file.refused, file.missing, fetch, tuple(file.sizes))


def fetch(paths: list[str]) -> str:
    """Return the command that fetches missing files, "" if some are not of the repository."""
    published = [path for path in paths if Path(path).parts[0] == FOLDER]
    if len(published) < len(paths):
        return ""
    names = " ".join(Path(path).relative_to(FOLDER).as_posix() for path in published)
    return f"hf download {REPOSITORY} {names} --local-dir {FOLDER}"


class Reader:
    """A configuration, with the options, refusals and missing files that are found in it."""

    def __init__(self, content: dict, path: Path):
        self.content = content
        self.path = path
        self.options: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.sizes: list[Size] = []
        for stage in STAGES:
            if not self.section(stage):
                self.refuse("config", f"has no {stage}, and sampling needs both stages")
        for section, names in ENTRIES.items():
            for name in self.section(section).keys() - names:
                self.refuse("config", f"says {section}.{name}, which is not known here; drop it")
        for section, rules in COMPUTED.items():
            for rule in rules:
                self.require(section, *rule)

    def read_stages(self) -> None:
        """Read the files of network and decoder, and the sizes of latents and pictures."""
        self.take_file("ckpt", "stage_2", "ckpt")
        self.require_network("stage_2", "ckpt")
        self.take_model()
        self.take_file("vae", "stage_1.params", "pretrained_decoder_path")
        self.require_decoder()
        self.take_file("latent_stats", "stage_1.params", "normalization_stat_path")

    def take_model(self) -> None:
        """Take the model's name, if its sizes have one."""
        entries = self.section("stage_2.params")
        widths = entries.get("hidden_size", [1152, 2048])
        depths = entries.get("depth", [28, 2])
        pairs = isinstance(widths, list) and isinstance(depths, list)
        if pairs and len(widths) == len(depths) == 2 and (widths[1], depths[1]) == HEAD:
            size = SIZES.get((widths[0], depths[0]))
            if size:
                self.options["model"] = f"DiTDH-{size}/1"

    def require_decoder(self) -> None:
        """Refuse a decoder whose heads or pixel statistics are not known."""
        entries = self.section("stage_1.params")
        decoder = self.options.get("vae", "")
        folder = decoder if os.path.isdir(decoder) else os.path.dirname(decoder)
        config = self.text("stage_1.params", "decoder_config_path") or "vit_mae-base"
        if Path(config).name not in DECODERS and not _holds(folder, "config.json"):
            self.refuse(
                "vae",
                f"says decoder_config_path {shown(config)}, and only those of "
                f"{', '.join(sorted(DECODERS))} are known; put its config.json beside the decoder",
            )
        elif not _holds(folder, "config.json") and self.has_other_heads(config):
            self.refuse(
                "vae",
                f"says decoder_config_path {shown(config)}, whose config.json has other heads or "
                "another layer_norm_eps than RAE's decoders; copy it beside the decoder",
            )
        encoder = entries.get("encoder_cls", "Dinov2withNorm")
        if encoder not in IMAGENET_ENCODERS and not _holds(folder, PIXEL_STATISTICS):
            self.refuse(
                "vae",
                f"says encoder_cls {_plain(encoder)}, whose pixels may have other means than "
                f"ImageNet's; put the encoder's {PIXEL_STATISTICS} beside the decoder",
            )

    def has_other_heads(self, config: str) -> bool:
        """Return whether a decoder's configuration, where it is here, is not the published one."""
        for folder in (config, self.path.parent / config):
            if _holds(folder, "config.json"):
                try:
                    content = read_json(os.path.join(folder, "config.json"))
                except (OSError, ValueError) as error:
                    reason = getattr(error, "strerror", None) or error
                    raise self.error(
                        f"says decoder_config_path {shown(config)}, whose config.json cannot be "
                        f"read ({reason}); mend it"
                    ) from None
                width = content.get("decoder_hidden_size")
                heads = content.get("decoder_num_attention_heads")
                eps = content.get("layer_norm_eps", LAYER_NORM_EPS)
                return [width, heads] not in WIDTHS_AND_HEADS or eps != LAYER_NORM_EPS
        return False

    def read_sampler(self) -> None:
        """Read latents, times and steps."""
        channels, side = self.latent_size()
        patch = self.integer("stage_1.params", "decoder_patch_size", 16)
        self.options["image_size"] = patch * side
        self.options["guidance_channels"] = channels
        self.sizes += [
            Size("config", "channels of misc.latent_size", "in_channels", channels),
            Size("config", "a side of misc.latent_size", "input_size", side),
        ]
        classes = self.integer("misc", "num_classes", 1000)
        trained = self.integer("stage_2.params", "num_classes", 1000)
        if classes != trained:
            self.refuse(
                "num_classes",
                f"says misc.num_classes {classes}, and stage_2 has {trained}; give `num_classes`",
            )
        self.options["num_classes"] = classes
        numbers = prod((channels, side, side))
        base = self.number("misc", "time_dist_shift_base", 4096, 1e-9, 1e12)
        sigma = sqrt(self.number("misc", "time_dist_shift_dim", numbers, 0, 1e12) / base)
        if 1 <= sigma <= 100:
            self.options["timestep_shift"] = 1 / sigma
        else:
            self.refuse(
                "timestep_shift",
                f"shifts times by √(time_dist_shift_dim/time_dist_shift_base) = {sigma:g}, which "
                "must be from 1 to 100; give `timestep_shift`, its inverse",
            )
        mode = self.section("sampler").get("mode", "ODE")
        if str(mode).upper() != "ODE":
            self.refuse("config", f"says sampler.mode {_plain(mode)}, and only ODE is computed")
        if "sampler" not in self.refused:
            self.options["sampler"] = "euler"
        # A number of points: one more than steps.
        points = self.integer("sampler.params", "num_steps", 50, 2, 1001)
        self.options["num_sampling_steps"] = points - 1

    def latent_size(self) -> tuple[int, int]:
        """Return channels and side of the latents. Raises UsageError if they are not square."""
        size = self.section("misc").get("latent_size", [768, 16, 16])
        whole = isinstance(size, list) and all(type(part) is int for part in size)
        if not whole or len(size) != 3 or size[1] != size[2] or min(size) < 1 or max(size) > 8192:
            raise self.error(f"says misc.latent_size {_plain(size)}, which must be C, L, L")
        return size[0], size[1]

    def read_guidance(self) -> None:
        """Read scale, interval and the second network of guidance."""
        scale = self.number("guidance", "scale", 1.0, -1e6, 1e6)
        self.options["cfg_scale"] = max(scale, 1.0)  # at 1 and less there is none
        low = self.number("guidance", self.spelled("t_min"), 0.0, 0, 1)
        high = self.number("guidance", self.spelled("t_max"), 1.0, 0, 1)
        if low >= high:
            raise self.error(f"says guidance t_min {low:g} and t_max {high:g}; mend it")
        self.options["guidance_interval"] = (low, high)
        method = self.section("guidance").get("method", "cfg")
        classes = self.options["num_classes"]
        null = self.integer("misc", "null_label", classes, 0)
        if method == "cfg":
            if null != classes and scale > 1:
                self.refuse(
                    "config", f"says misc.null_label {null}, and only {classes} is computed"
                )
            return
        if method != "autoguidance":
            given = f"says guidance.method {_plain(method)}"
            self.refuse("config", f"{given}, and only cfg and autoguidance are computed")
            return
        self.take_file("guide", "guidance.guidance_model", "ckpt")
        self.require_network("guidance.guidance_model", "guide")

    def spelled(self, name: str) -> str:
        """Return an entry of guidance as the file spells it, with an underscore or a dash."""
        return name if name in self.section("guidance") else name.replace("_", "-")

    def require_network(self, section: str, option: str) -> None:
        """Refuse a network that is not computed here."""
        self.require(section, "target", None, NETWORK, option)
        params = f"{section}.params"
        for rule in OF_NETWORK:
            self.require(params, *rule, option)
        entries = self.section(params)
        for name in OF_TENSORS:
            value = entries.get(name)
            if value is None:
                continue
            if name in PAIRS:
                value = tuple(value) if isinstance(value, list) else (value, value)
            self.sizes.append(Size(option, f"{params}.{name}", name, value))

    def require(self, section: str, name: str, usual: Any, computed: Any, option: str) -> None:
        """Refuse an entry with another value than the computed one."""
        value = self.section(section).get(name, usual)
        if value == computed or value == [computed, computed]:
            return
        given = f"says {section}.{name} {_plain(value)}"
        if name not in self.section(section):
            given = f"says no {section}.{name}, which is then {_plain(usual)}"
        remedy = "" if option == "config" else f"; give `{option}"
        remedy += f"={computed}`" if option == "sampler" else "`" if remedy else ""
        self.refuse(option, f"{given}, and only {_plain(computed)} is computed{remedy}")

    def take_file(self, option: str, section: str, name: str) -> None:
        """Take the path of a file: from the current folder, else from the configuration's."""
        given = self.text(section, name)
        if given is None:
            self.refuse(option, f"says no {section}.{name}; give `{option}`")
            return
        beside = str(self.path.parent / given)
        here = os.path.exists(given)
        is_beside = os.path.exists(beside)
        self.options[option] = beside if is_beside and not here else given
        if not here and not is_beside:
            self.missing[option] = given

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of sections, such as sampler.params; {} if it is missing or empty."""
        section: Any = self.content
        for part in name.split("."):
            section = section.get(part)
            if section is None:
                return {}
            if not isinstance(section, dict):
                raise self.error(f"says {name} {_plain(section)}, which must be a section")
        return section

    def text(self, section: str, name: str) -> str | None:
        """Return a text of a section, None if it is missing or null."""
        value = self.section(section).get(name)
        if value is not None and (not isinstance(value, str) or not value or "${" in value):
            raise self.error(f"says {section}.{name} {_plain(value)}, which must be plain text")
        return value

    def number(self, section: str, name: str, usual: float, low: float, high: float) -> float:
        """Return a number of a section, `usual` if it is missing."""
        value = self.section(section).get(name, usual)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(
                f"says {section}.{name} {_plain(value)}, which must be a number from {low:g} to "
                f"{high:g}"
            )
        return float(value)

    def integer(self, section: str, name: str, usual: int, low: int = 1, high: int = 10**6) -> int:
        """Return a whole number of a section, `usual` if it is missing."""
        value = self.number(section, name, usual, low, high)
        if value != int(value):
            raise self.error(f"says {section}.{name} {value:g}, which must be a whole number")
        return int(value)

    def refuse(self, option: str, reason: str) -> None:
        """Note why a value is not computed, the first reason of an option."""
        self.refused.setdefault(option, reason)

    def error(self, reason: str) -> UsageError:
        return UsageError(f"`config={self.path}`: {reason}")


def _holds(folder, name):
    return os.path.isfile(os.path.join(folder, name))


def _plain(value):
    """Return a value as text; of a long list or a mapping the type alone."""
    short = isinstance(value, (str, int, float, bool, type(None)))
    short = short or isinstance(value, list) and len(value) < 5 and "[" not in str(value)[1:]
    return shown(str(value)) if short else f"of type {type(value).__name__}"
