"""The accelerated network against the one written from the paper in float64, on a CPU by its twins and on a GPU by its kernels."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accel.conditioning import HoistedConditioning
from conftest import ROOT, fill
from reference_dit import dit

from accel import engine
from accel import fast as fast_module
from accel.fast import FastDiT, Optimisations, accelerate, hoist_conditioning
from accel.options import SamplingOptions, UsageError
from diffusion import create_diffusion
from models import DiT, DiT_models

CPU = torch.device("cpu")
SMALL = (
    ("DiT-Demo/2", {}),
    ("DiT-S/4", dict(input_size=8)),
    ("DiT-S/8", dict(input_size=32)),
    ("DiT-S/2", dict(input_size=6, learn_sigma=False, num_classes=5)),
)


def build(name, seed=0, **arguments):
    return fill(DiT_models[name](**arguments), seed)


def small():
    """Two heads of 72 as in XL, two blocks."""
    return fill(DiT(input_size=8, hidden_size=144, depth=2, num_heads=2, num_classes=8))


def inputs(model, n, device="cpu", seed=1, same_t=False):
    """Latents, timesteps and labels; among the labels the null one."""
    generator = torch.Generator().manual_seed(seed)
    side, classes = model.x_embedder.img_size[0], model.y_embedder.num_classes
    x = torch.randn(n, 4, side, side, generator=generator)
    t = torch.randint(0, 1000, (1 if same_t else n,), generator=generator).expand(n).contiguous()
    y = torch.randint(0, classes, (n,), generator=generator)
    y[n // 2 :] = classes
    return x.to(device), t.to(device), y.to(device)


def guided(out, scale):
    """Guidance written out: three channels of both halves get the same estimate."""
    n = len(out) // 2
    out = out.clone()
    for channel in range(3):
        both = out[n:, channel] + scale * (out[:n, channel] - out[n:, channel])
        out[:n, channel], out[n:, channel] = both, both
    return out


def error(got, want):
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("name, arguments", SMALL)
def test_float64_is_the_network_of_the_paper(name, arguments):
    model = build(name, **arguments)
    fast = FastDiT(model.state_dict(), model.num_heads, torch.float64, CPU)
    x, t, y = inputs(model, 5)
    want = dit(model.state_dict(), x, t, y, model.num_heads, model.patch_size)
    # The sinusoid is float32 by contract, the reference's is float64.
    assert error(fast.forward(x.double(), t, y), want) < 1e-5
    x, t, y = inputs(model, 6)
    want = dit(model.state_dict(), torch.cat([x[:3], x[:3]]), t, y, model.num_heads, model.patch_size)
    assert error(fast.forward_with_cfg(x.double(), t, y, 3.5), guided(want, 3.5)) < 1e-5


@pytest.mark.parametrize("precision, tolerance", (("fp32", 1e-6), ("fp16", 1.5e-3), ("bf16", 1e-2)))
def test_precisions_on_the_cpu(precision, tolerance):
    model = build("DiT-Demo/2")
    fast = accelerate(model, precision)
    x, t, y = inputs(model, 4)
    with torch.no_grad():
        want = model.double()(x.double(), t, y)
    got = fast(x, t, y)
    assert got.dtype == torch.float32 and error(got, want) < tolerance


def test_the_model_is_read_not_changed():
    model = build("DiT-S/4", input_size=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = accelerate(model, "fp16")
    x, t, y = inputs(model, 2)
    first = fast(x, t, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for value in model.parameters():
        value.data.add_(1)  # and what is read is a copy, in half and in float32
    assert torch.equal(fast(x, t, y), first)


def test_takes_the_original_class():
    """Upstream's class has timm's layers under the same keys; here: any module with the contract's state dict and num_heads."""
    model = build("DiT-S/4", input_size=8)

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.inner = model.num_heads, model

        def state_dict(self):
            return self.inner.state_dict()

    x, t, y = inputs(model, 2)
    with torch.no_grad():
        assert torch.allclose(accelerate(Other(), "fp32")(x, t, y), model(x, t, y), atol=1e-5)


