"""What processes use: processor time, memory, and where the time goes (`perf record`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ..process import Process
from ..run import Run

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process since its start."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S


def machine_cpu_s() -> tuple[float, float]:
    """Processor seconds that all cores were busy and idle, since the machine started."""
    words = [int(word) / _TICKS_PER_S for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = words[3] + words[4]
    return sum(words[:8]) - idle, idle


class CpuMeter:
    """Cores that processes kept busy between its start and `read`."""

    def __init__(self, pids: dict[str, int]):
        self._pids = pids
        self._at = time.monotonic()
        self._before = {name: cpu_s(pid) for name, pid in pids.items()}
        self._machine = machine_cpu_s()

    def read(self) -> dict[str, float]:
        """Cores by name, and how many of the machine's were busy and idle altogether."""
        seconds = time.monotonic() - self._at
        cores = {name: (cpu_s(pid) - self._before[name]) / seconds for name, pid in self._pids.items()}
        busy, idle = machine_cpu_s()
        cores["everything"] = (busy - self._machine[0]) / seconds
        cores["idle"] = (idle - self._machine[1]) / seconds
        return {name: round(value, 2) for name, value in cores.items()}


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process in MiB."""

    now: float
    max: float
    """Since its start, as the kernel kept it."""


def memory_mib(pid: int) -> Memory:
    """Reads both."""
    text = Path(f"/proc/{pid}/status").read_text()
    rss, peak = (int(re.search(rf"{name}:\s*(\d+)", text).group(1)) / 1024 for name in ("VmRSS", "VmHWM"))
    return Memory(rss, peak)


class Profile:
    """`perf record` on some processes, from its making until `top`."""

    def __init__(self, run: Run, name: str, pids: dict[str, int], hertz: int = 499):
        self._data = run.directory / f"{name}.perf"
        self._recorder = None
        if shutil.which("perf"):
            argv = ["perf", "record", "-g", "-F", hertz, "-o", self._data, "-p", ",".join(map(str, pids.values()))]
            self._recorder = Process(run, f"perf-{name}", argv)

    def top(self, symbols: int | None = 12) -> list[dict]:
        """Where the time went: threads and functions with their share of all samples, the largest first.

        `None`: all of them.
        """
        if self._recorder is None:
            return []
        self._recorder.popen.send_signal(2)  # perf writes its file at Ctrl-C
        self._recorder.wait(30)
        done = subprocess.run(
            ["perf", "report", "-i", self._data, "--stdio", "--no-children", "-g", "none", "--sort", "comm,symbol"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        # A thread that was begun after perf has no name there, and a number that says nothing.
        unnamed = re.compile(r":\d+$")
        # After two blanks more columns may follow, which some versions of perf add.
        rows = re.findall(r"^\s*(\d+\.\d+)%\s+(\S.*?)\s+\[([k.])\]\s+(\S.*?)(?:\s\s.*)?$", done.stdout, re.MULTILINE)
        return [
            {
                "percent": float(percent),
                "thread": unnamed.sub("a later thread", thread),
                "kernel": where == "k",
                "function": function,
            }
            for percent, thread, where, function in rows[:symbols]
        ]
