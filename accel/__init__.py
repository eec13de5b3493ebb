"""Everything that makes sampling fast. models.py and diffusion/ know nothing of it.

`from accel import accelerate` gives a fast copy of a DiT that you already have.
"""


def __getattr__(name: str):
    if name == "accelerate":  # only when asked for: it brings Triton
        from accel.fast import accelerate

        return accelerate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
