"""Read RAE's configuration files, YAML with the sections stage_1, stage_2, transport, sampler,
guidance and misc, as its sample_ddp.py reads them. Imports no torch.
"""

import os
import re
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

from accel.errors import Given, shown
from accel.families.configuration import Configuration, Entries, Size, plain
from accel.files import read_json

REPOSITORY = "nyu-visionx/RAE-collections"
FOLDER = "models"  # where RAE's README has it

# Entry → value where it is missing, computed value, and the option that replaces it. The option
# "config" replaces nothing.
COMPUTED: dict[str, tuple[Any, Any, str]] = {
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
# The same of a network.
OF_NETWORK: dict[str, tuple[Any, Any]] = {
    "target": (None, "stage2.models.DDT.DiTwDDTHead"),
    "params.patch_size": (1, 1),
    "params.use_rope": (True, True),
    "params.use_swiglu": (True, True),
    "params.use_rmsnorm": (True, True),
    "params.use_pos_embed": (True, True),
    "params.wo_shift": (False, False),
}
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
SIZES = "config.json"  # of a decoder
PIXELS = "preprocessor_config.json"  # of an encoder
DECODERS = ("ViTB", "ViTL", "ViTXL")  # published names of a decoder's sizes
HEADS = {768: 12, 1024: 16, 1152: 16}  # of these decoders, by width
# Entries of config.json that decide a decoder's function and are in no tensor, as these decoders
# have them.
OF_DECODER: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
    "qkv_bias": True,
}
# Encoders on the hub whose pictures have ImageNet's mean and deviation.
IMAGENET_ENCODERS = re.compile("facebook/(dinov2|vit-mae)")
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
MOST = 10**6  # classes, or pixels of a patch


def read(content: Any, given: Given) -> Configuration | None:
    """Return what a configuration says, None if it is another program's. Raises UsageError for
    entries that are damaged.
    """
    if not isinstance(content, dict) or not content.keys() & {"stage_1", "stage_2"}:
        return None
    file = RAEEntries(content, given)
    file.read_stages()
    file.read_sampler()
    file.read_guidance()
    return Configuration(file.options, file.refused, file.missing, fetch, tuple(file.sizes))


def fetch(paths: list[str]) -> str:
    """Return the command that fetches missing files, "" if some are not of the repository."""
    published = [path for path in paths if Path(path).parts[0] == FOLDER]
    if len(published) < len(paths):
        return ""
    names = " ".join(Path(path).relative_to(FOLDER).as_posix() for path in published)
    return f"hf download {REPOSITORY} {names} --local-dir {FOLDER}"


def of_decoder(content: dict) -> dict[str, Any]:
    """Return the facts of a decoder's config.json that are in no tensor."""
    width = content.get("decoder_hidden_size")
    usual = OF_DECODER | {"decoder_num_attention_heads": HEADS.get(width) if width else None}
    return {name: content.get(name, value) for name, value in usual.items()}


def of_pixels(content: dict) -> dict[str, Any]:
    """Return mean and deviation of pixels in an encoder's preprocessor_config.json."""
    return {name: content.get(name, usual) for name, usual in IMAGENET.items()}


