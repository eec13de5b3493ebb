"""One rank of tests/distributed/test_sharded.py: every plan that fits the world against one process, and what it sends. Prints JSON on rank 0."""

import copy
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from conftest import fill
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from accel import engine
from accel.fast import FastDiT
from accel.parallel.pipeline import Pipelined
from accel.parallel.sharded import PlainPieces, Sharded, make_mesh
from accel.parallel.tensor import divide_weights
from accel.parallel.tokens import EXCHANGES
from diffusion import create_diffusion
from models import DiT

T, D, HEADS, DEPTH = 36, 96, 12, 3


class Traffic(CommDebugMode):
    """CommDebugMode that also adds up what a rank receives from others, in bytes."""

    received = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if func.namespace == "c10d":
            # (outputs, inputs, …) of all-gather, all-to-all and receive; a part of what was gathered or exchanged is the rank's own.
            if name.startswith(("_allgather_base_", "alltoall_base_")):
                mine, sent = args[0], args[1]
                ways = len(mine.flatten()) // len(sent.flatten()) if "gather" in name else self.tokens
                self.received += mine.numel() * mine.element_size() * (ways - 1) // ways
            elif name.startswith("recv_"):
                self.received += sum(one.numel() * one.element_size() for one in args[0])
            else:
                assert name.startswith("send"), name
        return super().__torch_dispatch__(func, types, args, kwargs)


def main():
    dist.init_process_group("gloo")
    world, results = dist.get_world_size(), []
    model = fill(DiT(input_size=12, patch_size=2, hidden_size=D, depth=DEPTH, num_heads=HEADS, num_classes=10))
    generator = torch.Generator().manual_seed(1)
    for rows, tokens in [(r, s) for r in range(1, world + 1) for s in range(1, world + 1) if 1 < r * s <= world]:
        mesh, everyone = make_mesh(rows, tokens, "cpu"), dist.new_group(list(range(rows * tokens)))
        for exchange in ("kv", "ulysses", "ring") if tokens > 1 else ("kv",):
            for pictures in (1, 3):
                x = torch.randn(2 * pictures, 4, 12, 12, generator=generator)
                t = torch.randint(0, 1000, (2 * pictures,), generator=generator)
                y = torch.randint(0, 11, (2 * pictures,), generator=generator)
                if dist.get_rank() >= rows * tokens:
                    continue
                for kind in ("fast", "plain", "exact"):
                    if kind != "fast" and pictures == 3 or kind == "exact" and tokens > 1 and exchange != "ulysses":
                        continue
                    alone = (
                        model
                        if kind == "plain"
                        else FastDiT(
                            model.state_dict(), HEADS, torch.float32 if kind == "fast" else "terms", torch.device("cpu")
                        )
                    )
                    want = alone.forward_with_cfg(x, t, y, 4.0), alone.forward(x, t, y)
                    pieces = PlainPieces(model) if kind == "plain" else alone
                    attend = EXCHANGES[exchange](mesh.get_group("tokens"), pieces.alone) if tokens > 1 else pieces.alone
                    network = Sharded(pieces, mesh, attend, everyone)
                    with Traffic() if kind == "fast" else nullcontext(SimpleNamespace()) as traffic:
                        traffic.tokens = tokens
                        guided = network.forward_with_cfg(x, t, y, 4.0)
                    got = guided, network.forward(x, t, y)
                    network.network.attend = network.network.alone
                    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want))
                    results.append(
                        dict(
                            rows=rows,
                            tokens=tokens,
                            exchange=exchange,
                            pictures=pictures,
                            kind=kind,
                            error=error,
                            size=float(want[0].abs().mean()),
                            **(
                                dict(collectives=traffic.get_total_counts(), bytes=traffic.received)
                                if kind == "fast"
                                else {}
                            ),
                        )
                    )
    stages = dist.new_group(list(range(DEPTH)))
    z, labels, diffusion = torch.randn(2, 4, 12, 12, generator=generator), torch.tensor([3, 5]), create_diffusion("6")
    if dist.get_rank() < DEPTH:
        for kind in ("fast", "plain"):
            pieces = (
                FastDiT(model.state_dict(), HEADS, torch.float32, torch.device("cpu"))
                if kind == "fast"
                else PlainPieces(model)
            )
            torch.manual_seed(0)
            want = engine.denoise(pieces if kind == "fast" else model, diffusion, z, labels, 4.0, 10)
            for warmup in (6, 2, 0):
                torch.manual_seed(0)
                got = engine.denoise(Pipelined(pieces, stages, 4, warmup), diffusion, z, labels, 4.0, 10)
                results.append(
                    dict(
                        kind="stages",
                        rows=1,
                        tokens=1,
                        exchange=kind,
                        warmup=warmup,
                        size=float(want.abs().mean()),
                        error=float((got - want).norm() / want.norm()),
                    )
                )
        pieces.attend = pieces.alone
    if HEADS % world == 0:
        x, t, y = torch.randn(2, 4, 12, 12, generator=generator), torch.tensor([7, 7]), torch.tensor([3, 10])
        with torch.no_grad():
            want = model.forward_with_cfg(x, t, y, 4.0)
            divided = divide_weights(copy.deepcopy(model), init_device_mesh("cpu", (world,)))
            with CommDebugMode() as calls:
                got = divided.forward_with_cfg(x, t, y, 4.0)
        weights = sum(
            len(p.to_local().flatten()) if isinstance(p, DTensor) else len(p.flatten())
            for p in divided.blocks.parameters()
        )
        results.append(
            dict(
                kind="weights",
                rows=1,
                tokens=1,
                exchange="none",
                error=float((got - want).norm() / want.norm()),
                size=float(want.abs().mean()),
                calls={str(name).split(".")[-1]: count for name, count in calls.get_comm_counts().items()},
                weights=weights / sum(len(p.flatten()) for p in model.blocks.parameters()),
            )
        )
    everyones = [None] * world
    dist.all_gather_object(everyones, results)
    if dist.get_rank() == 0:
        json.dump(everyones, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
