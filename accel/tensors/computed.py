"""Arguments of training runs about a network's function, and their values that are computed here.

No tensor says what a network predicts, on which path and schedule, and training programs spell it
in many ways. One table serves all families: spellings, and by a family's prediction the values
that are computed. Imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from accel.errors import shown

Values = tuple[str, ...]

# A family's prediction → words of training programs for it. An error shows the first.
PREDICTIONS: dict[str, Values] = {
    "noise": ("epsilon", "eps", "noise", "pred_noise", "e"),
    "velocity": ("velocity", "v", "flow", "flow_matching", "rectified_flow", "pred_v"),
    "data": (
        "x",
        "x0",
        "x_0",
        "x_start",
        "xstart",
        "start_x",
        "data",
        "sample",
        "clean",
        "pred_x0",
    ),
}
FLOWS = "flow_matching", "rectified_flow"  # of a velocity, or of data
OFF = "False", "0"
ON = "True", "1"


class Meaning(NamedTuple):
    """Arguments of one meaning, and their computed values by the family's prediction. None: they
    say nothing of such a network.
    """

    names: tuple[str, ...]
    noise: Values | None
    velocity: Values | None
    data: Values | None


def _whether(prediction: str, *names: str) -> Meaning:
    """Return the meaning of arguments that say whether a network has this prediction."""
    values = {kind: ON if kind == prediction else OFF for kind in PREDICTIONS}
    return Meaning(names, **values)


def _of_noise(*names: str, values: Values) -> Meaning:
    """Return the meaning of arguments that only a network of noise has."""
    return Meaning(names, values, None, None)


LINEAR = "linear", "ot", "optimal_transport", "rectified", "straight"
MEANINGS = (
    Meaning(
        (
            *("prediction", "prediction_type", "pred_type", "pred_param", "pred_mode"),
            *("parameterization", "parametrization", "model_mean_type", "mean_type", "net_pred"),
        ),
        **PREDICTIONS,
    ),
    _whether("data", "predict_xstart", "predict_x0", "predict_x", "x_prediction"),
    _whether("noise", "predict_eps", "predict_epsilon", "predict_noise"),
    _whether("velocity", "predict_v", "predict_velocity", "v_prediction", "use_v_prediction"),
    Meaning(
        ("flow", "use_flow", "is_flow", "flow_matching", "use_flow_matching", "rectified_flow"),
        noise=OFF,
        velocity=ON,
        data=ON,
    ),
    Meaning(
        ("path_type", "flow_path", "path_kind", "interpolant", "interpolant_type"),
        noise=(),
        velocity=LINEAR,
        data=LINEAR,
    ),
    _of_noise("noise_schedule", "beta_schedule", "noise_scheduler_type", values=("linear",)),
    _of_noise(
        *("diffusion_steps", "num_train_timesteps", "num_diffusion_steps", "train_timesteps"),
        values=("1000",),
    ),
    _of_noise("beta_start", values=("0.0001",)),
    _of_noise("beta_end", values=("0.02",)),
    _of_noise("trained_betas", values=()),
    _of_noise(
        *("use_zero_terminal_snr", "zero_terminal_snr", "enforce_zero_terminal_snr", "zero_snr"),
        *("rescale_betas_zero_snr", "rescale_zero_terminal_snr", "use_ztsnr", "ztsnr"),
        values=OFF,
    ),
)
# Texts that are a prediction whatever the argument is called. Others, such as "x", may be anything.
UNMISTAKABLE = re.compile(
    r"(^|_)pred(iction)?(_|$)|^(velocity|epsilon|x_?0|x_?start|start_x|flow_matching|rectified_flow)$"
)
# The end of a notice about arguments.
UNCLEAR = "which is not understood here; if it changes the network, the pictures are wrong"
# Values by which an argument says nothing.
NOTHING = "", "none", "null"
# A name that nobody listed, but whose words say that it may change the function.
SUSPECTED = re.compile(
    r"(^|_)([vx]?pred|predicts?|prediction|path|schedule|branch|loops?)(_|$)|snr"
    r"|paramete?ri[sz]ation"
)
# Arguments of training alone, and names of files, have such words too.
HARMLESS = re.compile(
    r"(^|_)(lr|learning|warmup|decay|wd|ema|optim|optimizer|drop|loss|weight|log|save|eval)(_|$)"
    r"|^min_snr|_gamma$"
)


def is_listed(name: str) -> bool:
    """Return whether an argument has one meaning in every family and place."""
    return _letters(name) in BY_NAME


def plain(text: object) -> str:
    """Return a value as it is compared: small letters, underscores, no name of an enumeration."""
    words = re.sub(r"^[A-Za-z]\w*[.](?=[A-Za-z]\w*$)", "", str(text).strip())
    return words.lower().replace("-", "_").replace(" ", "_")


def _letters(name: object) -> str:
    """Return a name as it is compared: predictionType is prediction_type."""
    return re.sub(r"\W|_", "", str(name)).lower()


BY_NAME = {_letters(name): meaning for meaning in MEANINGS for name in meaning.names}


def is_suspected(name: str, value: Any) -> bool:
    """Return whether words of a name, or a value, may be about the function. name: the sections
    before it may say that it is not, with dots between them.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower().replace("-", "_")
    place, _, last = words.rpartition(".")
    is_prediction = isinstance(value, str) and UNMISTAKABLE.search(plain(value))
    named = SUSPECTED.search(last) or is_prediction
    return bool(named) and not HARMLESS.search(f"{place}_{last}".replace(".", "_").lstrip("_"))


def require_computed(
    arguments: Mapping[str, Any], prediction: str, own: Mapping[str, tuple]
) -> list[str]:
    """Return the arguments that are not understood, in words. Raises ValueError for an argument
    with a value that is not computed.

    arguments: by name, with those of sections before it. prediction: of the family. own:
    arguments that only its code has → their computed values.
    """
    left = []
    of_family = {_letters(name): values for name, values in own.items()}
    agrees = {*PREDICTIONS[prediction], *(FLOWS if prediction != "noise" else ())}
    for name, value in arguments.items():
        last = _letters(name.rpartition(".")[2])
        meaning = BY_NAME.get(last)
        values = getattr(meaning, prediction) if meaning else of_family.get(last)
        if plain(value) in NOTHING or isinstance(value, dict):
            continue
        if values is None:
            is_path = isinstance(value, str) and "/" in value
            says = value and not meaning and not is_path and plain(value) not in agrees
            if says and is_suspected(name, value):
                left.append(f"{name} {shown(value)}")
        elif plain(value) not in map(plain, values) and not _same_number(value, values):
            only = f"only {values[0]} is sampled" if values else "none is sampled"
            raise ValueError(f"was trained with {name} {shown(value)}, and {only}")
    return left


def _same_number(value: Any, values: tuple) -> bool:
    """Return whether a value is a number among `values`: some programs write 1000.0."""
    try:
        return float(value) in map(float, values)
    except (TypeError, ValueError):
        return False
