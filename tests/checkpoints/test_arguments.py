"""Arguments of training in files: the families' own programs', and those of other programs."""

import argparse
import json

import numpy as np
import pytest
import test_jit
import test_rae
import torch
import yaml
from conftest import fill, mistake
from forks import refused, succeeds
from networks import build, identify, small, transformer, weights_at
from safetensors.torch import save_file
from test_lightning_dit import as_file
from test_lightning_dit import build as build_lightning

from accel import Sampler
from accel.errors import UsageError
from accel.families.identify import UserFacts
from accel.families.large_dit.network import Large_DiT_models
from accel.families.sit.network import SiT, SiT_models

# Defaults of the programs that train each family.
COMMON = dict(results_dir="results", image_size=64, num_classes=8, vae="ema", num_workers=4)
COMMON |= dict(global_batch_size=256, global_seed=0, log_every=100, ckpt_every=50000)
OF_DIT = dict(COMMON, data_path="/data", model="DiT-XL/2", epochs=1400)
OF_FAST_DIT = dict(COMMON, feature_path="features", model="DiT-XL/2", epochs=1400)
OF_SIT = dict(OF_DIT, model="SiT-XL/2", sample_every=10000, cfg_scale=4.0, wandb=False, ckpt=None)
OF_SIT |= dict(path_type="Linear", prediction="velocity", loss_weight=None)
OF_SIT |= dict(sample_eps=None, train_eps=None)
OF_REPA = dict(output_dir="exps", exp_name="x", logging_dir="logs", report_to="wandb")
OF_REPA |= dict(sampling_steps=10000, resume_step=0, model="SiT-XL/2", num_classes=8)
OF_REPA |= dict(encoder_depth=8, fused_attn=True, qk_norm=False, data_dir="../data/imagenet256")
OF_REPA |= dict(resolution=64, batch_size=256, allow_tf32=False, mixed_precision="fp16")
OF_REPA |= dict(epochs=1400, max_train_steps=400000, checkpointing_steps=50000, legacy=False)
OF_REPA |= dict(gradient_accumulation_steps=1, learning_rate=1e-4, adam_beta1=0.9, seed=0)
OF_REPA |= dict(adam_beta2=0.999, adam_weight_decay=0.0, adam_epsilon=1e-8, max_grad_norm=1.0)
OF_REPA |= dict(num_workers=4, path_type="linear", prediction="v", cfg_prob=0.1)
OF_REPA |= dict(enc_type="dinov2-vit-b", proj_coeff=0.5, weighting="uniform")
OF_LARGE_DIT = dict(COMMON, data_path="/data", model="DiT_Llama_Demo_patch2", max_steps=100000)
OF_LARGE_DIT |= dict(micro_batch_size=1, master_port=8964, data_parallel="sdp", precision="bf16")
OF_LARGE_DIT |= dict(grad_precision="fp32", local_diffusers_model_root=None, lr=1e-4)
OF_LARGE_DIT |= dict(auto_resume=True, resume=None, init_from=None, grad_clip=2.0, wd=0.0)
OF_LARGE_DIT |= dict(qk_norm=True, image_size=128)
OF_JIT = dict(model="JiT-B/16", img_size=32, attn_dropout=0.0, proj_dropout=0.0, epochs=200)
OF_JIT |= dict(warmup_epochs=5, batch_size=128, lr=None, blr=5e-5, min_lr=0.0, weight_decay=0.0)
OF_JIT |= dict(lr_schedule="constant", ema_decay1=0.9999, ema_decay2=0.9996, P_mean=-0.8)
OF_JIT |= dict(P_std=0.8, noise_scale=1.0, t_eps=0.05, label_drop_prob=0.1, seed=0, cfg=1.0)
OF_JIT |= dict(start_epoch=0, num_workers=12, pin_mem=True, sampling_method="heun")
OF_JIT |= dict(num_sampling_steps=50, interval_min=0.0, interval_max=1.0, num_images=50000)
OF_JIT |= dict(eval_freq=40, online_eval=False, evaluate_gen=False, gen_bsz=256, resume="")
OF_JIT |= dict(data_path="./data/imagenet", class_num=8, output_dir="./output_dir", gpu=0)
OF_JIT |= dict(save_last_freq=5, log_freq=100, device="cuda", world_size=1, local_rank=-1)
OF_JIT |= dict(dist_on_itp=False, dist_url="env://", rank=0, distributed=True)
OF_JIT |= dict(dist_backend="nccl", in_context_start=test_jit.START)
OF_LIGHTNING_DIT = yaml.safe_load("""
ckpt_path: checkpoint.pt
data: {data_path: /data, fid_reference_file: x.npz, image_size: 64, num_classes: 8,
       num_workers: 8, latent_norm: true, latent_multiplier: 1.0}
vae: {model_name: vavae_f16d32, downsample_ratio: 16}
model: {model_type: LightningDiT-XL/1, use_qknorm: false, use_swiglu: true, use_rope: true,
        use_rmsnorm: true, wo_shift: false, in_chans: 32}
train: {max_steps: 80000, global_batch_size: 1024, global_seed: 0, output_dir: output,
        exp_name: x, ckpt: null, log_every: 100, ckpt_every: 20000, resume: false}
optimizer: {lr: 0.0002, beta2: 0.95}
transport: {path_type: Linear, prediction: velocity, loss_weight: null, sample_eps: null,
            train_eps: null, use_cosine_loss: true, use_lognorm: true}
sample: {mode: ODE, sampling_method: euler, atol: 0.000001, rtol: 0.001, reverse: false,
         likelihood: false, num_sampling_steps: 250, cfg_scale: 10.0, per_proc_batch_size: 4,
         fid_num: 50000, cfg_interval_start: 0.11, timestep_shift: 0.3}
""")


