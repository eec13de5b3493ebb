"""The least and the most of every bounded value are valid, and the next values beyond
them are refused by name.
"""

from math import inf, nan, nextafter

import pytest
import torch

from accel.checkpoints import facts
from accel.config.options import OPTIONS, Options
from accel.config.rules import Request
from accel.decoders.autoencoder_kl import DEFAULTS, check_config
from accel.errors import InputRef
from accel.tensors import diffusers_names

UP = "UpDecoderBlock2D"
STATISTICS = dict(latent_channels=1, latents_mean=[0.0], latents_std=[1.0])
WEIGHTS = {  # of a transformer of width 12
    "x_embedder.proj.weight": torch.zeros(12, 4, 1, 1),
    "final_layer.linear.weight": torch.zeros(8, 12),
    "y_embedder.embedding_table.weight": torch.zeros(3, 12),
}
CHECKS = {
    "grid": lambda **option: Request.open(Options(ckpt="own.pt", **option)),
    "named": lambda **option: Request.open(Options(model="DiT-Demo/2", **option)),
    "ddim": lambda **option: Request.open(Options(sampler="ddim", **option)),
    "fid": lambda **option: Request.open(Options(**{"num_fid_samples": 8, **option})),
    "checkpoint": lambda **entry: facts.checked(InputRef("own.pt"), entry),
    "recipe": lambda **entry: facts.checked(InputRef("own.pt"), {"recipe": entry}),
    "decoder": lambda **entry: check_config(entry),
    "levels": lambda block_out_channels: check_config(
        dict(block_out_channels=block_out_channels, up_block_types=[UP] * len(block_out_channels))
    ),
    "statistics": lambda **entry: check_config(
        STATISTICS | {name: [value] for name, value in entry.items()}
    ),
    "lists": lambda **entry: check_config(STATISTICS | entry),
    "transformer": lambda **entry: diffusers_names.check_config(
        {"sample_size": 8, **entry}, WEIGHTS
    ),
}
BOUNDS = [  # names of a check and of its argument, least and most
    (
        "grid.image_size checkpoint.image_size decoder.latent_channels decoder.norm_num_groups "
        "grid.guidance_channels checkpoint.guidance_channels checkpoint.in_channels",
        1,
        8192,
    ),
    ("grid.num_sampling_steps recipe.num_sampling_steps", 1, 1000),
    ("grid.num_heads checkpoint.num_heads", 1, 1024),
    ("grid.num_classes checkpoint.num_classes", 1, 10**6),
    ("grid.batch_size fid.num_fid_samples", 1, 10**9),
    ("fid.per_proc_batch_size", 1, 10**5),
    ("transformer.sample_size", 1, 4096),
    ("checkpoint.patch_size decoder.layers_per_block", 1, 64),
    ("transformer.num_attention_heads", 1, 12),
    ("grid.seed", -(2**63), 2**64 - 1),
    ("grid.grids", 1, 1000),
    ("grid.cfg_scale recipe.cfg_scale", 0.0, 1e6),
    ("grid.timestep_shift recipe.timestep_shift", 0.01, 100.0),
    ("grid.noise_scale recipe.noise_scale", 0.001, 1000.0),
    ("grid.t_eps recipe.t_eps", 1e-6, 1.0),
    ("ddim.eta", 0.0, 1.0),
    ("recipe.latent_scale", 1e-6, 1e6),
    ("decoder.scaling_factor statistics.latents_std", 1e-6, 1e6),
    ("decoder.shift_factor statistics.latents_mean", -1e6, 1e6),
]
INTERVALS = (
    [[0, 1], [0, 5e-324]],
    [[-5e-324, 1], [0, nextafter(1, 2)], [0.5, 0.5], [0], [0, 0.5, 1]],
)
VALUES = [  # names, valid values, refused values
    ("grid.sampler", ["ddpm", "ddim", "dpm++", "unipc", "sde", "euler", "heun"], ["plms"]),
    ("grid.precision", ["fp32", "fp32-fused", "exact", "tf32", "fp16", "bf16"], ["fp64"]),
    ("grid.vae_precision", ["auto", "fp32", "tf32", "fp16"], ["bf16"]),
    ("grid.output_type", ["image", "latent"], ["pixels"]),
    ("named.eta", [0.0], [0.5]),  # without sampler="ddim"
    ("grid.seed_list", [[-(2**63), 2**64 - 1]], [[7, 7]]),
    ("grid.guidance_interval recipe.guidance_interval", *INTERVALS),
    ("checkpoint.family checkpoint.model checkpoint.vae", ["x"], [1]),
    ("recipe.latent_norm", [True, False], [1, "yes"]),
    (
        "decoder.use_post_quant_conv decoder.mid_block_add_attention",
        [True, False],
        [1, "yes", None],
    ),
    ("checkpoint.learn_sigma", [True, False], ["False", 1]),
    ("checkpoint.class_names", [["a", "b"]], ["ab", [1]]),
    ("checkpoint.recipe", [{}], [{"seed": 1}, 1]),
    ("levels.block_out_channels", [[1], [8192], [64] * 8], [[], [0], ["16"], [8193], [64] * 9]),
    ("decoder.block_out_channels", [[64]], [8, None]),
    (
        "decoder.up_block_types",
        [["AttnUpDecoderBlock2D"]],
        [None, [], [UP, UP], ["DownEncoderBlock2D"]],
    ),
    ("decoder.act_fn", ["silu"], ["relu", None]),
    ("decoder.out_channels", [3], [2, 4, "3"]),
    ("lists.latents_mean lists.latents_std", [[1.0]], [None, [], [1.0, 1.0], ["1"], 1.0]),
]
CASES = {name: (valid, refused) for names, valid, refused in VALUES for name in names.split()}
for names, least, most in BOUNDS:
    beyond = (
        [least - 1, most + 1]
        if isinstance(least, int)
        else [nextafter(least, -inf), nextafter(most, inf), nan]
    )
    of_files = [True, [least]]  # of an option, another type is Python's own error
    for name in names.split():
        of_options = name.startswith(("grid", "fid", "ddim"))
        CASES[name] = ([least, most], beyond if of_options else beyond + of_files)


@pytest.mark.parametrize("case", CASES)
def test_bounds(case):
    check, name = case.split(".")
    valid, refused = CASES[case]
    for value in valid:
        CHECKS[check](**{name: value})
    for value in refused:
        with pytest.raises(ValueError, match=name):
            CHECKS[check](**{name: value})
            pytest.fail(f"{name} {value!r} is accepted")


def test_no_bounded_value_is_missing_here():
    options = {name for name, option in OPTIONS.items() if option.bounds or option.choices}
    of_files = {*facts.FACTS, *facts.FILE_FACTS, *facts.LATENT_SETTINGS, *DEFAULTS}
    assert options | of_files <= {case.split(".")[1] for case in CASES}
