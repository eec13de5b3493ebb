"""What files say of prediction, path, schedule and function, in the spellings of many programs and
in every place: computed, refused by name, or printed as not understood.
"""

import argparse

import pytest
import test_jit
import test_rae
import torch
from conftest import fill
from networks import identify, recognise, small
from test_lightning_dit import as_file
from test_lightning_dit import build as build_lightning

from accel.errors import UsageError
from accel.families.large_dit.network import Large_DiT_models
from accel.families.sit.network import SiT


def of_repa():
    state = small(SiT).state_dict()
    return {**state, "projectors.0.0.weight": torch.ones(2, 2)}


STATES = {  # family → its prediction and a file's entries
    "DiT": ("noise", lambda: small().state_dict()),
    "Large-DiT": ("noise", lambda: fill(Large_DiT_models["Large-DiT-Demo/2"]()).state_dict()),
    "SiT": ("velocity", lambda: small(SiT).state_dict()),
    "REPA": ("velocity", of_repa),
    "LightningDiT": ("velocity", lambda: as_file(build_lightning())),
    "RAE": ("velocity", lambda: test_rae.build().state_dict()),
    "JiT": ("data", lambda: test_jit.build().state_dict()),
}
FACTS = {
    "DiT": dict(num_heads=2),
    "REPA": dict(num_heads=2),
    "SiT": dict(num_heads=2, path_type="Linear"),
    "JiT": dict(in_context_start=test_jit.START),
}


@pytest.fixture(scope="module")
def states():
    return {family: make() for family, (_, make) in STATES.items()}


# Arguments → the predictions with which they agree.
SAID = [
    (dict(prediction="noise"), "noise"),
    (dict(prediction_type="epsilon"), "noise"),
    (dict(prediction_type="v_prediction"), ""),
    (dict(prediction_type="x"), "data"),
    (dict(pred_param="v"), "velocity"),
    (dict(pred_type="x0"), "data"),
    (dict(parameterization="eps"), "noise"),
    (dict(model_mean_type="START_X"), "data"),
    (dict(prediction="flow_matching"), "velocity"),
    (dict(prediction="score"), ""),
    (dict(predict_xstart=True), "data"),
    (dict(predict_xstart=False), "noise velocity"),
    (dict(predict_x0="true"), "data"),
    (dict(predict_v=True), "velocity"),
    (dict(predict_v=1), "velocity"),
    (dict(predict_noise=True), "noise"),
    (dict(flow=True), "velocity data"),
    (dict(use_flow_matching=True), "velocity data"),
    (dict(interpolant="GVP"), ""),
    (dict(interpolant="linear"), "velocity data"),
    (dict(noise_schedule="cosine"), "velocity data"),  # of a flow it says nothing
    (dict(beta_schedule="scaled_linear"), "velocity data"),
    (dict(beta_start=0.00085), "velocity data"),
    (dict(beta_start=1e-4, beta_end="0.02", num_train_timesteps=1000.0), "noise velocity data"),
    (dict(diffusion_steps=4000), "velocity data"),
    (dict(use_zero_terminal_snr=True), "velocity data"),
    (dict(USE_ZERO_TERMINAL_SNR=True), "velocity data"),
    (dict(rescale_betas_zero_snr=False), "noise velocity data"),
    (dict(prediction=None, pred_type="", flow={"sigma": 1}), "noise velocity data"),
]


@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize("arguments, agreeing", SAID)
def test_every_spelling_counts_in_every_family(arguments, agreeing, family, states):
    prediction, _ = STATES[family]
    said = {**FACTS.get(family, {}), **arguments}
    if prediction in agreeing.split():
        assert recognise("x.pt", states[family], said).family.name == family
        return
    (name, *_) = arguments
    with pytest.raises(UsageError, match=rf"^ckpt=x.pt: was trained with {name} [^\n]* is sampled"):
        recognise("x.pt", states[family], said)


@pytest.mark.parametrize(
    "family, content, words",
    [
        ("DiT", {"args": dict(predict_v=True)}, "predict_v True"),
        ("DiT", {"config": {"model": {"flow": True}}}, "flow True"),
        ("REPA", {"hparams": argparse.Namespace(prediction_type="x")}, "prediction_type x"),
        ("LightningDiT", {"config": {"transport": {"prediction": "noise"}}}, "prediction noise"),
        ("LightningDiT", {"config": {"transport": {"path_type": "GVP"}}}, "path_type GVP"),
        ("LightningDiT", {"config": {"transport": {"prediction": "score"}}}, "prediction score"),
        ("RAE", {"config": {"transport": {"params": {"path_type": "GVP"}}}}, "path_type GVP"),
        ("RAE", {"config": {"transport": {"params": {"prediction": "x"}}}}, "prediction x"),
        ("JiT", {"args": argparse.Namespace(pred_param="v")}, "pred_param v"),
        ("JiT", {"args": dict(JiT_branch="block_swap")}, "JiT_branch block_swap"),
        ("JiT", {"config": {"net": {"loop_count": 3}}}, "loop_count 3"),
        ("JiT", {"args": dict(loop_indices=[1, 2])}, r"loop_indices \[1, 2\]"),
        ("JiT", {"args": dict(use_nonlinear=True)}, "use_nonlinear True"),
    ],
)
def test_every_place_of_a_file_counts(family, content, words, states, tmp_path):
    facts = {name: value for name, value in FACTS.get(family, {}).items() if name != "path_type"}
    torch.save({"ema": states[family], "options": facts, **content}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=f"x.pt: was trained with {words}, and only "):
        identify(tmp_path / "x.pt")


def test_a_name_that_nobody_listed_is_printed(states, tmp_path, capsys):
    """If its words say that it may change the function, and it says something."""
    harmless = dict(
        data_path="/data/imagenet",
        lr_schedule="cosine",
        drop_path=0.1,
        pred_weight=0.5,
        schedule=None,
        snr_gamma=5.0,
        ema_schedule="cosine",
        branch=False,
    )
    torch.save({"ema": states["DiT"], "args": harmless | FACTS["DiT"]}, tmp_path / "x.pt")
    identify(tmp_path / "x.pt")
    assert "not understood" not in capsys.readouterr().out
    said = dict(second_branch="conv", path="curved", sampling_schedule="karras")
    config = {"config": {"model": {"loop_blocks": [3, 4]}}}
    torch.save({"ema": states["DiT"], "args": said | FACTS["DiT"], **config}, tmp_path / "x.pt")
    identify(tmp_path / "x.pt")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not understood" in line)
    for words in ("second_branch conv", "path curved", "sampling_schedule karras", "loop_blocks"):
        assert words in line


def test_the_converter_refuses_them_too(states, tmp_path, here):
    content = {"ema": states["DiT"], "args": dict(FACTS["DiT"], use_zero_terminal_snr=True)}
    torch.save(content, tmp_path / "x.pt")
    done = here(
        "scripts/convert_checkpoint.py",
        "--ckpt",
        tmp_path / "x.pt",
        "--output",
        tmp_path / "y.safetensors",
    )
    assert done.returncode == 2 and "was trained with use_zero_terminal_snr True" in done.stderr
    assert not (tmp_path / "y.safetensors").exists()
