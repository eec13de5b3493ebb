"""The process's switches: those of a tier inside, the caller's own afterwards."""

import pytest
import torch
from networks import inputs, small

from accel import accelerate
from accel.runtime.precision import IEEE_TIERS, SWITCHES, TIERS, arithmetic

BACKENDS = torch.backends
OPERATIONS = [
    (backend, operation)
    for backend in ("generic", "cuda", "mkldnn")
    for operation in ("all", "matmul", "conv", "rnn")
    if backend != "generic" or operation == "all"
]
# What callers write, by torch's present names and by the former ones.
WRITTEN = {
    "gemms": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "all": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "all bf16": lambda: setattr(BACKENDS, "fp32_precision", "bf16"),
    "all ieee": lambda: setattr(BACKENDS, "fp32_precision", "ieee"),
    "gpu": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "gpu ieee": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "ieee"),
    "convolutions": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
    "follows": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "none"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "allowed": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "not allowed": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
}


def forget():
    """Give every switch torch's default."""
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for name in OPERATIONS:
        torch._C._set_fp32_precision_setter(*name, "none")
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    BACKENDS.cudnn.rnn.fp32_precision = "tf32"


@pytest.fixture
def fresh():
    forget()
    yield
    forget()


def shown():
    """Return all that torch says of the switches; a getter may raise an error."""
    values = [torch._C._get_fp32_precision_getter(*name) for name in OPERATIONS]
    for getter in (
        lambda: BACKENDS.cuda.matmul.allow_tf32,
        lambda: BACKENDS.cudnn.allow_tf32,
        torch.get_float32_matmul_precision,
    ):
        try:
            values.append(getter())
        except RuntimeError:
            values.append("mixed")
    return values


def shown_later():
    """Return the same after the caller changed the wider switches once more."""
    values = []
    for value in ("ieee", "tf32", "none"):
        for wider in (BACKENDS.cudnn, BACKENDS):
            wider.fp32_precision = value
            values.append(shown())
    return values


@pytest.mark.filterwarnings("ignore")  # torch's, of the former names
@pytest.mark.parametrize("first", WRITTEN)
def test_the_callers_switches_are_as_if_nothing_had_run(first, fresh):
    for second in WRITTEN:
        traces = []
        for sampled in (False, True):
            forget()
            WRITTEN[first]()
            WRITTEN[second]()
            if sampled:
                for tier in TIERS:
                    with arithmetic(tier):
                        allowed = {switch.fp32_precision for switch in SWITCHES}
                        assert (allowed == {"ieee"}) == (tier in IEEE_TIERS)
            traces.append((shown(), shown_later()))
        assert traces[0] == traces[1], second


@pytest.mark.parametrize("name", WRITTEN)
def test_the_callers_switches_change_no_bit(name, fresh):
    model = small()
    x, t, y = inputs(model, 2)
    want = accelerate(model)(x, t, y)
    WRITTEN[name]()
    assert torch.equal(accelerate(model)(x, t, y), want)