def test_what_is_no_dit_is_refused():
    with pytest.raises(ValueError, match="no blocks.0.attn"):
        accelerate(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="precision 'int8'"):
        accelerate(build("DiT-S/8"), "int8")


@pytest.mark.parametrize("sampler", ("p_sample_loop", "ddim_sample_loop"))
@pytest.mark.parametrize("guidance", (True, False))
def test_in_upstreams_loops(sampler, guidance):
    """accelerate's network where users put a model, against the model itself: eight steps with the same noise."""
    model = small()
    fast, diffusion = accelerate(model, "fp32"), create_diffusion("8")
    y = torch.tensor([1, 3, 8, 8]) if guidance else torch.tensor([1, 3, 5, 7])
    pictures = []
    for network in (model, fast):
        torch.manual_seed(0)
        z = torch.randn(4, 4, 8, 8)
        arguments = dict(y=y, cfg_scale=2.0) if guidance else dict(y=y)
        call = network.forward_with_cfg if guidance else network.forward
        pictures.append(
            getattr(diffusion, sampler)(call, z.shape, z, clip_denoised=False, model_kwargs=arguments, device="cpu")
        )
    assert error(pictures[1], pictures[0].double()) < 1e-5


@pytest.mark.parametrize("guided", (True, False))
def test_in_our_loop(guided):
    """engine.denoise hoists the accelerated network's conditioning; the latents are those of the plain network, and so is the random state."""
    model, diffusion = small(), create_diffusion("6")
    z, labels = torch.randn(3, 4, 8, 8), torch.tensor([0, 3, 3])
    results = []
    for network in (
        model,
        FastDiT(model.state_dict(), 2, torch.float32, CPU),
        FastDiT(model.state_dict(), 2, torch.float32, CPU, Optimisations(hoist=False)),
    ):
        torch.manual_seed(1)
        sums = torch.zeros(6)
        results.append(
            (
                engine.denoise(network, diffusion, z, labels, 3.0, 8, guided=guided, sums=sums),
                sums,
                torch.get_rng_state(),
            )
        )
    for latents, sums, state in results[1:]:
        assert error(latents, results[0][0].double()) < 1e-5 and torch.equal(state, results[0][2])
        assert torch.allclose(sums[-1], latents.sum())
    assert results[1][0].isfinite().all() and len(set(sums.tolist())) == 6


def test_latents_that_are_not_finite_name_the_step(tmp_path, monkeypatch):
    torch.save(fill(DiT_models["DiT-Demo/2"]()).state_dict(), tmp_path / "x.pt")
    options = SamplingOptions(
        model="DiT-Demo/2",
        ckpt=str(tmp_path / "x.pt"),
        num_sampling_steps=5,
        labels=(1,),
        output_type="latent",
        output=str(tmp_path / "x.npy"),
        device="cpu",
    ).resolve()
    run = engine.Engine(options)
    forward = run.network.forward_with_cfg
    run.network.forward_with_cfg = lambda x, t, y, scale: forward(x, t, y, scale) * (float("nan") if t[0] < 600 else 1)
    with pytest.raises(UsageError, match="--precision fp32: .* not finite from step 3 of 5 on; check the weights"):
        run.run()
    run.precision = "fp16"  # on a GPU, with bfloat16 and, like a V100, without
    for supported, remedy in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(engine.precision, "supports", lambda tier, device: supported)
        with pytest.raises(
            UsageError, match=f"--precision fp16: .* not finite from step 3 of 5 on; use --precision {remedy}"
        ):
            run.run()


def large_inside(model):
    """The same function but for rounding, with values between fc1 and fc2 that float16 does not hold."""
    for block in model.blocks:
        block.mlp.fc1.weight.data.mul_(3e5)
        block.mlp.fc2.weight.data.div_(3e5)
    return model