class RAEEntries(Entries):
    """A configuration, with the options, refusals and missing files that are found in it."""

    def __init__(self, content: dict, given: Given):
        super().__init__(content, given)
        self.folder = Path(given.name).parent
        self.options: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.sizes: list[Size] = []
        for section, names in ENTRIES.items():
            for name in self.section(section).keys() - names:
                self.refuse("config", f"says {section}.{name}, which is not known here; drop it")
        for name, (usual, computed, option) in COMPUTED.items():
            self.require(name, usual, computed, option)

    def read_stages(self) -> None:
        """Read the files of network and decoder."""
        self.take_file("ckpt", "stage_2.ckpt")
        self.require_network("stage_2", "ckpt")
        self.take_file("vae", "stage_1.params.pretrained_decoder_path")
        self.require_decoder()
        self.take_file("latent_stats", "stage_1.params.normalization_stat_path")

    def require_decoder(self) -> None:
        """Refuse a decoder whose files say otherwise than the configuration, which names a folder
        with the decoder's sizes and one with the encoder's statistics of pixels.
        """
        decoder = Path(self.options.get("vae", ""))
        folder = decoder if decoder.is_dir() else decoder.parent
        sizes = self.text("stage_1.params.decoder_config_path") or "vit_mae-base"
        self.compare(
            f"decoder_config_path {shown(sizes)}",
            self.named(sizes, SIZES),
            folder / SIZES,
            of_decoder,
            known=Path(sizes).name in DECODERS,
        )
        encoder = self.text("stage_1.params.encoder_config_path") or "facebook/dinov2-base"
        self.compare(
            f"encoder_config_path {shown(encoder)}",
            self.named(encoder, PIXELS),
            folder / PIXELS,
            of_pixels,
            known=IMAGENET_ENCODERS.match(encoder) is not None,
        )

    def named(self, folder: str, file: str) -> Path | None:
        """Return a file of a folder that is in the current one or in the configuration's. The
        configuration may name the file itself.
        """
        places = Path(folder), self.folder / folder
        return next(filter(Path.is_file, (*(place / file for place in places), *places)), None)

    def compare(
        self,
        entry: str,
        named: Path | None,
        beside: Path,
        facts_of: Callable[[dict], dict[str, Any]],
        known: bool,
    ) -> None:
        """Refuse a decoder unless the file that the configuration names has the facts of the one
        beside the decoder. A missing file has the published facts. entry: the configuration's,
        in words. known: whether the name alone stands for the published facts.
        """
        contents = []
        for file in (named, beside):
            try:
                content = read_json(file) if file and file.is_file() else {}
            except (OSError, ValueError):
                return self.refuse("vae", f"says {entry}, and {file} cannot be read; mend it")
            contents.append(content)
        said, taken = contents
        if not named:
            if not known and not beside.is_file():
                reason = f"says {entry}, whose {beside.name} is not here"
                self.refuse("vae", f"{reason}; put it beside the decoder")
            return None  # the user may have put it there
        width = {"decoder_hidden_size": (said or taken).get("decoder_hidden_size")}
        computed = facts_of(width | taken)
        for name, value in facts_of(width | said).items():
            if value != computed[name]:
                return self.refuse(
                    "vae",
                    f"says {entry}, whose {beside.name} has {name} {plain(value)}, and "
                    f"{plain(computed[name])} is computed; copy it beside the decoder",
                )
        return None

    def read_sampler(self) -> None:
        """Read latents, times and steps."""
        size = self.get("misc.latent_size", [768, 16, 16])
        whole = isinstance(size, list) and all(type(part) is int for part in size)
        if not whole or len(size) != 3 or size[1] != size[2] or min(size) < 1 or max(size) > 8192:
            raise self.error(f"says misc.latent_size {plain(size)}, which must be C, L, L")
        channels, side, _ = size
        patch = self.number("stage_1.params.decoder_patch_size", 16, 1, MOST, int)
        self.options["image_size"] = patch * side
        self.options["guidance_channels"] = channels
        self.sizes += [
            Size("config", "channels of misc.latent_size", "in_channels", channels),
            Size("config", "a side of misc.latent_size", "input_size", side),
        ]
        classes = self.number("misc.num_classes", 1000, 1, MOST, int)
        trained = self.number("stage_2.params.num_classes", 1000, 1, MOST, int)
        if classes != trained:
            self.refuse(
                "num_classes",
                f"says misc.num_classes {classes}, and stage_2 has {trained}; give `num_classes`",
            )
        self.options["num_classes"] = classes
        numbers = self.number("misc.time_dist_shift_dim", channels * side**2, 1e-9, 1e12)
        base = self.number("misc.time_dist_shift_base", 4096, 1e-9, 1e12)
        sigma = sqrt(numbers / base)
        if not 1 <= sigma <= 100:
            self.refuse(
                "timestep_shift",
                f"shifts times by √(time_dist_shift_dim/time_dist_shift_base) = {sigma:g}, which "
                "must be from 1 to 100; give `timestep_shift`, its inverse",
            )
        self.options["timestep_shift"] = 1 / sigma
        self.options["sampler"] = "euler"
        # A number of points: one more than steps.
        points = self.number("sampler.params.num_steps", 50, 2, 1001, int)
        self.options["num_sampling_steps"] = points - 1

    def read_guidance(self) -> None:
        """Read scale, interval and the second network of guidance."""
        scale = self.number("guidance.scale", 1.0, -1e6, 1e6)
        self.options["cfg_scale"] = max(scale, 1.0)  # at 1 and less there is none
        # The original spells both with a dash too.
        low = self.number("guidance.t_min", self.get("guidance.t-min", 0.0), 0, 1)
        high = self.number("guidance.t_max", self.get("guidance.t-max", 1.0), 0, 1)
        if low >= high:
            raise self.error(f"says guidance t_min {low:g} and t_max {high:g}")
        self.options["guidance_interval"] = (low, high)
        method = self.get("guidance.method", "cfg")
        classes = self.options["num_classes"]
        null = self.number("misc.null_label", classes, 0, MOST, int)
        if method == "autoguidance":
            self.take_file("guide", "guidance.guidance_model.ckpt")
            self.require_network("guidance.guidance_model", "guide")
        elif method != "cfg":
            given = f"says guidance.method {plain(method)}"
            self.refuse("config", f"{given}, and only cfg and autoguidance are computed")
        elif null != classes and scale > 1:
            self.refuse("config", f"says misc.null_label {null}, and only {classes} is computed")

    def require_network(self, section: str, option: str) -> None:
        """Refuse a network that is not computed here. Note the sizes that its tensors say too."""
        for name, (usual, computed) in OF_NETWORK.items():
            self.require(f"{section}.{name}", usual, computed, option)
        for name in OF_TENSORS:
            entry = f"{section}.params.{name}"
            value = self.get(entry)
            if name in PAIRS:
                value = tuple(value) if isinstance(value, list) else value and (value, value)
            if value is not None:
                self.sizes.append(Size(option, entry, name, value))

    def require(self, name: str, usual: Any, computed: Any, option: str) -> None:
        """Refuse an entry with another value than the computed one."""
        reason = self.otherwise(name, usual, computed)
        remedies = {"config": "", "sampler": f"; give `sampler={computed}`"}
        if reason:
            self.refuse(option, reason + remedies.get(option, f"; give `{option}`"))

    def take_file(self, option: str, name: str) -> None:
        """Take the path of a file: from the current folder, else from the configuration's."""
        given = self.text(name)
        if given is None:
            self.refuse(option, f"says no {name}; give `{option}`")
            return
        places = [given, str(self.folder / given)]
        found = list(filter(os.path.exists, places))
        self.options[option] = (found or places)[0]
        if not found:
            self.missing[option] = given

    def text(self, name: str) -> str | None:
        """Return a text, None if it is missing or null."""
        value = self.get(name)
        if value is not None and (not isinstance(value, str) or not value or "${" in value):
            raise self.error(f"says {name} {plain(value)}, which must be plain text")
        return value

    def refuse(self, option: str, reason: str) -> None:
        """Note why a value is not computed, the first reason of an option."""
        self.refused.setdefault(option, reason)
