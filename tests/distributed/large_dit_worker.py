"""One rank of test_large_dit_sharded.py: every way to share a Large-DiT against one process. Rank 0 prints JSON."""

import copy
import json

import torch
from conftest import fill
from networks import evaluate
from torch.distributed.tensor import DTensor

from accel import accelerate
from accel.network import Plain
from accel.parallel.groups import Groups
from accel.parallel.layouts import Layout
from accel.parallel.processes import launched_job
from large_dit import DiT_Llama

SIDE, CLASSES = 8, 10
LAYOUTS = (
    Layout(rows=2),
    Layout(rows=4),
    *(Layout(tokens=tokens, exchange=name) for tokens in (2, 4) for name in ("kv", "ulysses")),
    Layout(rows=2, tokens=2, exchange="kv"),
    Layout(weights=2),
    Layout(weights=4),
)


def networks(model):
    yield "plain", lambda: Plain(copy.deepcopy(model))
    yield "fast", lambda: accelerate(model, "fp32").network


def held(network):
    """How many numbers of the blocks' GEMMs a rank holds."""
    if hasattr(network, "model"):
        parameters = (p for p in network.model.layers.parameters() if p.ndim > 1)
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return sum(layer.weight.numel() for block in network.blocks for layer in block)


def main():
    results = []
    with launched_job("large_dit_worker.py") as job:
        for qk_norm in (True, False):
            shape = dict(input_size=SIDE, dim=96, n_layers=3, n_heads=4, num_classes=CLASSES, multiple_of=32)
            model = fill(DiT_Llama(**shape, qk_norm=qk_norm))
            generator = torch.Generator().manual_seed(1)
            x, y = torch.randn(4, 4, SIDE, SIDE, generator=generator), torch.tensor([3, 7, CLASSES, CLASSES])
            t = torch.tensor([500, 20, 500, 20])
            groups = Groups(job, torch.device("cpu"))
            for layout in LAYOUTS:
                for kind, make in networks(model):
                    alone, network = make(), make()
                    want, whole = evaluate(alone, x, t, y, 4.0), held(network)
                    shared = groups.apply(network, layout)
                    if job.rank >= layout.ranks:
                        continue
                    got = evaluate(shared, x, t, y, 4.0)
                    error, size = float((got - want).norm() / want.norm()), float(want.abs().mean())
                    part = held(network) / whole
                    row = dict(layout=str(layout), kind=kind, qk_norm=qk_norm, error=error, size=size, part=part)
                    results.append(row)
        everywhere = job.all_gather_object(results)
        print(json.dumps(everywhere))


if __name__ == "__main__":
    main()
