"""Networks that have shapes and no values yet: what weights from a file are assigned into."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class _NoDraws(TorchFunctionMode):
    """On the meta device there is nothing to draw, but the attempt makes torch import its compiler: up to three seconds."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if getattr(function, "__module__", None) == "torch.nn.init" or function in (
            torch.Tensor.uniform_,
            torch.Tensor.normal_,
        ):
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords or {})


@contextmanager
def shapes_only():
    """Modules made inside have parameters on the meta device; no initialisation is computed to be thrown away."""
    with torch.device("meta"), _NoDraws():
        yield
