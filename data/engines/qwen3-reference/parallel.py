"""Tensor parallelism: a rank's part of each tensor, and how ranks put their results together.

Rows of q, k, v, gate, up, embedding and head, columns of o and down (Shoeybi et al. 2019). Beyond
as many ranks as key/value heads, each of these lives on several ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Config

PATIENCE = timedelta(seconds=20)  # with another rank
BY_ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLUMN = ("o_proj", "down_proj")


class RankLost(RuntimeError):
    """Another rank is gone, or late beyond patience."""


@dataclass(frozen=True)
class Group:
    """This rank among `world` of them."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls, rank: int, world: int, config: Config, device: torch.device) -> "Group":
        """Meet the other ranks, as MASTER_ADDR and MASTER_PORT say; ValueError if they cannot
        share the model."""
        for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
            if getattr(config, name) % world:
                raise ValueError(f"world: {world} does not divide {name} {getattr(config, name)}")
        kv_heads = config.num_key_value_heads
        if kv_heads % world and world % kv_heads:
            raise ValueError(f"world: {world} ranks cannot share {kv_heads} num_key_value_heads")
        group = cls(rank, world, device)
        if world > 1 and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            settings = {"rank": rank, "world_size": world, "timeout": PATIENCE}
            group._together(dist.init_process_group, backend, **settings)
        return group

    def own(self, config: Config) -> Config:
        """The heads that this rank computes."""
        kv_heads = max(1, config.num_key_value_heads // self.world)
        heads = config.num_attention_heads // self.world
        return replace(config, num_attention_heads=heads, num_key_value_heads=kv_heads)

    def part(self, name: str, tensor: Tensor, kv_heads: int) -> Tensor:
        """This rank's part of a tensor of the checkpoint."""
        module = name.split(".")[-2]
        parts = min(self.world, kv_heads) if module in ("k_proj", "v_proj") else self.world
        if module in BY_ROW:
            return tensor.chunk(parts, dim=0)[self.rank * parts // self.world].clone()
        return tensor.chunk(parts, dim=1)[self.rank].clone() if module in BY_COLUMN else tensor

    def embed(self, weight: Tensor, tokens: list[int]) -> Tensor:
        """Rows of an embedding of which this rank holds `weight`: [T, hidden]."""
        local = torch.tensor(tokens, device=weight.device) - self.rank * weight.shape[0]
        others = (local < 0) | (local >= weight.shape[0])
        return self.sum(weight[local.masked_fill(others, 0)].masked_fill(others[:, None], 0))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        if self.world > 1:
            self._together(dist.all_reduce, x)
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        """All ranks' x [T, n], beside each other in order of rank."""
        if self.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world)]
        self._together(dist.all_gather, parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def agree(self, number: int) -> int:
        """Rank 0's number."""
        box = torch.tensor([number], device=self.device)
        if self.world > 1:
            self._together(dist.broadcast, box, src=0)
        return int(box)

    def _together(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            raise RankLost(f"rank {self.rank} of {self.world} misses another: {reason}") from error
