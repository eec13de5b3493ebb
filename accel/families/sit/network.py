"""Scalable interpolant transformers (SiT): DiT's network, trained as a flow.

Ma et al., 2024, arXiv:2401.08740. On the way from noise ε to data x*, x_t = t·x* + (1 − t)·ε with t
from 0 to 1, the network estimates the velocity x* − ε. Names, constructor arguments and state-dict
keys match the published checkpoints, which load with ``strict=True``. The keys are DiT's.

Shapes: N batch, C latent channels, H = W latent side, p patch side, T = (H/p)² tokens, D width.
"""

from torch import Tensor

from accel.families.blocks import first_channels
from accel.families.dit.network import DEMO, DiT, constructor, constructors


class SiT(DiT):
    """DiT that estimates a velocity: x (N, C, H, W), t (N,), labels y (N,) → (N, C, H, W).

    t runs from 0, noise, to 1, data, and enters DiT's sinusoid unscaled. With `learn_sigma` the
    last layer has 2C channels; the second half was not trained and is dropped.
    """

    def head(self, x: Tensor, c: Tensor) -> Tensor:
        """Project tokens x (N, T, D), conditioning c (N, D), to patches of velocity.

        Returns (N, T, p·p·C); the order inside a token is (p, p, C).
        """
        return first_channels(super().head(x, c), self.out_channels, self.in_channels)


SiT_models = constructors(SiT)
# Its weights ship with the code.
SiT_models["SiT-Demo/2"] = constructor("SiT_Demo_2", SiT, learn_sigma=False, **DEMO)
globals().update({build.__name__: build for build in SiT_models.values()})
