"""Messages between two processes over a pipe: JSON, and arrays as raw bytes behind it.

Never pickle: one end runs code that nobody has read, and unpickling runs what it is sent. The file
uses the standard library and numpy alone, so that a confined process can load it by its path.

A frame is two little-endian uint32 (header bytes, number of arrays), the JSON header, then for each
array in turn its bytes; the header's key "arrays" holds (name, dtype, shape) of each.
"""

from __future__ import annotations

import json
import math
import os
import select
import struct
import time
from typing import Any

import numpy as np

Message = dict[str, Any]
DTYPES = frozenset({"float32", "float64", "int8", "uint8", "int16", "int32", "int64"})
MAX_HEADER = 64 << 20
MAX_ARRAY = 4 << 30
PREFIX = struct.Struct("<II")


def send(fd: int, message: Message) -> None:
    """Write one message; numpy arrays may be its top-level values."""
    arrays = {k: np.ascontiguousarray(v) for k, v in message.items() if isinstance(v, np.ndarray)}
    plain = {k: v for k, v in message.items() if k not in arrays}
    plain["arrays"] = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    header = json.dumps(plain).encode()
    _write(fd, memoryview(PREFIX.pack(len(header), len(arrays)) + header))
    for array in arrays.values():
        if array.size:
            _write(fd, memoryview(array).cast("B"))


def receive(fd: int, deadline: float | None = None) -> Message:
    """Read one message. EOFError when the other end is gone, TimeoutError past `deadline`.

    deadline: a time.monotonic() value. ValueError when the bytes are no message.
    """
    header_size, n_arrays = PREFIX.unpack(_read(fd, PREFIX.size, deadline))
    if header_size > MAX_HEADER:
        raise ValueError(f"a message header of {header_size} bytes")
    message = json.loads(bytes(_read(fd, header_size, deadline)))
    described = message.pop("arrays")
    if len(described) != n_arrays:
        raise ValueError("a message that miscounts its arrays")
    for name, dtype, shape in described:
        message[name] = _read_array(fd, dtype, shape, deadline)
    return message


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether a message (or the end) waits on a pipe."""
    return bool(select.select([fd], [], [], timeout_s)[0])


def _read_array(fd: int, dtype: str, shape: list[int], deadline: float | None) -> np.ndarray:
    if dtype not in DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"an array of dtype {dtype!r}, shape {shape!r}")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > MAX_ARRAY:
        raise ValueError(f"an array of {size} bytes")
    return np.frombuffer(_read(fd, size, deadline), dtype=dtype).reshape(shape)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int, deadline: float | None) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        if deadline is not None and not readable(fd, max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        count = os.readv(fd, [view])
        if not count:
            raise EOFError
        view = view[count:]
    return buffer