def test_the_check_for_overflow_leaves_the_random_stream_alone():
    """By the twins: float16 overflows where bfloat16 and float32 do not, and the run's noise is the same whether or not there was a check."""
    options = SamplingOptions(model="DiT-Demo/2", labels=(3,), image_size=64, device="cpu").resolve()
    states = small().state_dict(), large_inside(small()).state_dict()
    before = torch.get_rng_state()
    found = [
        [
            engine.overflows(FastDiT(state, 2, dtype, CPU), options, CPU)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)
        ]
        for state in states
    ]
    assert found == [[False] * 3, [True, False, False]] and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("where", ("sampling", "loading"))
def test_too_little_memory_is_one_line(where, monkeypatch):
    options = SamplingOptions(
        model="DiT-Demo/2", device="cpu", num_sampling_steps=2, labels=(0, 1, 2), output_type="latent"
    ).resolve()

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has ...")

    with pytest.raises(
        UsageError, match="^--labels: DiT-Demo/2 with 3 pictures of 128 px at a time does not fit .* sample fewer.*$"
    ):
        if where == "loading":
            monkeypatch.setattr(engine, "load_model", full)
        run = engine.Engine(options)
        run.network.forward_with_cfg = full
        run.run()


def test_loading_weights_imports_no_compiler():
    """Making the network on the meta device, to check the weights against, must not cost seconds."""
    code = (
        "import sys, torch\nfrom accel import engine\nfrom accel.options import SamplingOptions\n"
        "model = engine.load_model(SamplingOptions(model='DiT-Demo/2').resolve(), torch.device('cpu'))\n"
        "print(model.pos_embed.shape, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([1, 64, 216]) False", done.stdout + done.stderr


class TestHoistedConditioning:
    @pytest.fixture
    def fast(self):
        model = small()
        return FastDiT(model.state_dict(), model.num_heads, torch.float64, CPU)

    @pytest.mark.parametrize("entries", (3, 7, 5000))
    def test_chunks_give_what_every_call_gives(self, fast, entries):
        """One step in the table, two, or all ten; and over two runs with other labels through the same table."""
        vector_bytes = fast.conditioning.bias.numel() * 8
        fast.table = HoistedConditioning(fast.conditioning, entries * vector_bytes)
        timesteps = create_diffusion("10").timestep_map[::-1]
        for labels in ([1, 4, 8], [7, 2, 2]):
            y = torch.tensor(labels)
            x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
            with hoist_conditioning(fast, timesteps, labels) as table:
                assert table.chunk == min(entries, table.capacity) // len(set(labels))
                for index, timestep in enumerate(timesteps):
                    table.reach(index)
                    t = torch.full((3,), timestep)
                    hoisted = fast(x, t, y)
                    fast.hoisted = None
                    assert error(hoisted, fast(x, t, y)) < 1e-12
                    fast.hoisted = table

    def test_what_is_not_in_the_table_is_nan_never_a_picture(self, fast):
        x, y = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.tensor([1, 8])
        with hoist_conditioning(fast, [900, 500], [1, 8]):
            assert fast(x, torch.tensor([900, 500]), y).isfinite().all()
            for t, labels in (([900, 499], [1, 8]), ([900, 500], [1, 2]), ([5000, -3], [1, 8])):
                out = fast(x, torch.tensor(t), torch.tensor(labels))
                assert out[-1].isnan().all()
        assert (
            fast(x, torch.tensor([3, 4]), torch.tensor([1, 2])).isfinite().all()
        )  # outside, every pair is known again

    def test_more_labels_than_a_table_usually_holds(self, fast, monkeypatch):
        """A large batch of an FID job. What is captured on the old table is dropped, and what fits the usual size is computed in the same chunks
        whether or not a larger batch came before: the bits do not depend on what came before."""
        monkeypatch.setattr(
            fast_module, "HoistedConditioning", lambda c, **how: HoistedConditioning(c, 5 * c.bias.numel() * 8, **how)
        )
        fast.captured["a step"] = step = SimpleNamespace(graphs={})
        x, y = torch.randn(9, 4, 8, 8, dtype=torch.float64), torch.arange(9)
        found = []
        for n, together, chunk in ((2, 1, 2), (9, 1, 1), (9, 2, 2), (2, 1, 2)):
            step.graphs["shapes"] = "a graph"
            grows = fast.table is None or fast.table.capacity < n * together
            with hoist_conditioning(fast, [900, 500, 20], range(n), together) as table:
                assert table.chunk == chunk and bool(step.graphs) != grows
                for index, t in enumerate((900, 500, 20)):
                    table.reach(index, *range(index + 1, min(3, index + together)))
                    found.append(fast(x[:n], torch.full((n,), t), y[:n]))
            assert error(found[-1], fast(x[:n], torch.full((n,), 20), y[:n])) < 1e-12
        assert all(torch.equal(a, b) for a, b in zip(found[:3], found[-3:]))

    def test_memory_is_bounded(self, fast):
        table = HoistedConditioning(fast.conditioning, 10 * fast.conditioning.bias.numel() * 8)
        assert table.table.numel() * 8 <= 11 * fast.conditioning.bias.numel() * 8
        with pytest.raises(ValueError, match="sample fewer"):
            table.begin([5], range(11))
        with pytest.raises(ValueError, match="timestep 1000"):
            table.begin([1000], [1])


#################################################################################
#                                   On a GPU                                    #
#################################################################################

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("precision, tolerance", (("fp16", 1.5e-3), ("bf16", 1e-2)))
@pytest.mark.parametrize(
    "name, arguments, n",
    (
        ("DiT-Demo/2", {}, 16),
        ("DiT-S/8", dict(input_size=32), 7),
        ("DiT-B/4", dict(input_size=32), 1),
        ("DiT-L/2", dict(input_size=16), 2),
        ("DiT-XL/2", dict(input_size=32), 4),
    ),
)
def test_half_precision(name, arguments, n, precision, tolerance):
    model = build(name, **arguments).cuda()
    x, t, y = inputs(model, n, "cuda")
    fast = accelerate(model, precision)
    got = [fast(x, t, y).clone() for _ in range(2)]
    with torch.no_grad():
        want = model.double()(x.double(), t, y).cpu()
    assert error(got[0], want) < tolerance
    assert torch.equal(got[0], got[1])  # the first call captures, the second replays


@gpu
@pytest.mark.parametrize("n", (1, 2, 3, 8, 64))
def test_every_switch_computes_the_same(n):
    model = build("DiT-Demo/2").cuda()
    x, t, y = inputs(model, 2 * n, "cuda")
    with torch.no_grad():
        want = model.double().forward_with_cfg(x.double(), t, y, 4.0).cpu()
    plain = Optimisations(rows="torch", products="plain", ends="torch", graph=False)
    for change in (
        {},
        dict(rows="triton"),
        dict(ends="triton"),
        dict(products="epilogue"),
        dict(products="tuned"),
        dict(graph=True),
    ):
        fast = accelerate(model, "fp16", optimisations=replace(plain, **change))
        assert error(fast.forward_with_cfg(x, t, y, 4.0), want) < 3e-3, (
            change
        )  # guidance of 4 multiplies a forward's error


@gpu
def test_the_graph_changes_no_bit():
    """Launched or replayed, on fresh inputs every time."""
    model = build("DiT-Demo/2").cuda()
    direct, captured = (accelerate(model, "fp16", optimisations=Optimisations(graph=graph)) for graph in (False, True))
    for seed in range(5):
        x, t, y = inputs(model, 128, "cuda", seed)
        assert torch.equal(direct.forward_with_cfg(x, t, y, 4.0), captured.forward_with_cfg(x, t, y, 4.0))


def prepared(fast, diffusion, z, labels, **how):
    sums = torch.zeros(diffusion.num_timesteps, device=z.device)
    torch.manual_seed(5)
    latents = engine.denoise(fast, diffusion, z, labels, 4.0, 8, sums=sums, **how)
    return latents, sums


@gpu
@pytest.mark.parametrize("guided", (True, False))
def test_a_captured_run_is_the_direct_run_bit_for_bit(guided):
    """All steps, over chunks of the table, twice through the same graph with other labels and noise, and one share of the batch."""
    model, device = build("DiT-Demo/2").cuda(), torch.device("cuda")
    diffusion = create_diffusion("25")
    direct, captured = (
        FastDiT(model.state_dict(), 3, torch.float16, device, Optimisations(graph=graph)) for graph in (False, True)
    )
    for fast in (direct, captured):
        fast.table = HoistedConditioning(fast.conditioning, 60 * fast.conditioning.bias.numel() * 4)
    for seed, labels in ((0, [0, 1, 2, 3]), (1, [7, 7, 2, 5])):
        z = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        y = torch.tensor(labels, device=device)
        for rows in (slice(None), slice(1, 3)):
            (want, sums), (got, graph_sums) = (
                prepared(fast, diffusion, z, y, guided=guided, rows=rows) for fast in (direct, captured)
            )
            again, _ = prepared(direct, diffusion, z, y, guided=guided, rows=rows)
            assert want.isfinite().all() and torch.equal(again, want), "the direct run itself varies"
            assert torch.equal(graph_sums, sums), (
                f"the first step that differs: {int((graph_sums != sums).nonzero()[0])}"
            )
            assert torch.equal(got, want)
    assert [len(replayed.graphs) for replayed in captured.captured.values()] == [2]  # two shapes, each captured once


@gpu
@pytest.mark.parametrize("guided", (True, False))
def test_a_step_ends_in_the_kernel_as_in_p_sample(guided, monkeypatch):
    from accel.kernels import ancestral

    launched, kernel = [], ancestral._triton
    monkeypatch.setattr(ancestral, "_triton", lambda *arguments: launched.append(1) or kernel(*arguments))
    model, device, diffusion = build("DiT-Demo/2").cuda(), torch.device("cuda"), create_diffusion("25")
    z, y = torch.randn(4, 4, 16, 16, device=device), torch.arange(4, device=device)
    got, want = (
        prepared(
            FastDiT(model.state_dict(), 3, torch.float32, device, Optimisations(ends=ends, graph=False)),
            diffusion,
            z,
            y,
            guided=guided,
            rows=slice(1, 4),
        )[0]
        for ends in ("auto", "torch")
    )
    assert len(launched) == 25 and error(got, want.double().cpu()) < 1e-4


@gpu
def test_no_copy_and_no_wait_between_the_steps():
    model, device = build("DiT-Demo/2").cuda(), torch.device("cuda")
    fast, diffusion = FastDiT(model.state_dict(), 3, torch.float16, device), create_diffusion("10")
    z, labels = torch.randn(4, 4, 16, 16, device=device), torch.arange(4, device=device)
    prepared(fast, diffusion, z, labels)
    with hoist_conditioning(fast, diffusion.timestep_map[::-1], [0, 1, 2, 3, 8]) as table:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            [replayed] = fast.captured.values()
            y, x = torch.cat([labels, torch.full_like(labels, 8)]), z
            for index in range(10):
                table.reach(index)
                x = replayed(
                    x, torch.full((4,), 9 - index, device=device), y, torch.randn(8, 4, 16, 16, device=device)[:4]
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert x.isfinite().all()


@gpu
def test_weights_that_overflow_float16_are_found(tmp_path, capsys):
    torch.save(large_inside(build("DiT-Demo/2")).state_dict(), tmp_path / "large.pt")
    options = SamplingOptions(
        model="DiT-Demo/2",
        ckpt=str(tmp_path / "large.pt"),
        num_sampling_steps=5,
        output_type="latent",
        output=str(tmp_path / "x.npy"),
    )
    chosen = engine.Engine(replace(options).resolve())
    assert chosen.precision == "bf16" and "overflow" in capsys.readouterr().out and chosen.run().isfinite().all()
    with pytest.raises(UsageError, match="--precision fp16: overflows.*bf16"):
        engine.Engine(replace(options, precision="fp16").resolve())
