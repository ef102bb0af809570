"""Memory that the kernels of all ranks write into: CUDA IPC, no NVLink multicast.

One buffer a rank: [2 generations][rank that wrote][bytes_per_rank]. A kernel sends its values
straight into the other GPUs' buffers, 12 bytes and the number of the exchange in one store (they
arrive together, as NCCL's LL128 protocol presumes of NVLink, so there is no fence), and polls its
own buffer. Numbers
count up by one from exchange to exchange, generations alternate: whoever sends number n has
received all of n - 1, so everybody has read n - 2, which it overwrites.
"""

import ctypes
from typing import Any

import torch

from .cuda import _check, _driver

LOAD_LIMIT_MS, STEP_LIMIT_MS = 60_000, 5_000  # a kernel gives up (traps) after that
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class Exchange:
    """`control` [2] int32: number of the next exchange, limit of a wait in ms. `peers` [world]:
    addresses of the buffers. `count`: exchanges that the present step has launched.
    """

    def __init__(self, group: Any, bytes_per_rank: int):
        self.group, self.bytes_per_rank, self.count = group, bytes_per_rank, 0
        self._own, self._opened = _allocate(2 * group.world * bytes_per_rank), []
        self.control = torch.tensor([1, LOAD_LIMIT_MS], dtype=torch.int32, device="cuda")
        handles = group.gather(torch.frombuffer(_export(self._own), dtype=torch.uint8).cuda())
        addresses = []
        for rank, handle in enumerate(handles.cpu()):
            addresses.append(self._own if rank == group.rank else self._open(handle))
        self.peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")

    def _open(self, handle: torch.Tensor) -> int:
        address = ctypes.c_uint64()
        copy = _Handle.from_buffer_copy(bytes(handle.tolist()))
        call = _driver().cuIpcOpenMemHandle_v2
        _check(call(ctypes.byref(address), copy, LAZY_PEER_ACCESS), "opening a peer's memory")
        self._opened.append(address)
        return address.value

    def next(self) -> int:
        """The place in its step of the exchange that is launched now."""
        self.count += 1
        return self.count - 1

    def advance(self) -> None:
        """After a step's last exchange, in stream order."""
        self.control[:1].add_(self.count)

    def hurry(self) -> None:
        """From here on all ranks are loaded: waits are short."""
        self.control[1] = STEP_LIMIT_MS

    def close(self) -> None:
        """After all ranks have stopped to send."""
        for address in self._opened:
            _check(_driver().cuIpcCloseMemHandle(address), "closing a peer's memory")
        _check(_driver().cuMemFree_v2(ctypes.c_uint64(self._own)), "freeing")


def _allocate(size: int) -> int:
    torch.cuda.current_stream().synchronize()  # makes torch's context current
    address = ctypes.c_uint64()
    _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"{size} bytes")
    _check(_driver().cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(size)), "clearing")
    return address.value


def _export(address: int) -> bytearray:
    handle = _Handle()
    call = _driver().cuIpcGetMemHandle
    _check(call(ctypes.byref(handle), ctypes.c_uint64(address)), "sharing memory between GPUs")
    return bytearray(handle.bytes)


def arguments(group: Any) -> tuple[torch.Tensor | int | None, ...]:
    """What a kernel that exchanges takes at its end: peers, control, rank, place, bytes a rank."""
    exchange = group.exchange
    if exchange is None:
        return None, None, 0, 0, 0
    sizes = exchange.next(), exchange.bytes_per_rank
    return exchange.peers, exchange.control, group.rank, *sizes
