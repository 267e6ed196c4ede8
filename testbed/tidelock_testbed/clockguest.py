"""VMs with clocks of their own: in each `ptp4l`, and in one that follows `clock-watch` as well.

Namespaces share the clock of their machine. The wall clock of a VM is its own: it can be stepped and made to drift,
and nobody else's clock moves with it. Such a VM has no disk. Its initramfs is that of the guests' image with a second
archive behind it: programs of this machine, and the libraries that they need.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from .guest import KERNEL_BASICS, accelerator
from .image import GuestImage
from .paths import BIN
from .process import Process, run_command, wait_until
from .run import Run

LONG_S = 300
"""A VM without KVM may take minutes for anything on a machine that is busy with other things."""
DONE = "TIDELOCK-DONE "

CONFIG = """[global]
uds_address /run/ptp4l
time_stamping software
pi_proportional_const 0.2
pi_integral_const 0.01
logAnnounceInterval -2
logSyncInterval -2
logMinDelayReqInterval -2
step_threshold 0.005
"""

INIT = """#!/bin/busybox sh
# First process of a VM with a clock of its own. The second serial port takes commands, a line each.
PATH=/bin
export PATH
/bin/busybox mkdir -p /proc /sys /dev /run /tmp
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
while read -r module; do
    insmod "/modules/$module" || echo "no module $module"
done < /modules/order
ip link set lo up
ip addr add "$(sed -n 's/.*tidelock\\.ip4=\\([^ ]*\\).*/\\1/p' /proc/cmdline)" dev eth0
ip link set eth0 up
stty -F /dev/ttyS1 raw -echo
exec 3<> /dev/ttyS1
echo "TIDELOCK-GUEST ready"
while read -r command <&3; do
    eval "$command" >&3 2>&1
    echo "TIDELOCK-DONE $?" >&3
