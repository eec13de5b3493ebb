"""One denoising step on many GPUs: the 2B rows that guidance makes and their tokens, over one mesh.

    ranks (rows × tokens)      what each computes
    rows axis                  its share of the 2B rows: no word between ranks until the step's end
    tokens axis                its share of every row's tokens, from the patch embedding to the last layer; attention alone exchanges

The output is gathered once a step. Guidance, sampler and noise then run on every rank alike, on the same numbers: the random stream and the
sampling loop know nothing of the mesh.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accel.kernels.attention import attention


def make_mesh(rows, tokens, device_type):
    """Axes rows × tokens over the first rows · tokens ranks, tokens innermost: neighbours, on one host if they fit. A collective call: every rank
    of the job makes it, those that are left idle too."""
    return DeviceMesh(device_type, torch.arange(rows * tokens).view(rows, tokens), mesh_dim_names=("rows", "tokens"))


class Sharded:
    """A network whose `forward` and `forward_with_cfg` are computed by a mesh, in place of the network on every rank of it.

    network: a FastDiT, or PlainPieces around a models.DiT; mesh: as of `make_mesh`; attend: one of EXCHANGES on the mesh's tokens, or network.alone
    for one rank of tokens; everyone: the process group of the mesh's ranks. All ranks call alike with the same tensors, and get the same.
    """

    def __init__(self, network, mesh, attend, everyone):
        self.network, self.everyone = network, everyone
        self.rows, self.tokens = mesh.shape
        self.row, self.token = mesh.get_local_rank("rows"), mesh.get_local_rank("tokens")
        network.attend = attend
        # Captured on a GPU, the plain network's steps too: shared, they are short enough for launches to count.
        self.optimisations = getattr(network, "optimisations", None) or SimpleNamespace(
            hoist=False, ends="torch", graph=True
        )
        self.conditioning = getattr(network, "conditioning", None)
        self.table = self.hoisted = None
        self.captured = {}

    def overflowed(self):
        """As FastDiT's; of this rank's part."""
        return self.network.overflowed()

    @torch.no_grad()
    def forward(self, x, t, y):
        """As models.DiT.forward: x (N, C, H, W), t (N,), y (N,) → (N, C', H, W)."""
        return self.network.unpatchify(self.last_tokens(x, t, y)).to(x.dtype)

    __call__ = forward

    @torch.no_grad()
    def forward_with_cfg(self, x, t, y, cfg_scale):
        """As models.DiT.forward_with_cfg: x (2N, C, H, W), of which the first N rows are read; t, y (2N,) → (2N, C', H, W)."""
        out = self.network.unpatchify(self.last_tokens(x[: len(x) // 2], t, y))
        eps, rest = out[:, :3], out[:, 3:]
        cond, uncond = eps.chunk(2)
        guided = uncond + cfg_scale * (cond - uncond)
        return torch.cat([torch.cat([guided, guided]), rest], dim=1).to(x.dtype)

    def last_tokens(self, x, t, y):
        """As FastDiT's."""
        network, rows = self.network, len(y)
        share = -(-rows // self.rows)
        # The last rank's share is filled up with the last row: collectives want equal shapes, and the time is that of the largest share anyway.
        mine = torch.arange(self.row * share, (self.row + 1) * share, device=x.device).clamp(max=rows - 1)
        total = (x.shape[-1] // network.patch_size) ** 2
        tokens = total // self.tokens
        part = slice(self.token * tokens, (self.token + 1) * tokens)
        h = network.embed(x[mine % len(x)], part)  # (share, t, D)
        out = network.tower(h, network.modulation(t[mine], y[mine], self.hoisted)).contiguous()  # (share, t, p·p·C')
        whole = out.new_empty(self.rows * self.tokens, *out.shape)
        dist.all_gather_into_tensor(whole.flatten(0, 1), out, group=self.everyone)
        whole = whole.unflatten(0, (self.rows, self.tokens)).transpose(1, 2)  # (R, share, s, t, ·)
        return whole.reshape(self.rows * share, total, -1)[:rows]


class PlainPieces:
    """models.DiT cut where `Sharded` cuts a network."""

    alone = attend = staticmethod(attention)

    def __init__(self, model, depth=None):
        self.model, self.patch_size, self.blocks = model, model.patch_size, model.blocks[:depth]
        self.depth, self.width, self.out_channels, self.position = (
            len(self.blocks),
            model.pos_embed.shape[-1],
            model.out_channels,
            model.pos_embed[0],
        )

    def shallow(self, depth):
        return PlainPieces(self.model, depth)

    def embed(self, x, tokens=slice(None)):
        return (self.model.x_embedder(x) + self.model.pos_embed)[:, tokens]

    def modulation(self, t, y, hoisted=None):
        return self.model.t_embedder(t) + self.model.y_embedder(y, False)  # (N, D)

    def tower(self, x, c, blocks=None):
        blocks = blocks or range(self.depth)
        for i in blocks:
            x = self.blocks[i](x, c, self.attend)
        return self.model.final_layer(x, c) if blocks[-1] + 1 == self.depth else x

    def unpatchify(self, x):
        return self.model.unpatchify(x)
