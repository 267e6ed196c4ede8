"""Guests: a QEMU VM with PostgreSQL, and a process in a namespace that stands for one in quick tests.

Both name the steps of their start on their console (`TIDELOCK-GUEST <step>`); `phases` has the time of each.
Both can say there how many rows they have; `rows` is the last number. Both forget everything but their disks when
they are killed.
"""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from .image import GuestImage
from .net import GuestNet, Site
from .netns import Netns
from .paths import CACHE, SYSTEM_PYTHON
from .process import Process, wait_until
from .progress import say
from .run import Run

MARK = "TIDELOCK-GUEST "


class Guest:
    """What both kinds have in common: a process and the phases that it reports."""

    process: Process
    port: int

    def __init__(self, run: Run, net: GuestNet, name: str):
        self.run = run
        self.net = net
        self.name = name
        self.phases: dict[str, float] = {}
        self.rows = 0
        self.on_rows: Callable[[int], None] | None = None
        """Is told at once, on the console's thread, when the guest says how many rows it has."""
        self.started_at = 0.0

    def hear(self, at: float, line: str) -> None:
        """Takes a line of its console."""
        _, mark, step = line.partition(MARK)
        if not mark:
            return
        name, _, value = step.partition(":")
        if name == "rows":
            if value.strip().isdigit():  # not psql's last words
                self.rows = int(value)
                if self.on_rows:
                    self.on_rows(self.rows)
        else:
            self.phases.setdefault(name.split(" ")[0], at)

    def wait_ready(self, timeout_s: float = 120) -> float:
        """Waits until it serves clients; returns the seconds since its start."""
        wait_until(
            f"{self.name} is ready",
            lambda: "ready" in self.phases or "failed" in self.phases,
            timeout_s,
            [self.process],
        )
        if "failed" in self.phases:
            raise RuntimeError(f"{self.name} could not start\n{self.process.tail()}")
        return self.phases["ready"] - self.started_at

    def kill(self) -> None:
        """Ends it at once, as a power cut would."""
        self.process.kill()


class VmGuest(Guest):
    """A QEMU VM: PostgreSQL 15 on a data disk that is attached over NBD or is a file."""

    port = 5432

    def boot(
        self,
        site: Site,
        image: GuestImage,
        disks: list[str],
        memory_mib: int = 512,
        reconnect_s: int = 0,
        say_rows: bool = False,
    ) -> None:
        """Starts it at a site. `disks` are NBD URIs or paths of raw images: the data disk, then the log's, if any."""
        argv = vm_command(self.net, image, disks, memory_mib, reconnect_s, say_rows)
        site.add_tap(self.net)
        self.started_at = time.monotonic()
        self.process = Process(self.run, self.name, argv, site.netns, on_line=self.hear)


def vm_command(
    net: GuestNet,
    image: GuestImage,
    disks: list[str],
    memory_mib: int = 512,
    reconnect_s: int = 0,
    say_rows: bool = False,
) -> list[str]:
    """QEMU's command line for such a guest."""
    argv = ["qemu-system-x86_64", *accelerator(image)]
    argv += ["-M", "q35", "-smp", "1", "-m", str(memory_mib)]
    argv += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]
    argv += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel_options(net, say_rows)]
    argv += root_disk(image)
    for number, disk in enumerate(disks):
        argv += [
            "-blockdev",
            f"node-name=disk{number},{blockdev(disk, reconnect_s)}",
            "-device",
            f"virtio-blk-pci,drive=disk{number},werror=report,rerror=report",
        ]
    return argv + [
        "-netdev",
        f"tap,id=net0,ifname={net.interface},script=no,downscript=no",
        "-device",
        f"virtio-net-pci,netdev=net0,mac={net.mac}",
    ]


def accelerator(image: GuestImage) -> list[str]:
    """KVM if a guest boots with it here, else TCG."""
    if kvm_boots(image):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", "max"]


def kernel_options(net: GuestNet, say_rows: bool = False) -> str:
    """The kernel's command line: also what the guest's init is told."""
    return (
        f"console=ttyS0 panic=-1 quiet tidelock.ip4={net.ip4}/24 tidelock.gw4={net.gateway4} "
        f"tidelock.ip6={net.ip6}/64 tidelock.gw6={net.gateway6}" + (" tidelock.rows=1" if say_rows else "")
    )


def root_disk(image: GuestImage) -> list[str]:
    """The root disk, read-only and not protected, as a device."""
    return [
        *("-blockdev", f"driver=raw,node-name=rootfs,read-only=on,file.driver=file,file.filename={image.root}"),
        *("-device", "virtio-blk-pci,drive=rootfs"),
    ]


def blockdev(disk: str, reconnect_s: int = 0) -> str:
    """QEMU's block options for an NBD URI on a Unix socket, or for a path."""
    if not disk.startswith("nbd+unix://"):
        return f"driver=raw,file.driver=file,file.filename={disk}"
    uri = urlsplit(disk)
    socket = parse_qs(uri.query)["socket"][0]
    export = unquote(uri.path.removeprefix("/"))
    return f"driver=nbd,server.type=unix,server.path={socket},export={export},reconnect-delay={reconnect_s}"


def kvm_boots(image: GuestImage) -> bool:
    """Whether a guest really boots with KVM. `/dev/kvm` alone proves nothing: some hosts' guests hang.

    The answer is kept for as long as this machine stays up.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    answer = CACHE / f"kvm-{boot_id}-{image.directory.name}"
    with (CACHE / "kvm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            for old in CACHE.glob("kvm-*-*"):
                old.unlink()
            answer.write_text("yes" if _kvm_probe(image) else "no")
            say("guests run with KVM" if answer.read_text() == "yes" else "guests run without KVM: none booted with it")
    return answer.read_text() == "yes"


def _kvm_probe(image: GuestImage) -> bool:
    if not Path("/dev/kvm").exists():
        return False
    argv = [
        "qemu-system-x86_64",
        "-accel",
        "kvm",
        "-cpu",
        "host",
        "-M",
        "q35",
        "-m",
        "256",
        "-nodefaults",
        "-no-reboot",
        "-display",
        "none",
        "-serial",
        "stdio",
        "-kernel",
        image.kernel,
        "-initrd",
        image.initrd,
        "-append",
        "console=ttyS0 panic=-1 quiet tidelock.probe",
    ]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=8)
    except subprocess.TimeoutExpired:
        return False
    return b"probe-ok" in done.stdout


class ProcessGuest(Guest):
    """A namespace with a small row store that uses its disks through libnbd: ready in a fraction of a second."""

    port = 7000

    def __init__(self, run: Run, net: GuestNet, name: str):
        super().__init__(run, net, name)
        self.netns = Netns(run, name)

    def boot(self, site: Site, disks: list[str], reconnect_s: float = 0) -> None:
        """Starts it at a site, on disks that are NBD URIs."""
        site.add_veth(self.net, self.netns)
        program = Path(__file__).with_name("rowstore.py")
        argv = [SYSTEM_PYTHON, "-u", program, "--port", self.port, "--reconnect-s", reconnect_s, *disks]
        self.started_at = time.monotonic()
        self.process = Process(self.run, self.name, argv, self.netns, on_line=self.hear)
