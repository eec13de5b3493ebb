"""What the arguments of a training run say of a network's function, and which of it is computed.

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
BY_NAME = {name: meaning for meaning in MEANINGS for name in meaning.names}
# Values by which an argument says nothing.
NOTHING = "", "none", "null"
# A name that nobody listed, but whose words say that it may change the function.
SUSPECTED = re.compile(
    r"(^|_)(pred|predicts?|prediction|path|schedule|branch|loop|loops)(_|$)|snr|parametri[sz]ation"
)
# Arguments of training alone, and names of files, have such words too.
HARMLESS = re.compile(
    r"(^|_)(lr|learning|warmup|decay|wd|ema|optim|optimizer|drop|loss|weight|log|save|eval)(_|$)"
    r"|^min_snr|_gamma$"
)


def is_read_anywhere(name: str) -> bool:
    """Return whether an argument has one meaning in any section of a configuration."""
    name = plain(name)
    return name in BY_NAME or _is_suspected(name)


def plain(text: object) -> str:
    """Return a name or a value as it is compared: small letters, underscores."""
    return str(text).strip().lower().replace("-", "_").replace(" ", "_")


def _is_suspected(name: str) -> bool:
    return bool(SUSPECTED.search(name)) and not HARMLESS.search(name)


def require_computed(
    arguments: Mapping[str, Any], prediction: str, own: Mapping[str, tuple]
) -> list[str]:
    """Return the arguments that are not understood, in words. Raises ValueError for an argument
    with a value that is not computed.

    prediction: of the family. own: arguments that only its code has → their computed values.
    """
    left = []
    for name, value in arguments.items():
        meaning = BY_NAME.get(plain(name))
        values = getattr(meaning, prediction) if meaning else own.get(name)
        if plain(value) in NOTHING or isinstance(value, dict):
            continue
        if values is None:
            is_path = isinstance(value, str) and "/" in value
            if value and not meaning and _is_suspected(plain(name)) and not is_path:
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