def of_repa():
    """Return a SiT with the heads of training."""
    state = small(SiT, learn_sigma=False).state_dict()
    return {**state, "projectors.0.0.weight": torch.ones(2, 2)}


STATES = {
    "DiT": lambda: small().state_dict(),
    "Large-DiT": lambda: fill(Large_DiT_models["Large-DiT-Demo/2"]()).state_dict(),
    "SiT": lambda: small(SiT).state_dict(),
    "REPA": of_repa,
    "LightningDiT": lambda: as_file(build_lightning()),
    "RAE": lambda: test_rae.build().state_dict(),
    "JiT": lambda: test_jit.build().state_dict(),
}
# No tensor has the number of heads of these small networks.
HEADS = {family: dict(num_heads=2) for family in ("DiT", "SiT", "REPA")}
SIT = dict(num_heads=2, path_type="Linear")
OWN = {  # the file of each family's training program
    "DiT": dict(args=argparse.Namespace(**OF_DIT, **HEADS["DiT"])),
    "Large-DiT": dict(args=argparse.Namespace(**OF_LARGE_DIT)),
    "SiT": dict(args=argparse.Namespace(**OF_SIT, **HEADS["SiT"])),
    "REPA": dict(args=argparse.Namespace(**OF_REPA, **HEADS["REPA"]), steps=400000),
    "LightningDiT": dict(config=OF_LIGHTNING_DIT),
    "RAE": dict(step=1, epoch=1, scheduler={"base_lrs": [2e-4], "last_epoch": 1}),
    "JiT": dict(args=argparse.Namespace(**OF_JIT), epoch=7),
}


@pytest.fixture(scope="module")
def states():
    return {family: make() for family, make in STATES.items()}


@pytest.mark.parametrize(
    "family, content",
    [
        *OWN.items(),
        ("DiT", dict(args=argparse.Namespace(**OF_FAST_DIT, **HEADS["DiT"]))),
        ("DiT", dict(config=yaml.safe_load(yaml.safe_dump({**OF_FAST_DIT, **HEADS["DiT"]})))),
    ],
)
def test_defaults_of_training_programs_are_all_known(family, content, states, tmp_path, capsys):
    optimizer = {
        "state": {0: {"step": 3, "exp_avg": torch.zeros(2)}},
        "param_groups": [{"lr": 1e-4}],
    }
    content = {"model": {}, "ema": states[family], "opt": optimizer, **content}
    torch.save(content, tmp_path / "x.pt")
    found = weights_at(tmp_path / "x.pt").checkpoint()
    assert (found.spec.family.name, found.spec.num_classes) == (family, 8)
    assert "not interpreted" not in capsys.readouterr().out
    assert not found.family_notice


