"""The float16 decoder against the float32 one, and the fallback where float16 fails.

On a CPU the kernels' reference implementations run.
"""

import math

import pytest
import torch

from accel import door, precision, vae
from accel.families import DEMO
from accel.graphs import Replayed
from accel.options import GridOptions, UsageError
from accel.vae.decoder import SD_VAE_FT, Decoder
from accel.vae.half import HalfDecoder
from accel.vae.lazy import LazyDecoder

CPU = torch.device("cpu")
SHAPES = {
    "sd-vae-ft in small": {},
    "deeper, without attention": dict(
        layers_per_block=2, block_out_channels=[8, 16, 12, 12], mid_block_add_attention=False
    ),
    "without the convolution before": dict(use_post_quant_conv=False),
}


def random_decoder(device=CPU, gain=1.0, seed=0, **config):
    """Random weights whose pictures fill about the range (-1, 1)."""
    config = {**SD_VAE_FT, **dict(layers_per_block=1, block_out_channels=[8, 8, 16, 16], norm_num_groups=4), **config}
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    for value in decoder.parameters():
        draw = torch.randn(value.shape, generator=generator)
        value.data = draw * (gain / value[0].numel() ** 0.5) if value.ndim > 1 else value.data + 0.1 * draw
    return decoder.to(device).eval().requires_grad_(False)


def noise(n, side, device=CPU, seed=1):
    return torch.randn(n, 4, side, side, generator=torch.Generator().manual_seed(seed)).to(device)


def psnr(a, b):
    return 20 * math.log10(2 / (a.clamp(-1, 1) - b.clamp(-1, 1)).double().square().mean().sqrt().item())


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_the_same_mathematics(config):
    """In float32 to float32's accuracy; in float16 to the rounding of its GEMMs, which the check of weights allows."""
    plain, z = random_decoder(**config), noise(1, 6) / vae.SCALE
    want = plain(z)
    assert 0.1 < want.std() < 2
    for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 3e-3)):
        got = HalfDecoder(plain, dtype)(z)
        assert got.shape == want.shape and got.dtype == torch.float32 and got.is_contiguous()
        assert (got - want).norm() <= bound * want.norm()


def test_the_demos_decoder_runs_in_float16():
    plain = vae.load_vae(DEMO / "vae", CPU)
    checked = vae.CheckedDecoder(plain, "fp16", "fp32")
    assert checked.precision == "fp16" and checked.refusal is None
    z = noise(2, 16, seed=3)
    got, want = vae.decode(checked, z), vae.decode(plain, z)
    assert not torch.equal(got, want) and min(psnr(a, b) for a, b in zip(got, want)) > 70
    assert torch.equal(got[1:], vae.decode(checked, z[1:]))  # the same alone and in a batch


def test_checking_leaves_the_random_stream_alone():
    plain = random_decoder()
    torch.manual_seed(5)
    want = torch.randn(3)
    torch.manual_seed(5)
    vae.CheckedDecoder(plain, "fp16", "fp32")
    assert torch.equal(torch.randn(3), want)


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


@pytest.mark.parametrize("make, reason", ((overflowing, "overflows float16"), (coarse, "dB from float32")))
def test_where_float16_fails_float32_decodes(make, reason, tiny_vae, tmp_path, capsys):
    """Found again at every start, printed in one line; the bits are those of the float32 decoder."""
    from safetensors.torch import save_file

    plain = make()
    (tmp_path / vae.FILES[0]).write_text((tiny_vae / vae.FILES[0]).read_text())
    save_file(plain.state_dict(), tmp_path / vae.FILES[1])
    options = GridOptions(
        model="DiT-Demo/2", vae=str(tmp_path), device="cpu", labels=(0,), num_sampling_steps=1
    ).resolve()
    decoder = door.decoder_of(door.open_weights(options, CPU)._replace(vae_precision="fp16"))  # as on a GPU
    latents = noise(3, 4)
    capsys.readouterr()
    got = torch.cat([decoder.decode(latents[:1]), decoder.decode(latents[1:])])
    [line] = capsys.readouterr().out.splitlines()
    assert reason in line and "decoding in float32" in line and decoder.load().precision == "fp32"
    assert torch.equal(got, vae.decode(plain, latents)) and got.isfinite().all()


@torch.inference_mode()
def test_the_refusal_names_the_psnr_over_the_whole_range():
    """Pixels lie in (-1, 1): a range of 2."""
    plain = coarse()
    z = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(0)) / vae.SCALE
    lost = psnr(HalfDecoder(plain)(z), plain(z))
    assert f"({lost:.1f} dB from float32" in vae.CheckedDecoder(plain, "fp16", "fp32").refusal


