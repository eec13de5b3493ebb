"""Every named model has its published sizes."""

import pytest
import torch
from networks import recognise

from accel.checkpoints import facts
from accel.errors import InputRef
from accel.families import constructor_of, families
from accel.tensors.shapes import shapes_only
from scripts.convert_checkpoint import facts_of

DIT = {"XL": (28, 1152, 16), "L": (24, 1024, 16), "B": (12, 768, 12), "S": (12, 384, 6)}
SIZES = {  # name without its patch → blocks, width, heads
    **{
        f"{family}-{size}": DIT[size]
        for family in ("DiT", "SiT", "REPA-SiT", "LightningDiT")
        for size in DIT
    },
    "Large-DiT-600M": (16, 1536, 32),
    "Large-DiT-3B": (32, 3072, 32),
    "Large-DiT-7B": (32, 4096, 32),
    "LightningDiT-1p0B": (24, 1536, 24),
    "LightningDiT-1p6B": (28, 1792, 28),
    "DiT-Demo": (6, 216, 3),
    "SiT-Demo": (6, 216, 3),
    "Large-DiT-Demo": (10, 192, 2),
    "JiT-B": (12, 768, 12),
    "JiT-L": (24, 1024, 16),
    "JiT-H": (32, 1280, 16),
    # trunk and head; heads that divide both
    "DiTDH-XL": (30, 1152, 16),
    "DiTDH-L": (26, 1024, 16),
    "DiTDH-B": (14, 768, 4),
    "DiTDH-S": (14, 384, 2),
}
CHANNELS = {"LightningDiT": 32, "JiT": 3, "DiTDH": 768}  # others: 4 of latents
# The MLP's hidden width of some: 4·D; of SwiGLU int(8/3·D), in Large-DiT rounded up to a
# multiple of 256.
HIDDEN = {"DiT-XL/2": 4608, "SiT-B/4": 3072, "LightningDiT-XL/1": 3072, "LightningDiT-L/2": 2730}
HIDDEN |= {"LightningDiT-B/1": 2048, "LightningDiT-1p0B/1": 4096, "LightningDiT-1p6B/1": 4778}
HIDDEN |= {"DiTDH-XL/1": 3072, "DiTDH-L/1": 2730, "DiTDH-S/1": 1024}
HIDDEN |= {"JiT-B/16": 2048, "JiT-L/32": 2730, "JiT-H/16": 3413}
HIDDEN |= {"Large-DiT-600M/2": 4096, "Large-DiT-3B/2": 8192, "Large-DiT-7B/2": 11008}


MODELS = [name for family in families() for name in family.models]


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    with shapes_only():
        model = constructor_of(name)()
    stem, _, patch = name.partition("/")
    demo = stem.endswith("Demo")
    width = model.blocks[0].adaLN_modulation[1].out_features // 6
    channels = CHANNELS.get(stem.partition("-")[0])
    rows = len(model.y_embedder.embedding_table.weight)
    assert (len(model.blocks), width, model.num_heads) == SIZES[stem]
    assert (model.patch_size, model.in_channels, rows) == (
        int(patch),
        channels or 4,
        9 if demo else 1001,
    )
    assert model.out_channels == (channels or (4 if name == "SiT-Demo/2" else 8))
    if name in HIDDEN:
        of_mlp = [
            key for key, value in model.blocks[0].named_parameters() if HIDDEN[name] in value.shape
        ]
        assert {"fc2.weight", "w3.weight", "w2.weight"} & {key.partition(".")[2] for key in of_mlp}


STARTS = {"JiT-B": 4, "JiT-L": 8, "JiT-H": 10}  # the first block with the label's tokens
ENTRIES = {"DiTDH-XL/1": 382, "DiTDH-L/1": 334, "DiTDH-B/1": 190, "DiTDH-S/1": 190}


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name.startswith(("JiT", "DiTDH", "L"))]
)
def test_a_published_file_is_recognised(name):
    """Its entries and the model's name suffice, and so do the facts of a converted file."""
    with shapes_only():
        model = constructor_of(name)()
    state = model.state_dict()
    if name.startswith("LightningDiT"):
        head = model.x_embedder.proj.out_channels // model.num_heads
        table = torch.empty(model.pos_embed.shape[1], head, device="meta")
        state |= {f"feat_rope.freqs_{part}": table for part in ("cos", "sin")}
    spec = recognise("x.pt", state, {"model": name})
    assert (spec.model, spec.num_heads, spec.patch_size) == (
        name,
        model.num_heads,
        model.patch_size,
    )
    start = STARTS.get(name.partition("/")[0])
    assert [getattr(one, "in_context_start", None) for one in (model, spec.empty())] == [start] * 2
    assert len(state) == ENTRIES.get(name, len(state))
    written = facts.checked(InputRef("y"), facts_of(spec))
    assert facts_of(recognise("y", state, written)) == facts_of(spec)
