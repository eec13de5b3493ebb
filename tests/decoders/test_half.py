"""The float16 decoder against the float32 one, and the fallback where float16 fails.

On a CPU the kernels' reference implementations run.
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import mistake
from networks import opened

from accel.config.options import Options
from accel.decoders import DecoderFiles, LatentSpace
from accel.decoders.autoencoder_kl import KIND, SD_VAE_FT, KLDecoder
from accel.decoders.autoencoder_kl.half import HalfDecoder
from accel.decoders.float16 import REQUIRED_PSNR
from accel.decoders.loading import FILES, find, load
from accel.errors import UsageError
from accel.families import DEMO
from accel.pipeline import Pipeline, decoder_of
from accel.runtime import precision

CPU = torch.device("cpu")
NO_FILES = DecoderFiles(DEMO, (), KIND)
SPACE = LatentSpace(decoder=NO_FILES)
DEEPER = dict(layers_per_block=2, block_out_channels=[8, 16, 12, 12], mid_block_add_attention=False)


def random_decoder(device=CPU, **config):
    """Random weights whose pictures fill about the range (-1, 1)."""
    config = {
        **SD_VAE_FT,
        **dict(layers_per_block=1, block_out_channels=[8, 8, 16, 16], norm_num_groups=4),
        **config,
    }
    generator = torch.Generator().manual_seed(0)
    decoder = KLDecoder(config)
    for value in decoder.parameters():
        draw = torch.randn(value.shape, generator=generator)
        value.data = draw / value[0].numel() ** 0.5 if value.ndim > 1 else value.data + 0.1 * draw
    return decoder.to(device).eval().requires_grad_(False)


def noise(n, side, device=CPU, seed=1, channels=4):
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(seed)).to(
        device
    )


def checked(plain, precision="fp16", fallback="fp32", space=SPACE, **how):
    decoder = decoder_of(space, next(plain.parameters()).device, precision, fallback, **how)
    decoder.network = plain
    return decoder.load()


def float32(plain, latents, space=SPACE):
    """Pixels by the float32 decoder, a picture at a time, with the process's switches."""
    with torch.inference_mode():
        return torch.cat([plain(space.to_decoder(one)) for one in latents.split(1)])


def psnr(a, b):
    """Return the PSNR in dB of pixels in (-1, 1), a range of 2."""
    return 20 * math.log10(
        2 / (a.clamp(-1, 1) - b.clamp(-1, 1)).double().square().mean().sqrt().item()
    )


@pytest.mark.parametrize("config", ({}, DEEPER, dict(use_post_quant_conv=False)), ids=str)
@torch.inference_mode()
def test_the_same_mathematics(config):
    """The result in float32 has float32's accuracy; in float16 to the rounding of its GEMMs, which
    the check of weights allows.
    """
    plain = random_decoder(**config)
    z = noise(1, 6) / SPACE.scale
    want = plain(z)
    assert 0.1 < want.std() < 2
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 3e-3)):
        got = HalfDecoder(plain, dtype)(z)
        assert got.shape == want.shape and got.dtype == torch.float32 and got.is_contiguous()
        assert (got - want).norm() <= bound * want.norm()


def test_the_demos_decoder_runs_in_float16():
    plain = load(find(DEMO / "vae"), CPU)
    before = torch.get_rng_state()
    decoder = checked(plain)
    assert decoder.precision == "fp16" and torch.equal(torch.get_rng_state(), before)
    z = noise(2, 8, seed=3)
    got = decoder.decode(z)
    want = float32(plain, z)
    assert not torch.equal(got, want) and min(psnr(a, b) for a, b in zip(got, want)) > 70
    assert torch.equal(got[1:], decoder.decode(z[1:]))  # the same alone and in a batch


def overflowing():
    """Between two norms values grow beyond 65504, which float32 does not notice."""
    plain = random_decoder()
    plain.decoder.up_blocks[1].resnets[0].conv1.weight.mul_(1e5)
    return plain


def coarse():
    """Its last layer amplifies float16's rounding a hundredfold."""
    plain = random_decoder()
    plain.decoder.conv_out.weight.mul_(100)
    return plain


@pytest.mark.parametrize("make", (overflowing, coarse))
def test_where_float16_fails_float32_decodes(make, tiny_vae, tmp_path, capsys):
    """Found again at every start, printed in one line; the bits are those of the float32
    decoder.
    """
    from safetensors.torch import save_file

    plain = make()
    z = noise(1, 32, seed=0) / SPACE.scale
    with torch.inference_mode():
        lost = psnr(HalfDecoder(plain)(z), plain(z))
    reason = f"({lost:.1f} dB from float32" if make is coarse else "overflows float16"
    (tmp_path / FILES[0]).write_text((tiny_vae / FILES[0]).read_text())
    save_file(plain.state_dict(), tmp_path / FILES[1])
    run = opened(Options(model="DiT-Demo/2", vae=tmp_path, device="cpu", num_sampling_steps=1))
    # as on a GPU
    settings = replace(run.settings, vae_precision="fp16")
    decoder = Pipeline.load(replace(run, settings=settings)).decoder
    latents = noise(3, 4)
    capsys.readouterr()
    got = torch.cat([decoder.decode(latents[:1]), decoder.decode(latents[1:])])
    [line] = capsys.readouterr().out.splitlines()
    assert reason in line and "decoding in float32" in line and decoder.load().precision == "fp32"
    assert torch.equal(got, float32(plain, latents)) and got.isfinite().all()


