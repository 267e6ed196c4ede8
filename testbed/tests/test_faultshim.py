"""Faults inside a process: each kind of request to a file fails, or takes longer, when it is told to and only then."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tidelock_testbed.faultshim import KINDS, FaultShim

SLOW_MS = 300
PWRITEV = 296
"""The system call's number: who makes it without the C library is caught, too."""
ASKED = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)

def pwritev():
    vector = (ctypes.c_void_p * 2)(ctypes.cast(b"data", ctypes.c_void_p), 4)
    written = libc.syscall({PWRITEV}, file, vector, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if written < 0:
        raise OSError(ctypes.get_errno(), "pwritev")
    return written

file = os.open(sys.argv[1], os.O_RDWR)
requests = {{
    "sync": lambda: os.fdatasync(file),
    "read": lambda: os.pread(file, 4, 0) == b"data",
    "write": pwritev,
    "write by the C library": lambda: os.pwrite(file, b"data", 0),
}}
for line in sys.stdin:
    try:
        print(requests[line.strip()](), flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
GOOD = {"sync": "None", "read": "True", "write": "4", "write by the C library": "4"}
EIO = "5"


def with_fault(of: str) -> dict[str, str]:
    """What is answered while requests of this kind fail."""
    return {kind: EIO if kind.startswith(of) else good for kind, good in GOOD.items()}


class Asked:
    """A process that reads, writes and syncs a file on demand."""

    def __init__(self, run, shim: FaultShim):
        file = run.directory / "file"
        file.write_bytes(b"data")
        words = [sys.executable, "-c", ASKED, file]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=shim.environment, **pipes)
        run.on_close("end it", self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __call__(self, kind: str) -> str:
        self.process.stdin.write(kind + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_fail_and_are_slow_when_they_are_told_to(run, kind: str):
    shim = FaultShim(run, "it", has_disk=True)
    ask = Asked(run, shim)
    for others in range(2):
        assert {k: ask(k) for k in GOOD} == GOOD, others
        shim.fail_disk(kind, True)
        assert {k: ask(k) for k in GOOD} == with_fault(kind)
        shim.fail_disk(kind, False)
    shim.slow_disk(kind, SLOW_MS)
    began = time.monotonic()
    assert ask(kind) == GOOD[kind]
    assert time.monotonic() - began >= SLOW_MS / 1e3
    shim.slow_disk(kind, 0)
    assert {k: ask(k) for k in GOOD} == GOOD
