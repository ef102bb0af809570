"""The ranks that hold one model together: what prefill, sampling and set-up exchange.

Ranks make the same calls in the same order. Sums run in the order of ranks, so that all ranks hold
the same bits. A rank that does not answer ends the others with `LostRank`.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 60.0  # ranks load at different speeds
STEP_TIMEOUT_S = 8.0  # beyond the kernels' own limit
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class LostRank(RuntimeError):
    """Another rank is gone, or did not answer in time; this engine cannot go on."""


class Group:
    """`world` ranks, this one being `rank`; a group of one exchanges nothing."""

    def __init__(self, rank: int = 0, world: int = 1):
        self.rank, self.world = rank, world
        self.lost = False  # another rank; nothing works any more
        self.exchange: Any = None  # kernels.exchange.Exchange: GPUs that see each other's memory

    @classmethod
    def join(cls, rank: int, world: int, device: str) -> "Group":
        """The process group of the environment (MASTER_ADDR, MASTER_PORT), NCCL on GPUs, else gloo.

        One that exists already is taken: it outlives an engine. LostRank if ranks do not come.
        """
        group = cls(rank, world)
        if world == 1:
            return group
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            os.environ.update(NO_MULTICAST)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            group._checked(
                dist.init_process_group,
                "nccl" if on_gpu else "gloo",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                device_id=torch.device(device) if on_gpu else None,
            )
        return group

    def connect(self, bytes_per_rank: int) -> None:
        """Lets decode kernels write into the other GPUs' memory."""
        from .kernels.exchange import Exchange

        if self.world > 1:
            self.exchange = Exchange(self, bytes_per_rank)

    def ready(self) -> None:
        """All ranks are loaded: from here on kernels wait for seconds, not for a minute."""
        if self.exchange is not None:
            self.gather(self.exchange.control)
            self.exchange.hurry()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the exchanges of kernels that belong together: a captured step, say."""
        if self.exchange is None:
            yield
            return
        self.exchange.count = 0
        yield
        self.exchange.advance()

    def leave(self) -> None:
        """Gives device memory back, once every rank is done with it."""
        if not torch.cuda.is_available():
            return
        torch.cuda.synchronize()
        if self.exchange is not None:
            self.gather(self.exchange.control)
            done = torch.cuda.Event()
            done.record()
            self.wait(done)
            self.exchange.close()
        torch.cuda.empty_cache()

    # Exchanges of tensors.

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, [world, *x.shape]."""
        if self.world == 1:
            return x[None]
        out = x.new_empty(self.world, *x.shape)
        if x.is_cuda:
            self._checked(dist.all_gather_into_tensor, out, x.contiguous())
        else:
            self._checked(dist.all_gather, list(out.unbind()), x.contiguous())
        return out

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; on GPUs NCCL's order, which its topology fixes."""
        if self.world == 1:
            return x
        if x.is_cuda:
            self._checked(dist.all_reduce, x)
            return x
        parts = self.gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[M, N] of each rank beside each other: [M, world * N]."""
        return x if self.world == 1 else self.gather(x).transpose(0, 1).flatten(1)

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values of `x`, in `x`."""
        if self.world > 1:
            self._checked(dist.broadcast, x, 0)
        return x

    # Ranks that do not answer.

    def wait(self, event: Any) -> None:
        """Until the device is past `event`; LostRank after some seconds or when a kernel gave
        up."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not self._checked(event.query):
            if self.world > 1 and time.monotonic() > deadline:
                raise self._lost(f"no answer in {STEP_TIMEOUT_S:.0f} s")

    def _checked(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            if self.world == 1:
                raise
            raise self._lost(str(error).splitlines()[0]) from error

    def _lost(self, why: str) -> LostRank:
        self.lost = True
        return LostRank(f"rank {self.rank} of {self.world} has lost another rank: {why}")
