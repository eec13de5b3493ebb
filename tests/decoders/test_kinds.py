"""A kind of decoder is a folder: put into accel/decoders/, it works, and nothing else changes."""

import torch

from accel import decoders as latents
from accel.decoders.decoder import Decoder
from accel.decoders.loading import digest, find, kind_names
from accel.io.output import to_uint8
from accel.pipeline import decoder_of

TOY = '''
"""A decoder that repeats pixels: (N, 3, L, L) → (N, 3, 2L, 2L)."""

import torch
from accel.decoders import DecoderKind, LatentSpace


class Repeat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.empty(1))

    def forward(self, z):
        return self.gain * z.repeat_interleave(2, -1).repeat_interleave(2, -2)


class Toy(DecoderKind):
    def matches(self, content):
        return "gain" in content

    def files(self, path, statistics):
        return [path]

    def read(self, files, content):
        return {"of": "toy"}, {"gain": content["gain"]}

    def space(self, files, entries):
        return LatentSpace(channels=3, factor=2, scale=0.5, decoder=files)

    def build(self, entries):
        return Repeat()

    def to_uint8_range(self, pixels):
        return 100 * pixels


KIND = Toy()
'''


def test_a_kind_is_found_by_listing(tmp_path, monkeypatch, capsys):
    before = kind_names()
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text(TOY)
    monkeypatch.setattr(latents, "__path__", [*latents.__path__, str(tmp_path)])
    assert kind_names() == sorted([*before, "toy"])
    torch.save({"gain": torch.tensor([0.25])}, tmp_path / "gain.pt")
    space = find(str(tmp_path / "gain.pt"))
    z = torch.randn(2, 3, 4, 4)
    decoder = decoder_of(space, torch.device("cpu"), "fp16")
    got = decoder.decode(z)
    assert isinstance(decoder, Decoder) and torch.equal(got[:, :, ::2, 1::2], z / 0.5 * 0.25)
    assert "has no float16 version: decoding in float32" in capsys.readouterr().out
    levels = to_uint8(got, decoder.to_uint8_range)
    want = (50 * z[:, :, :1, :1]).clamp(0, 255).to(torch.uint8)
    assert torch.equal(levels[:, :1, :1].permute(0, 3, 1, 2), want)
    first = digest(space)
    torch.save({"gain": torch.tensor([0.5])}, tmp_path / "gain.pt")
    assert digest(find(str(tmp_path / "gain.pt"))) != first


def test_a_kind_without_files_is_given_by_its_name():
    space = find("pixels")
    assert (space.channels, space.factor, space.scale) == (3, 1, 1)
    decoder = decoder_of(space, torch.device("cpu"), "fp16")
    z = torch.randn(2, 3, 4, 4)
    assert torch.equal(decoder.decode(z), z) and digest(space) == "pixels"
    assert decoder.load().precision == "fp32"  # as FID folders record
