"""Launches a command confined: `python -I -S confine.py POLICY command...`. Stands alone.

Within bubblewrap it sets limits and becomes the command; POLICY is then {"limits": ...} alone. On
the Landlock rung it does all that there is:

It forks. The child ties its own hands (no new privileges, resource limits, Landlock for files, TCP
and signals, seccomp against sockets and tracing) and becomes the command; the parent stays as the
subreaper of whatever the command leaves behind and ends all of it. POLICY is one JSON object:
listable, readable, writable: paths; sockets: whether they stay; local_sockets: whether those of
AF_UNIX may be made, where others go, that lead nowhere; limits: values by RLIMIT_* name.

Landlock does not confine sockets that are files (a container's or a desktop's daemons listen on
some), and seccomp cannot read a path. CUDA wants a socket to listen on and no other: so nothing may
`connect`, and none is made that could send without it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38

CAPABILITY_VERSION, KEPT_CAPABILITIES = (
    0x20080522,
    1 << 1 | 1 << 2,
)  # CAP_DAC_OVERRIDE, _READ_SEARCH

# Landlock: uapi/linux/landlock.h. Bits of an older ABI are a prefix of a newer one's.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
LIST = 1 << 3  # read folder
READ = LIST | 1 << 0 | 1 << 2  # and execute, read file
FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # rights that a plain file can have

# seccomp: AUDIT_ARCH and the numbers of calls that reach other processes, the network or the kernel
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AF_UNIX, CONNECTED = 1, (1, 5)  # SOCK_STREAM, SOCK_SEQPACKET: they send to whom they connected
CONNECT = {"x86_64": 42, "aarch64": 203}
SOCKETS = {"x86_64": [41, 53], "aarch64": [198, 199]}  # socket, socketpair
FORBIDDEN = {
    # ptrace, process_vm_readv, process_vm_writev, io_uring_setup, bpf, keyctl, mount, setns,
    # userfaultfd
    "x86_64": [101, 310, 311, 425, 321, 250, 165, 308, 323],
    "aarch64": [117, 270, 271, 425, 280, 219, 40, 268, 282],
}


def main(policy: dict[str, Any], command: list[str]) -> int:
    """Run the command confined; its exit code, or 128 + the signal that ended it."""
    if policy.keys() == {"limits"}:
        set_limits(policy["limits"])
        os.execv(command[0], command)
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    signal.signal(signal.SIGTERM, lambda *_: leave(143))
    child = os.fork()
    if child == 0:
        try:
            confine(policy)
            os.execv(command[0], command)
        except BaseException as error:
            print(f"confine: {error}", file=sys.stderr, flush=True)
            os._exit(125)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return leave(code if code >= 0 else 128 - code)


def leave(code: int) -> int:
    """End every descendant, however it hid, then this process."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    os._exit(code)


def confine(policy: dict[str, Any]) -> None:
    """Tie this process's hands; it and what it starts can never untie them."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_limits(policy["limits"])
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    drop_capabilities()
    landlock(policy)
    seccomp(policy["sockets"], policy["local_sockets"])


def set_limits(limits: dict[str, int]) -> None:
    """Limits by RLIMIT_* name, never above those that are set already."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    """Of root's powers keep reading and writing files: CAP_PERFMON reads any process's memory."""
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    state = ctypes.create_string_buffer(24)
    check(libc.capget(header, state), "capabilities")
    effective, permitted, inheritable, *_ = struct.unpack("<6I", state.raw)
    kept = [bits & KEPT_CAPABILITIES for bits in (effective, permitted, inheritable)]
    check(libc.capset(header, struct.pack("<6I", *kept, 0, 0, 0)), "capabilities")


def landlock(policy: dict[str, Any]) -> None:
    """Allow reading and writing below the given paths only; TCP and foreign signals not at all."""
    sockets = policy["sockets"]
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    if abi < 4:
        raise OSError(f"Landlock ABI {abi}; files and TCP need 4 (Linux 6.7)")
    rights = (1 << FS_BITS[min(abi, 5)]) - 1
    attributes = struct.pack("<QQQ", rights, 0 if sockets else 3, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16
    rules = check(libc.syscall(CREATE_RULESET, attributes, size, 0), "ruleset")
    for paths, allowed in (("listable", LIST), ("readable", READ), ("writable", rights)):
        for path in policy[paths]:
            _allow(rules, path, allowed)
    check(libc.syscall(RESTRICT_SELF, rules, 0), "restrict")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # what is not there needs no permission
    rights = rights if os.path.isdir(path) else rights & FILE_ONLY
    rule = struct.pack("<Qi", rights, fd)
    check(libc.syscall(ADD_RULE, rules, 1, rule, 0), f"rule for {path}")
    os.close(fd)


def seccomp(sockets: bool, local: bool) -> None:
    """Answer EPERM to calls that reach past the sandbox (classic BPF over struct seccomp_data)."""
    machine = platform.machine()
    numbers = FORBIDDEN[machine] + ([] if sockets else [*SOCKETS[machine], CONNECT[machine]])
    opens = SOCKETS[machine][0]
    load, mask, jump_equal, jump_greater, ret = 0x20, 0x54, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    program = [
        (load, 0, 0, 4),
        (jump_equal, 1, 0, ARCHES[machine]),
        (ret, 0, 0, kill),
        (load, 0, 0, 0),
        (jump_greater, 0, 1, 0x40000000),  # the x32 numbers are a second way to each call
        (ret, 0, 0, kill),
    ]
    if local and not sockets:  # socket(family, type, ...): its arguments are at bytes 16 and 24
        program += [(jump_equal, 0, 8, opens), (load, 0, 0, 16), (jump_equal, 0, 4, AF_UNIX)]
        program += [(load, 0, 0, 24), (mask, 0, 0, 0xF)]
        program += [(jump_equal, 2, 0, CONNECTED[0]), (jump_equal, 1, 0, CONNECTED[1])]
        program += [(ret, 0, 0, deny), (ret, 0, 0, allow)]
    for number in numbers:
        program += [(jump_equal, 0, 1, number), (ret, 0, 0, deny)]
    program.append((ret, 0, 0, allow))
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def check(result: int, what: str) -> int:
    """The result of a C call, or OSError."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
