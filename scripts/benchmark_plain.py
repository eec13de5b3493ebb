"""models.DiT against a plain transcription of the paper with timm's Attention and Mlp: same weights, same inputs, one guided call each in turn.

python scripts/benchmark_plain.py --output log/plain.json
"""

if not __package__:
    __import__("_as_module")

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
import torch
import torch.nn as nn
from timm.models.vision_transformer import Attention, Mlp

from download import find_model
from models import DiT_models


class PlainBlock(nn.Module):
    """A block as the paper draws it, in timm's parts; same state-dict keys."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads=heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(width, 4 * width, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            v.unsqueeze(1) for v in self.adaLN_modulation(c).chunk(6, dim=1)
        )
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds of both")
    parser.add_argument("--calls", type=int, default=10, help="calls a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    state = find_model(ROOT / "pretrained_models" / "demo" / "dit.safetensors")
    networks = {name: DiT_models["DiT-Demo/2"]() for name in ("ours", "plain")}
    networks["plain"].blocks = nn.ModuleList([PlainBlock(216, 3) for _ in range(6)])
    for network in networks.values():
        network.load_state_dict(state)
        network.to(args.device).eval()
    x, t = torch.randn(16, 4, 16, 16, device=args.device), torch.full((16,), 500, device=args.device)
    y = torch.tensor([*range(8), *[8] * 8], device=args.device)
    times = {name: [] for name in networks}
    with torch.inference_mode():
        out = {name: network.forward_with_cfg(x, t, y, 4.0) for name, network in networks.items()}  # warm-up and check
        difference = ((out["ours"] - out["plain"]).norm() / out["plain"].norm()).item()
        for _ in range(args.repeats):
            for name, network in networks.items():
                start = time.perf_counter()
                for _ in range(args.calls):
                    result = network.forward_with_cfg(x, t, y, 4.0)
                result.sum().item()  # waits for the device
                times[name].append((time.perf_counter() - start) / args.calls * 1e3)
    median = {name: statistics.median(values) for name, values in times.items()}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    record = {
        "what": "ms a guided call of DiT-Demo/2, 16 rows",
        "device": args.device,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if args.device.startswith("cuda") else None,
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
        "median_ms": median,
        "all_ms": times,
        "plain_over_ours": median["plain"] / median["ours"],
        "relative_difference": difference,
    }
    print(json.dumps(record, indent=1))
    if args.output:
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
