"""Everything that makes sampling fast. models.py and diffusion/ know nothing of it.

`from accel import Sampler`: pictures from Python, from a network that is loaded once (docs/python.md).
`from accel import accelerate`: a fast copy of a DiT that you already have, for your own sampling loop.
"""


def __getattr__(name: str):
    if name == "accelerate":  # only when asked for: it brings Triton
        from accel.fast import accelerate

        return accelerate
    if name == "Sampler":
        from accel.api import Sampler

        return Sampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