done
"""


class ClockGuest:
    """A VM that is one end of a cable, with `ptp4l` on it."""

    def __init__(self, run: Run, image: GuestImage, name: str, number: int, born: str):
        """Switches it on. Its clock begins at `born`."""
        self.run, self.name, self.number = run, name, number
        self.lines: list[dict] = []
        """Statuses that `clock-watch` has printed."""
        self._commands = run.sockets / f"{name}.tty"
        argv = [*ahead_of_others(), "qemu-system-x86_64", *accelerator(image), "-M", "q35", "-smp", "1", "-m", "192"]
        argv += ["-nodefaults", "-no-reboot", "-display", "none", "-rtc", f"base={born}"]
        argv += ["-kernel", image.kernel, "-initrd", initramfs(run, image)]
        # The HPET has the frequency that it says; a time stamp counter would have to be calibrated.
        argv += ["-append", f"{KERNEL_BASICS} rdinit=/clock-init clocksource=hpet tidelock.ip4=10.77.91.{number}/24"]
        argv += ["-serial", "stdio", "-chardev", f"socket,id=tty,path={self._commands},server=on,wait=off"]
        argv += ["-serial", "chardev:tty", "-device", f"virtio-net-pci,netdev=cable,mac=02:00:00:77:91:0{number}"]
        ends = [f"{end}.type=unix,{end}.path={run.sockets / f'cable{n}'}" for end, n in cable_ends(number)]
        argv += ["-netdev", f"dgram,id=cable,{','.join(ends)}"]
        self.process = Process(run, name, argv, on_line=self._hear)
        self._tty: socket.socket | None = None
        self._is_ready = False

    def _hear(self, _at: float, line: str) -> None:
        if line.startswith("{") and line.endswith("}"):
            self.lines.append(json.loads(line))
        self._is_ready = self._is_ready or line == "TIDELOCK-GUEST ready"

    def do(self, command: str) -> str:
        """Runs a shell command in it; returns its output."""
        if self._tty is None:
            wait_until(f"{self.name} takes commands", lambda: self._is_ready, LONG_S, [self.process])
            self._tty = socket.socket(socket.AF_UNIX)
            self._tty.settimeout(LONG_S)
            self._tty.connect(str(self._commands))
            self.run.on_close(f"close the terminal of {self.name}", self._tty.close)
        self._tty.sendall(f"{command}\n".encode())
        heard = b""
        while not re.search(rb"TIDELOCK-DONE \d+\r?\n", heard):
            part = self._tty.recv(4096)
            if not part:
                raise RuntimeError(f"{self.name} ended in: {command}\n{self.process.tail()}")
            heard += part
        output, _, status = heard.decode(errors="replace").rpartition(DONE)
        if int(status) != 0:
            raise RuntimeError(f"{self.name} cannot: {command}\n{output}")
        return output

    def start_ptp4l(self, follows: bool, *options: str) -> None:
        """Starts `ptp4l`. Its log is on the console."""
        words = ["-f", "/etc/ptp4l.conf", "-i", "eth0", "-m", "-q", *(["-s"] if follows else []), *options]
        self.do(f"ptp4l {' '.join(words)} > /dev/console 2>&1 & echo $! > /run/ptp4l.pid")

    def start_clock_watch(self, *settings: str) -> None:
        """Starts `clock-watch`. Its lines come over the console."""
        self.do(f"clock-watch ptp4l /run/ptp4l {' '.join(settings)} > /dev/console 2>&1 &")

    def signal_ptp4l(self, name: str) -> None:
        """Sends a signal to `ptp4l`."""
        self.do(f"kill -{name} $(cat /run/ptp4l.pid)")

    def step_clock(self, seconds: float) -> None:
        """Steps its wall clock."""
        self.do(f"phc_ctl -q CLOCK_REALTIME -- adj {seconds}")

    def set_frequency(self, ppb: int) -> None:
        """Makes its wall clock go faster than its raw clock; whoever steers the clock sets it again."""
        self.do(f"phc_ctl -q CLOCK_REALTIME -- freq {ppb}")

    def now_ns(self) -> int:
        """Time of its wall clock."""
        found = re.search(r"clock time is (\d+)\.(\d{9})", self.do("phc_ctl CLOCK_REALTIME -- get"))
        return int(found[1] + found[2])

    def uptime_s(self) -> float:
        """The time since its start, about as its raw clock has it."""
        return float(self.do("cat /proc/uptime").split()[0])

    def next_look(self) -> dict:
        """The first line of `clock-watch` whose look is later than this call."""
        now_s = self.uptime_s() + 0.1
        return self.until("the next look", lambda line: line["raw_ns"] > now_s * 1e9, max(len(self.lines) - 1, 0))

    def until(self, what: str, condition: Callable[[dict], bool], begin: int | None = None) -> dict:
        """Waits for a line of `clock-watch`, printed from now on or from `begin` on, of which the condition is true."""
        at = len(self.lines) if begin is None else begin

        def found():
            return next((line for line in self.lines[at:] if condition(line)), None)

        return wait_until(what, found, LONG_S, [self.process])


def ahead_of_others() -> list[str]:
    """Words that put a program ahead of all others, if that is allowed: a packet that waits for a processor is late."""
    words = ["chrt", "-r", "1"]
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


def apart_ns(master: ClockGuest, follower: ClockGuest) -> tuple[int, int]:
    """Bounds of the follower's clock less the master's: the two cannot be read at once."""
    first = follower.now_ns()
    at_master = master.now_ns()
    return first - at_master, follower.now_ns() - at_master


def cable_ends(number: int) -> list[tuple[str, int]]:
    """The two ends of the cable between the VMs 1 and 2, as one of them sees it."""
    return [("local", number), ("remote", 3 - number)]


def initramfs(run: Run, image: GuestImage) -> Path:
    """The image's initramfs, and behind it an archive with what such a VM runs."""
    path = run.directory / "clock-initrd.img"
    if path.exists():
        return path
    files = {Path("/clock-init"): INIT.encode(), Path("/etc/ptp4l.conf"): CONFIG.encode()}
    for program in ["ptp4l", "pmc", "phc_ctl", str(BIN / "examples" / "clock-watch")]:
        found = shutil.which(program) or program
        files[Path("/bin") / Path(program).name] = Path(found).read_bytes()
        for library in re.findall(r"(/\S+) \(0x", run_command(["ldd", found], f"find what {program} needs")):
            files[Path(library)] = Path(library).read_bytes()
    path.write_bytes(image.initrd.read_bytes() + archive(files))
    return path


def archive(files: dict[Path, bytes]) -> bytes:
    """A cpio archive (newc) of programs, and of the directories that they are in."""
    directories = {parent for path in files for parent in path.parents if parent != Path("/")}
    parts = [entry(path, 0o40755, b"") for path in sorted(directories)]
    parts += [entry(path, 0o100755, content) for path, content in files.items()]
    return b"".join([*parts, entry(Path("/TRAILER!!!"), 0, b"")])


def entry(path: Path, mode: int, content: bytes) -> bytes:
    """A file of a cpio archive: a header of 13 numbers, its name, what it holds, each up to a multiple of four."""
    name = str(path).lstrip("/").encode() + b"\0"
    numbers = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0]
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)
