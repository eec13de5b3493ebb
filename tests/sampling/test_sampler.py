"""The denoising loop: the bits of steps, every process with every kind of network, captured
steps.
"""

import weakref
from functools import partial

import pytest
import torch
from networks import DEVICES, error, network_of, sample, small

from accel.fast.conditioning import ConditioningTable
from accel.runtime import graphs
from accel.runtime.network import EagerNetwork
from accel.sampling import denoise
from accel.sampling.ancestral import Ancestral, Ddim
from accel.sampling.flow import Euler, Heun, Sde
from accel.sampling.guidance import Guidance, Unguided
from accel.sampling.solvers import Solver
from diffusion import create_diffusion

Z = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 5, 5])
PROCESSES = {
    "ancestral": Ancestral(6),
    "ddim": Ddim(6, eta=0.5),
    "solver": Solver("unipc", 6),
    "euler": Euler(6),
    "heun": Heun(6),
    "sde": Sde(6),
}


def model_of(name):
    model = small(learn_sigma=name not in ("euler", "heun", "sde"))
    # a velocity of the size of x: latents stay near one
    model.final_layer.linear.weight.data.mul_(0.2)
    return model


def small_table(network):
    """A conditioning table of two evaluations of four labels."""
    bias = network.conditioning.bias
    return ConditioningTable(network.conditioning, 8 * bias.numel() * 4)


@pytest.mark.parametrize("learn_sigma", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 7, 25, 250, 333, 1000])
@pytest.mark.parametrize("eta", [None, 0.0, 0.5])
def test_a_step_has_the_bits_of_upstreams(eta, steps, learn_sigma):
    """The first, a middle and the last one, in ancestral sampling (None) and DDIM."""
    theirs = create_diffusion(str(steps), learn_sigma=learn_sigma)
    process = Ancestral(steps, learn_sigma)
    make = theirs.p_sample
    if eta is not None:
        process = Ddim(steps, learn_sigma, eta)
        make = partial(theirs.ddim_sample, eta=eta)
    assert process.times() == theirs.timestep_map[::-1]
    generator = torch.Generator().manual_seed(steps)
    for index in {0, steps // 2, steps - 1}:
        x, noise, *out = torch.randn(2 + 1 + learn_sigma, 2, 4, 5, 5, generator=generator)
        out = torch.cat(out, 1)
        at = torch.full((2,), index)
        (got,) = process.step((x,), at, noise, [lambda x, out=out: out])
        t = steps - 1 - at
        want = make(lambda x, t, out=out: out, x, t, clip_denoised=False, noise=noise)["sample"]
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("name", PROCESSES)
def test_every_network_gives_the_same_latents(name):
    """The plain one and the accelerated tiers; conditioning hoisted, whole or in small
    chunks, and not; a share of the batch. The random state is the same after all; on_step
    sees every step's result.
    """
    process = PROCESSES[name]
    results = []
    seen = []
    fast = [network_of(model_of(name), tier) for tier in ("fp32", "fp32", "fp32", "exact", "fp16")]
    fast[0].precomputes_conditioning = False
    fast[1].table = small_table(fast[1])
    for network in (EagerNetwork(model_of(name)), *fast):
        torch.manual_seed(1)
        seen.clear()
        latents = sample(
            network,
            process,
            Z,
            LABELS,
            3.0,
            on_step=lambda index, x: seen.append((index, x.clone())),
        )
        assert torch.equal(seen[-1][1], latents) and seen[-1][0] == process.steps - 1
        results.append((latents, torch.get_rng_state()))
        torch.manual_seed(1)
        part = sample(network, process, Z, LABELS, 3.0, rows=slice(1, 3))
        assert error(part, latents[1:].double()) < 1e-4 and torch.equal(
            torch.get_rng_state(), results[0][1]
        )
    errors = [error(latents, results[0][0].double()) for latents, _ in results[1:]]
    assert max(errors[:4]) < 1e-5 and errors[4] < 1e-2, errors
    assert fast[2].table is not None and fast[0].table is None


class OnGpu(torch.Tensor):
    """A tensor on the CPU that the loop takes for one on a GPU."""

    is_cuda = True


# Each is sampled in turn: twelve numbers of pictures, twelve scales, and guidance at some levels.
REQUESTS = [(n, Guidance(4.0, 8)) for n in range(1, 13)]
REQUESTS += [(2, Guidance(scale, 8)) for scale in range(2, 14)]
REQUESTS += [(2, Guidance(3.0, 8, interval=(0.2, 0.7))), (2, Unguided(noise_rows=2))]


@DEVICES
@pytest.mark.parametrize("name", ["ancestral", "heun"])
def test_few_captured_steps_serve_all_requests(name, device, monkeypatch):
    """At most four graphs are alive; one serves every scale; the latents are those of steps that
    are not captured. On a CPU a replay evaluates the step again.
    """
    captures = []
    capture = graphs.capture

    def on_cpu(step):
        output = step()

        def replay():
            for tensor, again in zip(as_tuple(output), as_tuple(step()), strict=True):
                tensor.copy_(again)

        return output, replay

    def counted(step):
        output, replay = (on_cpu if device == "cpu" else capture)(step)
        graph = partial(replay)  # a bound method has no weak references
        captures.append(weakref.ref(graph))
        return output, graph

    monkeypatch.setattr(graphs, "capture", counted)
    model = small(depth=1, learn_sigma=name != "heun")
    direct, captured = (
        EagerNetwork(model) if device == "cpu" else network_of(model, "fp16", device)
        for _ in range(2)
    )
    direct.captures = False
    captured.captures = True
    new = []
    for n, guidance in REQUESTS:
        z, noise = torch.randn(2, n, 4, 8, 8, generator=torch.Generator().manual_seed(n)).to(device)
        how = dict(labels=torch.arange(n, device=device) % 8, draw=lambda noise=noise: noise)
        want = denoise(direct, PROCESSES[name], guidance, z, **how)
        z = z.as_subclass(OnGpu) if device == "cpu" else z
        before = len(captures)
        got = denoise(captured, PROCESSES[name], guidance, z, **how)
        assert torch.equal(got.as_subclass(torch.Tensor), want) and want.std() > 0.1
        new.append(len(captures) - before)
        assert sum(graph() is not None for graph in captures) <= 4
    assert all(new[:12]) and not any(new[13:24]) and new[-1]


def as_tuple(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("scale", (4.0, None))
def test_captured_is_direct(name, scale):
    """Bit for bit: all steps, over chunks of the table, twice through the same graph with
    other labels, and a share of the batch.
    """
    direct, captured = (network_of(model_of(name), "fp16", "cuda") for _ in range(2))
    direct.captures = False
    direct.table = small_table(direct)
    captured.table = small_table(captured)
    for labels in ([0, 1, 2], [7, 7, 5]):
        for rows in (slice(None), slice(1, 3)):
            results = []
            for network in (direct, captured):
                torch.manual_seed(0)
                y = torch.tensor(labels, device="cuda")
                results.append(sample(network, PROCESSES[name], Z.cuda(), y, scale, rows=rows))
            assert results[0].isfinite().all() and torch.equal(*results)
    assert captured.graphs and not direct.graphs
