"""One rank of test_sharded.py: every layout that fits the world against one process.

Rank 0 prints JSON: what each rank found.
"""

import json
from itertools import product

import torch
from conftest import fill
from networks import evaluate, network_of

from accel.distributed import Layout
from accel.distributed.launched import launched_ranks
from accel.families.dit.network import DiT
from accel.families.large_dit.network import DiT_Llama
from accel.runtime.network import EagerNetwork

SIDE = 12
D = 96
HEADS = 3
DEPTH = 3
CLASSES = 10


def difference(got, want):
    return {"error": float((got - want).norm() / want.norm()), "size": float(want.abs().mean())}


def sharded(ranks, model, generator):
    """Batch rows and tokens over every mesh of two to all ranks."""
    world = ranks.world
    alone = EagerNetwork(model)
    for pictures in (1, 3):
        x = torch.randn(2 * pictures, 4, SIDE, SIDE, generator=generator)
        t = torch.randint(0, 1000, (2 * pictures,), generator=generator)
        y = torch.randint(0, CLASSES + 1, (2 * pictures,), generator=generator)
        meshes = [(rows, tokens) for rows in range(1, world + 1) for tokens in range(1, world + 1)]
        for rows, tokens in [mesh for mesh in meshes if 1 < mesh[0] * mesh[1] <= world]:
            layout = Layout(rows, tokens)
            shared = ranks.share(alone, layout)
            if ranks.rank >= layout.ranks:
                continue
            row = {"kind": "plain", "layout": layout}
            yield row | difference(evaluate(shared, x, t, y, 4.0), evaluate(alone, x, t, y, 4.0))
            yield row | difference(shared.forward(x, t, y), alone.forward(x, t, y))


LARGE = (
    Layout(rows=2),
    Layout(tokens=4),
    Layout(tokens=2),
    Layout(rows=2, tokens=2),
)


def large(ranks, _, generator):
    """A Large-DiT, plain and accelerated, by every kind of mesh."""
    x = torch.randn(4, 4, 8, 8, generator=generator)
    y = torch.tensor([3, 7, CLASSES, CLASSES])
    t = torch.tensor([500, 20, 500, 20])
    shape = dict(input_size=8, dim=96, n_layers=3, n_heads=4, num_classes=CLASSES, multiple_of=32)
    model = fill(DiT_Llama(**shape, qk_norm=True))
    networks = {"plain": EagerNetwork(model), "fast": network_of(model, "fp32")}
    for layout, (kind, network) in product(LARGE, networks.items()):
        shared = ranks.share(network, layout)
        if ranks.rank < layout.ranks:
            got = evaluate(shared, x, t, y, 4.0)
            want = evaluate(network, x, t, y, 4.0)
            yield {"kind": f"large, {kind}", "layout": str(layout)} | difference(got, want)


def main():
    model = fill(
        DiT(
            input_size=SIDE,
            patch_size=2,
            hidden_size=D,
            depth=DEPTH,
            num_heads=HEADS,
            num_classes=CLASSES,
        )
    )
    with launched_ranks("sharded_worker.py") as ranks:
        ranks.claim_device("cpu")
        results = []
        for part in (sharded, large):
            results += part(ranks, model, torch.Generator().manual_seed(1))
        print(json.dumps(ranks.all_gather_object(results)))


if __name__ == "__main__":
    main()
