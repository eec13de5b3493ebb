"""The accelerated networks, one file a family, and how one is loaded."""

from concurrent.futures import ThreadPoolExecutor

import torch

from accel.fast.dit import FastDiT, build
from accel.kernels.linear import Tuner
from accel.network import rows_of_a_latent
from models import DiT


def load(
    state: dict[str, torch.Tensor],
    model: DiT,
    tier: str,
    device: torch.device,
    batch_rows: int,
    guided: bool = True,
    tuner: Tuner | None = None,
) -> FastDiT:
    """The accelerated network of `tier` with the weights `state`. Kernels are compiled while the weights are copied.

    model: of the same shape, without values (on the meta device). batch_rows: of one evaluation on this rank; guided:
    whether the steps have guidance. Raises ValueError, naming the layer, for weights that the tier cannot hold.
    """
    tuner = tuner or Tuner()
    zeros = {
        name: torch.zeros(value.shape, device=device)
        for name, value in model.state_dict().items()
        if name.startswith("blocks.0.") or not name.startswith("blocks.")
    }
    n, side = batch_rows // rows_of_a_latent(batch_rows, guided), model.x_embedder.img_size[0]
    latents = torch.zeros(n, model.in_channels, side, side, device=device)
    calls = build(zeros, model.num_heads, tier, device, tuner=tuner).kernel_calls(latents, batch_rows, guided)

    # The threads' tensors are freed below: in the order of this stream.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def warm_up(call):
        with torch.inference_mode(), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        compiling = [pool.submit(warm_up, call) for call in calls]
        network = build(state, model.num_heads, tier, device, tuner=tuner)
        for job in compiling:
            job.result()
    return network
