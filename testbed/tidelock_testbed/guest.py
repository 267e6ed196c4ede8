"""Guests: a QEMU VM with PostgreSQL, and processes in a namespace that stand for one in quick tests.

Both may run a tier's web service beside their database, or in place of one (`guest/tier.py`).

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
from .process import Process, kill_at_once, wait_until
from .progress import say
from .run import Run

MARK = "TIDELOCK-GUEST "
WEB_PORT = 8000
READY_S = 300
"""A VM without KVM boots in half a minute, and in more than two where three runs share two processors."""
KERNEL_BASICS = "console=ttyS0 panic=-1 quiet no_timer_check"
"""Without the check, in which an emulated timer that is late on a busy machine makes the kernel panic."""


class Guest:
    """What both kinds have in common: a process and the phases that it reports."""

    process: Process
    database: str
    """What its database speaks: a kind of client."""
    database_port: int

    def __init__(self, run: Run, net: GuestNet, name: str, web: list[str] | None = None, capture: bool = False):
        self.run = run
        self.net = net
        self.name = name
        self.web = web
        """The arguments of its web service, if it has one."""
        self.capture = capture
        """Whether it watches what it receives for IP options."""
        self.options_seen: list[str] = []
        """The headers of packets with options that it has received: it should never see any."""
        self.phases: dict[str, float] = {}
        self.steps_to_ready = {"ready"} | ({"web"} if web is not None else set()) | ({"capture"} if capture else set())
        """What it must have said before it serves clients."""
        self.rows = 0
        self.on_rows: Callable[[int], None] | None = None
        """Is told at once, on the console's thread, when the guest says how many rows it has."""
        self.started_at = 0.0
        self._plugged_in: Site | None = None

    def plug_in(self, site: Site) -> None:
        """Gives it its interface at a site, if it has none there yet: what watches the interface may want it early."""
        if self._plugged_in is not site:
            self._plugged_in = site
            self._add_interface(site)

    def _add_interface(self, site: Site) -> None:
        raise NotImplementedError

    @property
    def speaks(self) -> str:
        """What kind of client it serves."""
        return self.database if self.web is None else "web"

    @property
    def port(self) -> int:
        """Where it serves clients."""
        return self.database_port if self.web is None else WEB_PORT

    @property
    def processes(self) -> list[Process]:
        """All that it consists of."""
        return [self.process]

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
        elif name == "option":
            self.options_seen.append(value.strip())
        else:
            self.phases.setdefault(name.split(" ")[0], at)

    def wait_ready(self, timeout_s: float = READY_S) -> float:
        """Waits until it serves clients; returns the seconds since its start."""
        wait_until(
            f"{self.name} is ready",
            lambda: self.steps_to_ready <= self.phases.keys() or "failed" in self.phases,
            timeout_s,
            self.processes,
        )
        if "failed" in self.phases:
            raise RuntimeError(f"{self.name} could not start\n{self.process.tail()}")
        return self.ready_at - self.started_at

    def forget_start(self) -> None:
        """It was killed: what it said of its last start is over, and it can be booted again."""
        self.phases.clear()

    @property
    def ready_at(self) -> float:
        """When it was first able to serve clients."""
        return max(self.phases[step] for step in self.steps_to_ready)

    def kill(self) -> None:
        """Ends it at once, as a power cut would."""
        kill_at_once(self.processes)


class VmGuest(Guest):
    """A QEMU VM: PostgreSQL 15 on a data disk that is attached over NBD or is a file. Without a disk, no database."""

    database = "postgres"
    database_port = 5432

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
        argv = vm_command(self.net, image, disks, memory_mib, reconnect_s, say_rows, self.web, self.capture)
        self.plug_in(site)
        self.started_at = time.monotonic()
        self.process = Process(self.run, self.name, argv, site.netns, on_line=self.hear)

    def _add_interface(self, site: Site) -> None:
        site.add_tap(self.net)


def vm_command(
    net: GuestNet,
    image: GuestImage,
    disks: list[str],
    memory_mib: int = 512,
    reconnect_s: int = 0,
    say_rows: bool = False,
    web: list[str] | None = None,
    capture: bool = False,
) -> list[str]:
    """QEMU's command line for such a guest."""
    argv = ["qemu-system-x86_64", *accelerator(image)]
    argv += ["-M", "q35", "-smp", "1", "-m", str(memory_mib)]
    argv += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]
    argv += ["-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append"]
    argv += [kernel_options(net, say_rows, web, capture)]
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


def kernel_options(net: GuestNet, say_rows: bool = False, web: list[str] | None = None, capture: bool = False) -> str:
    """The kernel's command line: also what the guest's init is told."""
    return (
        f"{KERNEL_BASICS} tidelock.ip4={net.ip4}/24 tidelock.gw4={net.gateway4} "
        f"tidelock.ip6={net.ip6}/64 tidelock.gw6={net.gateway6}"
        + (" tidelock.rows=1" if say_rows else "")
        + (f" tidelock.web={','.join(web)}" if web is not None else "")
        + (" tidelock.capture=1" if capture else "")
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
        f"{KERNEL_BASICS} tidelock.probe",
    ]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=8)
    except subprocess.TimeoutExpired:
        return False
    return b"probe-ok" in done.stdout


class ProcessGuest(Guest):
    """A namespace with a small row store that uses its disks through libnbd: ready in a fraction of a second."""

    database = "rowstore"
    database_port = 7000

    def __init__(self, run: Run, net: GuestNet, name: str, web: list[str] | None = None, capture: bool = False):
        super().__init__(run, net, name, web, capture)
        self.netns = Netns(run, name)
        self._processes: list[Process] = []

    def boot(self, site: Site, disks: list[str], reconnect_s: float = 0) -> None:
        """Starts it at a site, on disks that are NBD URIs."""
        self.plug_in(site)
        self.started_at = time.monotonic()
        self.steps_to_ready = set()
        here = Path(__file__).parent
        if disks:
            options = ["--port", self.database_port, "--reconnect-s", reconnect_s, *disks]
            self._start(self.name, [here / "rowstore.py", *options], "ready")
        if self.web is not None:
            self._start(f"{self.name}-web", [here / "guest" / "tier.py", "--port", WEB_PORT, *self.web], "web")
        if self.capture:
            self._start(f"{self.name}-capture", [here / "guest" / "capture.py"], "capture")
        self.process = self._processes[0]

    def _add_interface(self, site: Site) -> None:
        site.add_veth(self.net, self.netns)

    def _start(self, name: str, program: list, up: str) -> None:
        self.steps_to_ready.add(up)
        self._processes.append(Process(self.run, name, [SYSTEM_PYTHON, "-u", *program], self.netns, on_line=self.hear))

    def forget_start(self) -> None:
        """Its processes, too."""
        super().forget_start()
        self._processes.clear()

    @property
    def processes(self) -> list[Process]:
        """Its row store, and its web service."""
        return self._processes
