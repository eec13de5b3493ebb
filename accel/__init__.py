"""Everything that makes sampling fast. models.py and diffusion/ know nothing of it but the public ops in accel.kernels."""
