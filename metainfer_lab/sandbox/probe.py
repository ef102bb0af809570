"""Runs inside a sandbox and tries to break it; prints the JSON list of what it could do."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any


def main(question: dict[str, Any]) -> list[str]:
    """Names of the properties that do not hold."""
    attempts: dict[str, Callable[[], object]] = {
        "reads a foreign file": lambda: os.open(question["secret"], os.O_RDONLY),
        "writes where it may only read": lambda: os.open(
            f"{question['readable']}/x", os.O_CREAT | os.O_WRONLY
        ),
        "reaches the network": lambda: socket.create_connection(
            ("127.0.0.1", question["port"]), timeout=2
        ),
        "reaches a local socket": lambda: _local(question["local"]),
        "reads its parent's environment": lambda: _environment(question),
        "sees foreign packages": lambda: _packages(question["packages"]),
    }
    leaks = [name for name, attempt in attempts.items() if not _refused(attempt)]
    with open(f"{question['scratch']}/x", "w") as file:  # what must work
        file.write("x")
    return leaks


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _local(path: str) -> None:
    """A stream that connects, or else a datagram that needs no connection."""
    try:
        socket.socket(socket.AF_UNIX).connect(path)
    except OSError:
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", f"{path}-datagrams")


def _environment(question: dict[str, Any]) -> None:
    with open(f"/proc/{question['parent']}/environ", "rb") as file:
        if file.read(256).hex() != question["environment"]:
            raise OSError("another process under the same number")


def _packages(folders: list[str]) -> None:
    for folder in folders:
        try:
            with open(f"{folder}/transformers/__init__.py") as file:
                file.read()
                return
        except OSError:
            continue
    raise OSError("not there")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
