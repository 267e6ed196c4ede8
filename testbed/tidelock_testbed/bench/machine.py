"""What the results were measured on, without names and dates."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from ..paths import OUT
from .fio import fio_version


def machine() -> dict[str, str]:
    """One line for each thing that a reader needs to compare."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory_kib = int(re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text()).group(1))
    virtual = "hypervisor" in Path("/proc/cpuinfo").read_text()
    return {
        "processor": f"{os.cpu_count()} cores of {model.group(1) if model else platform.machine()}"
        + (" (a virtual machine)" if virtual else ""),
        "memory": f"{memory_kib / (1 << 20):.0f} GiB",
        "kernel": "Linux " + re.sub(r"-.*", "", platform.release()),
        "system": _os_name(),
        "file system": _first_line(["findmnt", "-n", "-o", "FSTYPE", "-T", str(OUT)]),
        "fio": fio_version(),
        "qemu-nbd": _first_line(["qemu-nbd", "--version"]),
        "nbdkit": _first_line(["nbdkit", "--version"]),
    }


def busy() -> float:
    """How many runnable processes there were in the last minute: a quiet machine gives the better figures."""
    return os.getloadavg()[0]


def _os_name() -> str:
    match = re.search(r'PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text())
    return match.group(1) if match else platform.system()


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if done.stdout else "not there"
