"""What files say of prediction, path, schedule and function, in the spellings of many programs and
in every place: computed, refused by name, or printed as not understood.
"""

import argparse

import pytest
import test_jit
import test_rae
import torch
import yaml
from conftest import fill
from networks import identify, recognise, small, transformer
from safetensors.torch import save_file
from test_lightning_dit import as_file
from test_lightning_dit import build as build_lightning

from accel import Sampler, accelerate
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


@pytest.mark.parametrize("text", ("{'predict_v': True}", "model: DiT-S/2\npredict_v: true\n"))
def test_arguments_that_are_other_text_are_printed(text, states, tmp_path, capsys):
    torch.save({"ema": states["DiT"], "options": FACTS["DiT"], "args": text}, tmp_path / "x.pt")
    identify(tmp_path / "x.pt")
    assert "its args is text that is not a JSON object" in capsys.readouterr().out
    facts = {"options": FACTS["DiT"], "config": "configs/small.yaml"}
    torch.save({"ema": states["DiT"], **facts}, tmp_path / "y.pt")
    identify(tmp_path / "y.pt")
    assert "is text" not in capsys.readouterr().out


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


# Arguments of a DiT, a JiT or a SiT that are refused, and those that are printed.
OTHER_SPELLINGS = [
    ("DiT", {"args": dict(predictionType="v_prediction")}, "predictionType v_prediction"),
    ("JiT", {"args": dict(jit_branch="block_swap")}, "jit_branch block_swap"),
    ("JiT", {"args": {"loop-count": 3}}, "loop-count 3"),
    ("DiT", {"config": {"noise_schedule": {"type": "cosine"}}}, "noise_schedule cosine"),
    ("DiT", {"config": '{"diffusion": {"parameterization": "v"}}'}, "parameterization v"),
    ("DiT", {"args": dict(model_mean_type="ModelMeanType.START_X")}, "model_mean_type Model"),
]


@pytest.mark.parametrize("family, content, words", OTHER_SPELLINGS)
def test_letters_decide_of_a_name(family, content, words, states, tmp_path):
    """Whatever its case and its dashes, and whether its value is in a section or in JSON."""
    facts = {"options": FACTS[family]}
    torch.save({"ema": states[family], **facts, **content}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=f"x.pt: was trained with {words}"):
        identify(tmp_path / "x.pt")


def test_the_name_of_an_enumeration_is_no_part_of_a_value(states):
    said = dict(FACTS["DiT"], model_mean_type="ModelMeanType.EPSILON")
    assert recognise("x.pt", states["DiT"], said).family.name == "DiT"


@pytest.mark.parametrize(
    "said",
    [
        dict(objective="pred_v"),
        dict(target="velocity"),
        dict(model_output="x0"),
        dict(vpred=True),
        dict(diffusion_parameterization="v"),
    ],
)
def test_a_value_that_is_a_prediction_is_printed(said, states, capsys):
    recognise("x.pt", states["DiT"], {**FACTS["DiT"], **said})
    (name, value), *_ = said.items()
    assert f"says {name} {value}, which is not understood" in capsys.readouterr().out
    of_loss = {**FACTS["JiT"], "loss_type": "velocity", "objective": "flow_matching"}
    recognise("x.pt", states["JiT"], of_loss)
    assert "not understood" not in capsys.readouterr().out


def test_schedules_of_two_things_are_no_contradiction(states, tmp_path, capsys):
    config = {"lr": {"schedule": "cosine"}, "a": {"schedule": "x"}, "b": {"schedule": "y"}}
    content = {"ema": states["DiT"], "args": FACTS["DiT"], "config": config}
    torch.save(content, tmp_path / "x.pt")
    identify(tmp_path / "x.pt")
    printed = capsys.readouterr().out
    assert "says schedule x, config.b.schedule y, which is not understood" in printed


@pytest.mark.parametrize(
    "header, words",
    [
        ({"prediction_type": "v_prediction"}, "prediction_type v_prediction"),
        ({"modelspec.prediction_type": "v"}, "modelspec.prediction_type v"),
        ({"args": '{"prediction": "x0"}'}, "prediction x0"),
        ({"config": '{"diffusion": {"noise_schedule": "cosine"}}'}, "noise_schedule cosine"),
    ],
)
def test_the_header_of_another_program_counts(header, words, states, tmp_path):
    save_file(states["DiT"], tmp_path / "x.safetensors", {"num_heads": "2", **header})
    with pytest.raises(UsageError, match=f"was trained with {words}, and only"):
        identify(tmp_path / "x.safetensors")


def test_a_header_without_such_words_is_believed(states, tmp_path):
    header = {"format": "pt", "num_heads": "2", "title": "{a", "path_type": "Linear"}
    save_file(states["SiT"], tmp_path / "x.safetensors", header)
    spec = identify(tmp_path / "x.safetensors")
    assert (spec.family.name, spec.num_heads) == ("SiT", 2)


@pytest.mark.parametrize(
    "content, words",
    [
        ({"transport": {"prediction": "noise"}}, "transport.prediction noise"),
        ({"path_type": "GVP"}, "path_type GVP"),
        (
            {"model": {}, "sample": {}, "diffusion": {"prediction_type": "x0"}},
            "diffusion.prediction_type x0",
        ),
    ],
)
def test_a_yaml_file_beside_counts_whatever_its_sections(content, words, states, tmp_path):
    torch.save({"ema": states["LightningDiT"]}, tmp_path / "x.pt")
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UsageError, match=f"by x.yaml beside it, was trained with {words}, and on"):
        identify(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "attributes, words",
    [
        (dict(prediction_type="v"), "prediction_type v"),
        (dict(predict_xstart=True), "predict_xstart True"),
        (dict(noise_schedule="cosine"), "noise_schedule cosine"),
    ],
)
def test_the_attributes_of_a_module_count(attributes, words):
    model = small()
    vars(model).update(attributes)
    for door in (accelerate, Sampler):
        with pytest.raises(UsageError, match=f"DiT: was trained with {words}, and only"):
            door(model, device="cpu") if door is Sampler else door(model)


def test_a_flows_scheduler_is_refused():
    from diffusers import DiTPipeline, FlowMatchEulerDiscreteScheduler

    flow = DiTPipeline(transformer(), None, FlowMatchEulerDiscreteScheduler())
    with pytest.raises(UsageError, match="its scheduler is a FlowMatchEuler.*, of a flow, and on"):
        Sampler(flow, device="cpu", output_type="latent")
