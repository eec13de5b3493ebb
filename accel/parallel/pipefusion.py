"""PipeFusion (Fang et al. 2024, arXiv:2405.14430): blocks in stages, one a GPU; patches of tokens flow through them.

It is approximate. A patch attends to the keys and values that its stage has: this evaluation's of the patches before
it, the last evaluation's of those after it. Neighbouring steps differ little, so the picture is close, but there is no
bound. The first `warmup` evaluations are exact: all tokens pass in one piece. The pipeline drains at every evaluation,
so that guidance, sampler and random stream stay as they are on every rank. The best speed-up of s stages and m patches
is s·m / (s + m − 1).
"""

from contextlib import AbstractContextManager
from itertools import count

import torch
import torch.distributed as dist

from accel.kernels.attention import attention_to
from accel.network import BlockNetwork, Network


class Pipelined(Network):
    """A network that is evaluated in stages: all ranks call alike with the same tensors, and get the same.

    group: the stages' ranks, in order; patches: how many, a divisor of the tokens; warmup: exact evaluations of a
    sampling run.
    """

    def __init__(self, network: BlockNetwork, group: dist.ProcessGroup, patches: int, warmup: int):
        super().__init__()
        self.network, self.group, self.patches, self.warmup = network, group, patches, warmup
        self.patch_size, self.in_channels = network.patch_size, network.in_channels
        self.ranks, self.stage = dist.get_process_group_ranks(group), dist.get_rank(group)
        stages = len(self.ranks)
        self.blocks = range(network.depth * self.stage // stages, network.depth * (self.stage + 1) // stages)
        self.last = self.stage + 1 == stages
        self.out_width = None  # values that the last layer gives a token
        self._begin()

    def _begin(self):
        self.evaluations, self.kept = 0, []  # keys and values of each block (N, T, 2·D)

    def sampling_run(self, timesteps: list[int], labels: list[int], at_once: int = 1) -> AbstractContextManager:
        self._begin()
        return super().sampling_run(timesteps, labels, at_once)

    @torch.no_grad()
    def tokens(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        network, total = self.network, (x.shape[-1] // self.patch_size) ** 2
        exact = self.evaluations < self.warmup or not self.kept
        self.evaluations += 1
        if exact:
            self.kept = []
        length = total if exact else total // self.patches
        condition, parts, sending = network.condition(t, y), [], []
        for start in range(0, total, length):
            part = slice(start, start + length)
            h = network.embed(x, part, copies=len(y) // len(x)).contiguous()  # (N, t, D)
            if self.stage:
                dist.recv(h, self.ranks[self.stage - 1], self.group)
            attend = self._keep if exact else self._attend_to_kept(part)
            h = network.forward_blocks(h, condition, attend=attend, blocks=self.blocks, tokens=part).contiguous()
            if self.last:
                parts.append(h)  # (N, t, p·p·C')
            else:
                sending.append((dist.isend(h, self.ranks[self.stage + 1], self.group), h))  # h lives until it is sent
        for transfer, _ in sending:
            transfer.wait()
        return self._broadcast(torch.cat(parts, 1) if self.last else h, (len(y), total))

    def _keep(self, qkv, num_heads):
        """All tokens, one block after the other: keep the keys and values, attend as one GPU does."""
        self.kept.append(qkv[..., qkv.shape[-1] // 3 :].clone())
        return self.network.attention(qkv, num_heads)

    def _attend_to_kept(self, part):
        """The attention of the tokens `part`, in one block after the other."""
        blocks = count()

        def attend(qkv, num_heads):
            kept = self.kept[next(blocks)]
            kept[:, part] = qkv[..., qkv.shape[-1] // 3 :]
            return attention_to(qkv, kept, num_heads)

        return attend

    def _broadcast(self, out, shape):
        """The last stage's out (*shape, p·p·C') to every stage."""
        if self.out_width is None:
            width = [out.shape[-1]]
            dist.broadcast_object_list(width, self.ranks[-1], self.group)
            [self.out_width] = width
        out = out if self.last else out.new_empty(*shape, self.out_width)
        dist.broadcast(out, self.ranks[-1], self.group)
        return out