WIDE = dict(
    latent_channels=16,
    block_out_channels=[8, 8, 12, 16, 16],
    up_block_types=["UpDecoderBlock2D"] * 5,
)


@pytest.mark.parametrize("gain, precision", ((1.0, "fp16"), (1e6, "fp32")))
def test_the_check_is_in_the_decoders_own_space(gain, precision):
    """The noise that is compared has the space's channels, and its scale decides whether
    float16 holds it.
    """
    config = {**SD_VAE_FT, **WIDE, "latents_mean": [0.0] * 16, "latents_std": [gain] * 16}
    plain = random_decoder(**WIDE)
    space = KIND.space(NO_FILES, config)
    assert (space.channels, space.factor) == (16, 16)
    decoder = checked(plain, space=space)
    z = noise(2, 4, channels=16)
    assert decoder.precision == precision
    got = decoder.decode(z)
    want = float32(plain, z, space)
    assert got.shape == (2, 3, 64, 64) and torch.allclose(got, want, atol=0.01)
    assert torch.equal(got, want) == (precision == "fp32")


def test_a_picture_that_overflows_is_decoded_in_float32(capsys):
    plain = random_decoder()
    decoder = checked(plain, fallback="tf32")
    latents = noise(4, 4)
    latents[[1, 3]] *= 1e6  # beyond float16; in float32 the norms cancel it
    assert capsys.readouterr().out == ""
    got = decoder.decode(latents)
    want = float32(plain, latents)
    [line] = capsys.readouterr().out.splitlines()
    assert "overflows the float16 decoder" in line and want.isfinite().all()
    assert [torch.equal(a, b) for a, b in zip(got, want)] == [False, True, False, True]
    assert torch.equal(got, torch.cat([decoder.decode(one) for one in latents.split(1)]))
    assert capsys.readouterr().out == ""  # said once
    plain.decoder.conv_out.bias[1] = float("nan")
    with mistake("vae", "finite"):
        decoder.decode(latents)


@pytest.mark.gpu
@torch.inference_mode()
def test_sd_vae_ft_at_512px():
    device = torch.device("cuda")
    plain = random_decoder(device, **SD_VAE_FT)
    z = noise(2, 64, device)
    with precision.arithmetic("fp32"):
        want = float32(plain, z)
        assert torch.equal(checked(plain, "fp32").decode(z), want)
    with precision.arithmetic("fp16"):
        decoder = checked(plain, fallback="tf32")
        got = decoder.decode(z)
        assert decoder.precision == "fp16"
        assert min(psnr(a, b) for a, b in zip(got, want)) > REQUIRED_PSNR
        assert torch.equal(got, decoder.decode(z)) and torch.equal(got[1:], decoder.decode(z[1:]))


@pytest.mark.gpu
def test_a_captured_decoder_gives_the_direct_ones_bits(capsys):
    """A picture that overflows is decoded in float32 all the same."""
    device = torch.device("cuda")
    plain = random_decoder(device, **SD_VAE_FT)
    latents = noise(4, 32, device)
    latents[[1, 3]] *= 1e6
    with precision.arithmetic("fp16"):
        want = float32(plain, latents)
        direct, captured = (
            checked(plain, fallback="tf32", use_graph=use_graph) for use_graph in (False, True)
        )
        got = [decoder.decode(latents) for decoder in (direct, captured, captured)]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    assert [torch.equal(a, b) for a, b in zip(got[1], want)] == [False, True, False, True]
    assert capsys.readouterr().out.count("overflows the float16 decoder") == 2  # once each


@pytest.mark.gpu
@pytest.mark.parametrize("use_graph", [False, True])
def test_a_picture_that_does_not_fit_is_one_line(use_graph):
    device = torch.device("cuda")
    decoder = decoder_of(find(DEMO / "vae"), device, "fp16", "tf32", use_graph)
    decoder.decode(noise(1, 16, device))
    free = torch.cuda.memory_reserved() + 2**26
    torch.cuda.set_per_process_memory_fraction(
        free / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with pytest.raises(UsageError):
            decoder.decode(noise(1, 256, device))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert decoder.decode(noise(1, 16, device)).isfinite().all()