def test_a_picture_that_overflows_is_decoded_in_float32(capsys):
    plain = random_decoder()
    checked = vae.CheckedDecoder(plain, "fp16", "tf32")
    latents = noise(4, 4)
    latents[[1, 3]] *= 1e6  # beyond float16; in float32 the norms cancel it
    assert capsys.readouterr().out == ""
    got, want = vae.decode(checked, latents), vae.decode(plain, latents)
    [line] = capsys.readouterr().out.splitlines()
    assert "overflows the float16 decoder" in line and want.isfinite().all()
    assert [torch.equal(a, b) for a, b in zip(got, want)] == [False, True, False, True]
    assert torch.equal(got, torch.cat([vae.decode(checked, one) for one in latents.split(1)]))
    assert capsys.readouterr().out == ""  # said once


def test_a_decoder_that_gives_nan_stops_the_run():
    """As bytes, NaN would be black."""
    folder = DEMO / "vae"
    decoder = LazyDecoder(str(folder), folder, "fp32", "fp32", CPU)
    decoder.load().plain.decoder.conv_out.bias[1] = float("nan")
    with pytest.raises(UsageError, match="vae=.*demo/vae: decodes finite latents to pixels that are not finite"):
        decoder.decode(noise(1, 4))


def test_which_arithmetic(monkeypatch):
    have = {"fp16", "tf32", "bf16", "exact"}
    monkeypatch.setattr(precision, "supports", lambda tier, device: tier == "fp32" or tier in have)

    def choose(tier, wanted="auto"):
        return precision.decoder_precision(wanted, tier, CPU)

    assert [choose(tier) for tier in precision.TIERS] == ["fp32", "fp32", "tf32", "fp16", "fp16"]
    assert [choose("fp16", name) for name in ("fp32", "tf32", "fp16")] == ["fp32", "tf32", "fp16"]
    assert [precision.float32_decoder(tier, CPU) for tier in precision.TIERS] == ["fp32"] * 2 + ["tf32"] * 3
    have.remove("tf32")  # a V100
    assert choose("fp16") == "fp16" and precision.float32_decoder("fp16", CPU) == "fp32"
    with pytest.raises(ValueError, match="vae_precision=tf32"):
        choose("fp16", "tf32")


@pytest.mark.parametrize("name, flags", (("fp32", (False, False)), ("tf32", (True, True))))
def test_float32s_switches_are_set_inside_only(name, flags, switches):
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = not flags[0], True
    with precision.convolutions(name):
        assert switches() == flags
    assert switches() == (True, not flags[0])


#################################################################################
#                                   On a GPU                                    #
#################################################################################


@pytest.mark.gpu
@torch.inference_mode()
def test_sd_vae_ft_at_512px(switches):
    device = torch.device("cuda")
    config = dict(SD_VAE_FT)
    plain = random_decoder(
        device, **{name: config[name] for name in ("layers_per_block", "block_out_channels", "norm_num_groups")}
    )
    z = noise(2, 64, device)
    precision.apply_precision("fp32", device)
    want = vae.decode(plain, z)
    assert torch.equal(vae.decode(vae.CheckedDecoder(plain, "fp32", "fp32"), z), want)
    precision.apply_precision("fp16", device)
    checked = vae.CheckedDecoder(plain, "fp16", "tf32")
    got = vae.decode(checked, z)
    assert checked.precision == "fp16" and min(psnr(a, b) for a, b in zip(got, want)) > vae.REQUIRED_PSNR
    assert torch.equal(got, vae.decode(checked, z)) and torch.equal(got[1:], vae.decode(checked, z[1:]))


@pytest.mark.gpu
def test_a_captured_decoder_gives_the_direct_ones_bits(switches, capsys):
    """From one graph; a picture that overflows is decoded in float32 all the same."""
    device = torch.device("cuda")
    precision.apply_precision("fp16", device)
    plain = random_decoder(device, **SD_VAE_FT)
    latents = noise(4, 32, device)
    latents[[1, 3]] *= 1e6
    want = vae.decode(plain, latents)
    direct, captured = (vae.CheckedDecoder(plain, "fp16", "tf32", captured) for captured in (False, True))
    got = [vae.decode(decoder, latents) for decoder in (direct, captured, captured)]
    assert isinstance(captured.half, Replayed) and len(captured.half.graphs) == 1
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    assert [torch.equal(a, b) for a, b in zip(got[1], want)] == [False, True, False, True]
    assert capsys.readouterr().out.count("overflows the float16 decoder") == 2  # once each


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_picture_that_does_not_fit_is_one_line(captured, switches):
    device, folder = torch.device("cuda"), DEMO / "vae"
    decoder = LazyDecoder(str(folder), folder, "fp16", "tf32", device, captured)
    decoder.decode(noise(1, 16, device))
    free = torch.cuda.memory_reserved() + 2**26
    torch.cuda.set_per_process_memory_fraction(free / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(UsageError, match="does not fit in free GPU memory"):
            decoder.decode(noise(1, 256, device))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert decoder.decode(noise(1, 16, device)).isfinite().all()