CREATE_DIFFUSION = (
    dict(predict_xstart=True),
    dict(predict_xstart=torch.tensor(True)),
    dict(noise_schedule="cosine"),
    dict(diffusion_steps=4000),
    dict(learn_sigma=False),
)
TRANSPORT = dict(path_type="GVP"), dict(prediction="noise")
REFUSED = {
    "DiT": CREATE_DIFFUSION,
    "Large-DiT": (*CREATE_DIFFUSION, dict(qk_norm=False), dict(norm_eps=1e-6)),
    "SiT": (*TRANSPORT, dict(prediction="score"), dict(learn_sigma=False)),
    "REPA": (dict(path_type="cosine"), dict(prediction="x"), dict(qk_norm=True)),
    "RAE": (*TRANSPORT, dict(use_rope=False), dict(wo_shift=True), dict(patch_size=2)),
    "LightningDiT": (
        *(dict(transport=dict(each)) for each in TRANSPORT),
        dict(model=dict(use_swiglu=False)),
        dict(sample=dict(reverse=True)),
        dict(sample=dict(mode="SDE")),
    ),
    "JiT": (dict(in_context_start=4), dict(noise_scale=0.0), dict(t_eps="x")),
}


@pytest.mark.parametrize(
    "family, arguments", [(family, each) for family, given in REFUSED.items() for each in given]
)
def test_a_value_that_is_not_supported_is_refused_by_name(family, arguments, states, tmp_path):
    flat = {**SIT} if family == "SiT" else {**HEADS.get(family, {})}
    torch.save({"ema": states[family], "args": {**flat, **arguments}}, tmp_path / "x.pt")
    with pytest.raises(UsageError) as error:
        identify(tmp_path / "x.pt")
    (name,) = arguments
    inner = arguments[name] if isinstance(arguments[name], dict) else {}
    assert error.value.parameter == "ckpt" and ".".join([name, *inner]) in error.value.problem


def test_the_line_of_a_refusal(states, tmp_path, here):
    """The converter refuses it too, and writes nothing."""
    torch.save({"ema": states["DiT"], "args": dict(predict_xstart=True)}, tmp_path / "x.pt")
    flags = "--ckpt", tmp_path / "x.pt", "--output", tmp_path / "y.safetensors"
    line = "x.pt: trained with predict_xstart True, and only False is supported\n"
    assert refused(here("scripts/convert_checkpoint.py", *flags)).endswith(line)
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_other_arguments_are_one_line(kind, states, tmp_path, capsys):
    """Of other sections and of the headers of other programs too."""
    content = dict(
        args=kind(num_heads=2, foo=3, bar="x", nothing=None),
        hparams=kind(predict_xstart=True),
        config={"model": {"pred": "v"}, "foo": 4},
        settings={"flag": np.bool_(True)},
        optimizer={"state": {0: {"step": torch.ones(2)}}, "lr": 1e-4},
        epoch=7,
    )
    torch.save({"ema": states["DiT"], **content}, tmp_path / "x.pt")
    assert identify(tmp_path / "x.pt").num_heads == 2
    line = "foo=3, bar=x, hparams.predict_xstart=True, model.pred=v, config.foo=4"
    line += ", settings.flag=True, epoch=7"
    wanted = f"{tmp_path}/x.pt: arguments not interpreted: {line}"
    assert wanted in capsys.readouterr().out.splitlines()


