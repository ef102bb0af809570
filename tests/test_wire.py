"""The pipe between processes: what goes in comes out; nonsense and silence are told apart."""

import contextlib
import os
import time

import numpy as np
import pytest

from metainfer_lab import wire


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_arrays_and_numbers_come_back(pipe):
    logits = np.random.default_rng().standard_normal((3, 5)).astype(np.float32)
    empty = np.zeros((0, 4), np.int64)
    wire.send(pipe[1], {"op": "x", "logits": logits, "empty": empty, "nan": float("nan")})
    message = wire.receive(pipe[0], time.monotonic() + 5)
    assert np.array_equal(message["logits"], logits) and message["logits"].dtype == np.float32
    assert message["empty"].shape == (0, 4) and message["op"] == "x"
    assert message["nan"] != message["nan"]


def test_the_other_end_may_be_silent_or_gone(pipe):
    with pytest.raises(TimeoutError):
        wire.receive(pipe[0], time.monotonic() + 0.05)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        wire.receive(pipe[0], time.monotonic() + 1)


@pytest.mark.parametrize("dtype", ["object", "float16"])
def test_an_array_of_another_dtype_is_nonsense(pipe, dtype):
    header = f'{{"arrays": [["x", "{dtype}", [1]]]}}'.encode()
    os.write(pipe[1], wire.PREFIX.pack(len(header), 1) + header + b"12345678")
    with pytest.raises(ValueError, match="dtype"):
        wire.receive(pipe[0], time.monotonic() + 1)
