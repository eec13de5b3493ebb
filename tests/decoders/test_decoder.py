"""Latents to pixels to bytes, against diffusers and torchvision: every space's scale,
every size of decoder.
"""

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from conftest import mistake
from PIL import Image
from safetensors.torch import load_file, save_file
from vaes import SCALES, by_pipelines, levels, random_vae

from accel.decoders.decoder import Decoder
from accel.decoders.loading import FILES, find
from accel.io.output import to_grid

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8])
def test_grid_is_torchvisions_save_image(tmp_path, n):
    from torchvision.utils import save_image

    pixels = torch.randn(n, 3, 24, 16, generator=torch.Generator().manual_seed(n))
    pixels[0, :, 0, :4] = torch.tensor([-1.0, 1.0, 0.0, 1 / 255])
    save_image(pixels, tmp_path / "theirs.png", nrow=4, normalize=True, value_range=(-1, 1))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "theirs.png")), to_grid(pixels).numpy())


ARCHITECTURES = {
    "sd-vae-ft in small": {},
    "deeper, without attention": levels(
        8, 16, 12, 12, layers_per_block=2, mid_block_add_attention=False
    ),
    "without the convolution before": dict(use_post_quant_conv=False, use_quant_conv=False),
    "16 channels, factor 16": levels(8, 8, 12, 16, 16, latent_channels=16),
    "3 channels, factor 4": levels(8, 12, 16, latent_channels=3),
    "factor 1": levels(8),
}


@pytest.mark.parametrize(
    "change", [*ARCHITECTURES.values(), *SCALES.values()], ids=[*ARCHITECTURES, *SCALES]
)
def test_decodes_what_diffusers_decodes_bit_for_bit(change, tmp_path, tiny_vae):
    theirs = random_vae(tiny_vae, change)
    if change:
        theirs.save_pretrained(tmp_path)
    else:  # a pickle, which keeps the strides of a model in channels_last
        deepcopy(theirs).to(memory_format=torch.channels_last).save_pretrained(
            tmp_path, safe_serialization=False
        )
    space = find(tmp_path)
    latents = torch.randn(2, theirs.config.latent_channels, 8, 8)
    want = by_pipelines(theirs, latents)
    assert (
        space.channels == latents.shape[1]
        and want.shape[-1] == 8 * space.factor
        and want.std() > 0.05
    )
    assert torch.equal(Decoder(space, CPU).decode(latents), want)


def test_gradients_through_the_decoder_are_refused(tiny_vae):
    decoder = Decoder(find(str(tiny_vae)), CPU)
    z = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    want = decoder.decode(z)
    given = z.clone().requires_grad_()
    with mistake("", "gradients"):
        decoder.decode(given)
    with torch.no_grad():
        assert torch.equal(decoder.decode(given), want)


def test_files_as_published(tiny_vae, tmp_path):
    """sd-vae-ft-* name the attention's projections query, key, value and proj_attn, and
    leave entries of config.json to diffusers' defaults.
    """
    config = json.loads((tiny_vae / FILES[0]).read_text())
    for name in (
        "scaling_factor",
        "shift_factor",
        "latents_mean",
        "latents_std",
        "layers_per_block",
    ):
        del config[name]
    (tmp_path / FILES[0]).write_text(json.dumps(config))
    state = load_file(tiny_vae / FILES[1])
    for new, old in {
        "to_q": "query",
        "to_k": "key",
        "to_v": "value",
        "to_out.0": "proj_attn",
    }.items():
        state = {
            key.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): one
            for key, one in state.items()
        }
    # of weight and bias, in encoder and decoder
    assert sum("attentions.0.query" in key for key in state) == 4
    save_file(state, tmp_path / FILES[1], metadata={"format": "pt"})
    found = [find(folder) for folder in (tiny_vae, tmp_path)]
    latents = torch.randn(1, 4, 4, 4)
    assert found[0][:-1] == found[1][:-1] and found[1].scale == 0.18215
    assert torch.equal(*(Decoder(space, CPU).decode(latents) for space in found))
