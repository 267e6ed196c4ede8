"""Faults inside one process: its wall clock steps, its disk's reads, writes and syncs fail or take long. See
`faultshim.c`.

Invariant: a process without the environment of a `FaultShim` knows nothing of it, and one with it runs on the real
clock and disk until a fault is asked for.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

from .paths import OUT
from .run import Run

_SOURCE = Path(__file__).with_suffix(".c")
_FIELDS = (
    "clock_ahead_ns",
    *("sync_delay_us", "sync_fails"),
    *("read_delay_us", "read_fails"),
    *("write_delay_us", "write_fails"),
)
"""As the library has them, 64 bits each."""
_LAYOUT = struct.Struct(f"={len(_FIELDS)}q")
"""Of these, and once more of how often each was met, which the library counts."""
KINDS = ("sync", "read", "write")
"""What a process asks of its disk."""


def _library() -> Path:
    """The library, built if its source is newer."""
    built = OUT / "faultshim.so"
    if not built.exists() or built.stat().st_mtime < _SOURCE.stat().st_mtime:
        built.parent.mkdir(exist_ok=True)
        fresh = built.with_suffix(".new")
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", fresh, _SOURCE, "-ldl"], check=True)
        fresh.rename(built)
    return built


class FaultShim:
    """What one process, through all its lives, believes of the clock and of its disk."""

    def __init__(self, run: Run, name: str, has_disk: bool = False):
        """With `has_disk` all writes by position are caught, however they are made: only where faults of them are
        wanted, because each one costs a signal."""
        path = run.directory / f"{name}.faults"
        path.write_bytes(bytes(2 * _LAYOUT.size))
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 2 * _LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(_library()), "TIDELOCK_FAULTS": str(path)}
        """For the process."""
        if has_disk:
            self.environment["TIDELOCK_FAULTS_OF_DISK"] = "1"
        self._values = dict.fromkeys(_FIELDS, 0)

    def step_clock(self, ahead_s: float) -> None:
        """From now on its wall clock is so far ahead of the real one, or behind it."""
        self._set(clock_ahead_ns=int(ahead_s * 1e9))

    def slow_disk(self, kind: str, delay_ms: float) -> None:
        """Each request of this kind takes so much longer."""
        assert kind in KINDS
        self._set(**{f"{kind}_delay_us": int(delay_ms * 1e3)})

    def fail_disk(self, kind: str, fails: bool) -> None:
        """Each request of this kind fails, and does nothing."""
        assert kind in KINDS
        self._set(**{f"{kind}_fails": int(fails)})

    def met(self, field: str) -> int:
        """How often the process has met the fault that this field brings about, so far."""
        return _LAYOUT.unpack_from(self._mapped, _LAYOUT.size)[_FIELDS.index(field)]

    def _set(self, **values: int) -> None:
        self._values.update(values)
        self._mapped[: _LAYOUT.size] = _LAYOUT.pack(*self._values.values())
