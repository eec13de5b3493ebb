"""PipeFusion (Fang et al. 2024, arXiv:2405.14430): a network's blocks in stages, one a GPU; patches of tokens flow through them. Approximate.

A patch attends to the keys and values that its stage has: this step's of the patches before it, the last step's of those after it. Neighbouring
steps differ little, so the picture is close; it is not the same, and what it differs by no bound holds. The first `warmup` steps take all tokens
through every stage in one piece and are exact. Here a pipeline drains at every step, so that guidance, sampler and random stream stay as they
are on every rank: of s stages and m patches the best speed-up is s·m / (s + m − 1).
"""

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_to


class Pipelined:
    """A network whose `forward` and `forward_with_cfg` are computed in stages. pieces: a FastDiT or PlainPieces; group: the stages' ranks, in
    order; patches: how many, a divisor of the tokens; warmup: steps of a run that are exact. All ranks call alike, and get the same.
    `begin_run` comes before each run's first step."""

    optimisations = None  # a run's first steps and the rest do different work: not one graph

    def __init__(self, pieces, group, patches, warmup):
        self.pieces, self.group, self.patches, self.warmup = pieces, group, patches, warmup
        self.ranks = dist.get_process_group_ranks(group)
        self.stage, stages = dist.get_rank(group), len(self.ranks)
        self.blocks = range(pieces.depth * self.stage // stages, pieces.depth * (self.stage + 1) // stages)
        self.last = self.stage + 1 == stages
        pieces.attend = self._attend
        self.begin_run()

    def begin_run(self):
        self.step, self.kept = 0, [None] * len(self.blocks)  # keys and values of a block (N, T, 2·D)

    def _attend(self, qkv, num_heads, route="auto"):
        own = qkv[..., qkv.shape[-1] // 3 :]
        kept, self.block = self.kept[self.block], self.block + 1
        if self.part is None:
            self.kept[self.block - 1] = own.clone()
            return self.pieces.alone(qkv, num_heads, route)
        kept[:, self.part] = own
        return attention_to(qkv, kept, num_heads, route)

    @torch.no_grad()
    def forward(self, x, t, y):
        """As models.DiT.forward: x (N, C, H, W), t (N,), y (N,) → (N, C', H, W)."""
        pieces, exact = self.pieces, self.step < self.warmup or self.kept[0] is None
        self.step += 1
        total = (x.shape[-1] // pieces.patch_size) ** 2
        length = total // (1 if exact else self.patches)
        modulation, parts, sending = pieces.modulation(t, y), [], []
        for start in range(0, total, length):
            self.part, self.block = None if exact else slice(start, start + length), 0
            h = pieces.embed(x, slice(start, start + length)).contiguous()  # (N, t, D)
            if self.stage:
                dist.recv(h, self.ranks[self.stage - 1], self.group)
            h = pieces.tower(h, modulation, self.blocks).contiguous()
            if self.last:
                parts.append(h)  # (N, t, p·p·C')
            else:
                sending.append((dist.isend(h, self.ranks[self.stage + 1], self.group), h))
        out = (
            torch.cat(parts, 1)
            if self.last
            else pieces.position.new_empty(len(x), total, pieces.out_channels * pieces.patch_size**2)
        )
        for one, _ in sending:
            one.wait()
        dist.broadcast(out, self.ranks[-1], self.group)
        return pieces.unpatchify(out).to(x.dtype)

    __call__ = forward

    def forward_with_cfg(self, x, t, y, cfg_scale):
        """As models.DiT.forward_with_cfg: x (2N, C, H, W), of which the first N rows are read; t, y (2N,) → (2N, C', H, W)."""
        half = x[: len(x) // 2]
        out = self.forward(torch.cat([half, half]), t, y)
        eps, rest = out[:, :3], out[:, 3:]
        cond, uncond = eps.chunk(2)
        guided = uncond + cfg_scale * (cond - uncond)
        return torch.cat([torch.cat([guided, guided]), rest], dim=1)
