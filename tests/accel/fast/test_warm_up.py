"""What loading warms up is what a run then launches: the batch rows of this rank and this batch, nothing else.

By notes of what the ops are called with, which needs no GPU.
"""

import pytest
import torch
from networks import sample, settings_of, small

from accel import fast, loading
from accel.diffusion import create_diffusion
from accel.fast import ops
from accel.fast.network import FastNetwork
from accel.kernels import linear, split_linear
from accel.network import Network
from accel.parallel.layouts import Layout
from accel.parallel.placement import Placement
from accel.request import FidRequest, GridRequest
from accel.sampling.ancestral import Ancestral

CPU = torch.device("cpu")
COMMON = dict(model="DiT-Demo/2", image_size=64, num_classes=8)  # the latent of `small`
GRID = settings_of(GridRequest(**COMMON, labels=(1, 2, 3)))
EIGHT = settings_of(GridRequest(**COMMON, labels=tuple(range(8))))
FID, UNGUIDED_FID = (
    settings_of(FidRequest(**COMMON, num_fid_samples=12, per_proc_batch_size=3, cfg_scale=scale))
    for scale in (1.5, 1.0)
)
# Settings, (latents, batch rows of each) that the engine loads for, pictures of a batch, which of them are this rank's.
CASES = {
    "a grid": (GRID, (3, 2), 3, slice(None)),
    "a rank of four": (EIGHT, (2, 2), 8, Placement(world=4, rank=1).pictures(8)),
    "an FID batch": (FID, (3, 2), 3, slice(None)),
    "an FID batch without guidance": (UNGUIDED_FID, (3, 1), 3, slice(None)),
}


def scale_of(options):
    return options.cfg_scale if options.guided else None


@pytest.fixture
def launched(monkeypatch):
    """What kernels are called with, as far as their machine code or the choice of it depends on that."""
    seen = set()

    def note(owner, name, describe, method=False):
        op = getattr(owner, name)

        def noted(*arguments, **how):
            seen.add(describe(*arguments, **how))
            return op(*arguments, **how)

        method = method or not isinstance(owner, type)
        monkeypatch.setattr(owner, name, noted if method else staticmethod(noted))

    def adaln(x, modulation, shift, scale, branches, update, *more, **how):
        return "adaln", tuple(x.shape), tuple(branch.dtype for branch, _ in branches), update, more, str(how)

    def split_layer(layer, x):
        return "split", x.pair[0, ..., 0].numel(), layer.name.split(".", 2)[2], x.scale is None

    def embed(x, weight, position, first, copies):
        return "embed", tuple(x.shape), len(position), copies

    note(FastNetwork, "patch_embed", embed)
    note(ops, "adaln", adaln)
    note(ops, "adaln_split", adaln)
    note(ops, "attention", lambda qkv, heads: ("attention", tuple(qkv.shape), qkv.dtype, heads))
    note(ops, "split_attention", lambda qkv, heads: ("attention", tuple(qkv.pair.shape), heads))
    note(linear.Linear, "prepare", lambda layer, m: ("linear", *layer.shape(m), layer.weight.dtype), method=True)
    note(
        linear.Linear,
        "__call__",
        lambda layer, x: ("linear", *layer.shape(x[..., 0].numel()), x.dtype),
        method=True,
    )
    note(split_linear.SplitLinear, "__call__", split_layer, method=True)
    return seen


def load(tier, batch):
    return fast.load(small().state_dict(), small().to("meta"), tier, CPU, *batch)


def noted_run(launched, network, options, pictures, rows):
    """What two steps launch."""
    launched.clear()
    z, labels = torch.randn(pictures, 4, 8, 8), torch.arange(pictures)
    sample(network, Ancestral(create_diffusion("2")), z, labels, scale_of(options), rows=rows)
    return set(launched)


@pytest.mark.parametrize("tier", ("fp16", "exact"))
@pytest.mark.parametrize("case", CASES)
def test_what_is_warmed_up_is_what_runs(case, tier, launched):
    options, batch, pictures, rows = CASES[case]
    network = load(tier, batch)
    warmed_up = set(launched)
    gemm = "linear" if tier == "fp16" else "split"
    assert sorted(note[0] for note in warmed_up) == sorted(["embed", "attention", *4 * ["adaln", gemm]])
    run = noted_run(launched, network, options, pictures, rows)
    assert run == warmed_up
    launched.clear()
    assert not loading.overflows(network, loading.Batch([batch], 8, 8), CPU, (500,))
    assert launched == run


class OneOfTwo(Network):
    """A rank that evaluates one of the two batch rows of a guided picture, as accel.parallel.sharded has it; what the
    other rank would send is its own."""

    def __init__(self, network):
        super().__init__()
        self.network, self.patch_size, self.in_channels = network, network.patch_size, network.in_channels

    def tokens(self, x, t, y):
        mine = self.network.tokens(x, t[:1], y[:1])
        return torch.cat([mine, mine])

    def schedule(self, *how):
        network, advance = self.network.schedule(*how)
        return OneOfTwo(network), advance


def test_a_row_of_a_divided_picture(launched):
    options = settings_of(GridRequest(**COMMON, labels=(3,), parallel="rows=2"))
    network = load("fp16", Placement(Layout(rows=2), 2).rows(1, 2))
    warmed_up = set(launched)
    assert noted_run(launched, OneOfTwo(network), options, 1, slice(None)) == warmed_up