def test_the_header_of_another_program(states, tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    header = {
        "format": "pt",
        "num_heads": "2",
        "modelspec.prediction_type": "v",
        "path_type": "GVP",
    }
    save_file(states["DiT"], path, {**header, "path_type": "Linear"})
    spec = identify(path)
    assert (spec.family.name, spec.num_heads) == ("SiT", 2)
    line = f"{path}: arguments not interpreted: modelspec.prediction_type=v"
    assert line in capsys.readouterr().out.splitlines()
    save_file(states["DiT"], path, header)
    with mistake("ckpt", "path_type", "GVP"):
        identify(path)
    save_file(states["DiT"], path, {"args": json.dumps({"num_heads": 2, "predict_xstart": True})})
    with mistake("ckpt", "predict_xstart"):
        identify(path)


def test_heads_in_an_uninterpreted_place_are_not_used(states, tmp_path):
    """Without a model of this size the flag is needed."""
    torch.save({"ema": states["DiT"], "config": {"net": {"num_heads": 2}}}, tmp_path / "x.pt")
    with pytest.raises(UsageError) as error:
        identify(tmp_path / "x.pt")
    assert "`num_heads`" in error.value.remedy
    assert identify(tmp_path / "x.pt", None, None, 2).num_heads == 2


# ---- The family ----

S4 = dict(model="SiT-S/4")
LINEAR = dict(path_type="Linear")
PLAIN = dict(num_classes=10)


@pytest.fixture(scope="module")
def state():
    return fill(SiT_models["SiT-S/4"](input_size=8, num_classes=10, learn_sigma=False)).state_dict()


@pytest.mark.parametrize(
    "name, marked, facts, model, found, assumed",
    [
        # The user's flag decides, among families with these tensors.
        ("a.pt", False, {}, "SiT-S/4", "SiT", False),
        ("a.pt", False, dict(enc_type="dinov2"), "DiT-S/4", "DiT", False),
        ("SiT-XL-2-256x256.pt", False, S4, "REPA-SiT-S/4", "REPA", False),
        ("a.pt", False, dict(family="SiT"), "DiT-S/4", "DiT", False),
        ("a.pt", True, {}, "DiT-S/4", None, False),
        ("a.pt", False, {}, "JiT-B/16", None, False),
        # Then the tensors, our own entry and the name of a published file.
        ("a.pt", True, S4, None, "REPA", False),
        ("DiT-XL-2-256x256.pt", False, dict(family="SiT"), None, "SiT", False),
        ("a.pt", False, dict(family="JiT"), None, None, False),
        ("SiT-XL-2-256x256.pt", False, dict(model="DiT-S/4"), None, "SiT", False),
        ("DiT-XL-2-256x256.pt", False, LINEAR, None, "DiT", False),
        # Then arguments of training.
        ("a.pt", False, dict(enc_type="dinov2", model="DiT-S/4"), None, "REPA", False),
        ("a.pt", False, dict(**LINEAR, model="DiT-S/4"), None, "DiT", False),
        ("a.pt", False, {**S4, "path_type": "linear"}, None, "REPA", False),
        ("a.pt", False, {**S4, **LINEAR}, None, "SiT", False),
        ("a.pt", False, dict(model="SiT-Tiny/4"), None, "SiT", False),
        ("a.pt", False, dict(model="DiT-Tiny/4"), None, "DiT", False),
        ("a.pt", False, LINEAR, None, "SiT", False),
        # Else the first is taken, with a notice.
        ("a.pt", False, PLAIN, None, "DiT", True),
        ("my-SiT-XL-2-256x256.pt", False, {}, None, "DiT", True),
    ],
)
def test_the_family_by_precedence(name, marked, facts, model, found, assumed, state, tmp_path):
    whole = {**state, "projectors.0.0.weight": torch.ones(2, 2)} if marked else state
    own = dict(metadata=facts) if "family" in facts else dict(args=facts)
    torch.save({"ema": whole, **own}, tmp_path / name)
    if found is None:
        with mistake("ckpt", "is not a"):
            identify(tmp_path / name, model)
        return
    checkpoint = weights_at(tmp_path / name).checkpoint(UserFacts(model))
    assert (checkpoint.spec.family.name, bool(checkpoint.family_notice)) == (found, assumed)


def test_a_renamed_published_sit_is_printed_twice(tmp_path, here):
    """At the beginning, and again after the last file is saved, with the flags."""
    torch.save(build("DiT-Demo/2").state_dict(), tmp_path / "renamed.pt")
    flags = "--ckpt", tmp_path / "renamed.pt", "--num-heads", 3, "--num-classes", 8
    flags += "--device", "cpu", "--num-sampling-steps", 2, "--output-type", "latent"
    text = succeeds(here("sample.py", *flags, "--output", tmp_path / "x.npy"))
    line = "renamed.pt: names no family, taken for a DiT (noise); if it is not: --model REPA-SiT-XL"
    assert text.count(line) == 2 and line in text.splitlines()[-1]
    assert "--model SiT-" in text.splitlines()[-1]
    text = succeeds(
        here("sample.py", *flags, "--model", "SiT-Demo/2", "--output", tmp_path / "y.npy")
    )
    assert "names no family" not in text


def test_the_scheduler_of_a_flow_is_refused():
    from diffusers import DiTPipeline, FlowMatchEulerDiscreteScheduler

    flow = DiTPipeline(transformer(), None, FlowMatchEulerDiscreteScheduler())
    with mistake("", "FlowMatchEuler"):
        Sampler(flow, device="cpu", output_type="latent")


def test_a_scheduler_with_dits_betas_in_full_is_read():
    """The entry trained_betas takes precedence over the schedule's name."""
    from diffusers import DDIMScheduler, DiTPipeline

    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64).tolist()
    scheduler = DDIMScheduler(trained_betas=betas, beta_schedule="scaled_linear")
    pipe = DiTPipeline(transformer(), None, scheduler)
    with Sampler(pipe, device="cpu", output_type="latent", num_sampling_steps=2) as sampler:
        assert sampler.latents([1], seed=0).std() > 0.1
