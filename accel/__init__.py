"""Everything that makes sampling fast. models.py and diffusion/ know nothing of it but the public ops in accel.kernels.

``from accel import accelerate`` gives a faster twin of a DiT that you already have.
"""


def __getattr__(name):
    if name == "accelerate":  # only when asked for: it brings Triton
        from accel.fast import accelerate

        return accelerate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
