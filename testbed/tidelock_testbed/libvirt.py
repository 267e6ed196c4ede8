"""A libvirtd of a test's own, beside whatever the machine runs.

It lives in a mount namespace with a file system of its own at /run, /var/lib, /var/cache and /etc/libvirt, and listens
in the run's directory for sockets. `/dev/kvm` is hidden from it: libvirt's probe of it hangs on some machines (see the
guests' images: they run without KVM).
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from pathlib import Path

from .image import GuestImage
from .process import Process, run_command, wait_until
from .run import Run

READY_S = 120
"""The first connection waits for libvirt's probe of every QEMU that is installed."""

LIBVIRTD_CONF = """\
unix_sock_dir = "{sockets}"
unix_sock_group = "root"
auth_unix_ro = "none"
auth_unix_rw = "none"
"""
QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
"""
START = """\
set -eu
for directory in /run /var/lib /var/cache /etc/libvirt; do mount -t tmpfs tmpfs "$directory"; done
[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm
# Debian's libvirt does not start without the user and the group that its package of units makes.
(cat /etc/passwd; echo "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin") > /run/passwd
(cat /etc/group; echo "libvirt-qemu:x:64055:") > /run/group
mount --bind /run/passwd /etc/passwd
mount --bind /run/group /etc/group
printf %s "$QEMU_CONF" > /etc/libvirt/qemu.conf
exec /usr/sbin/libvirtd --config "$1"
"""


class Libvirt:
    """A running libvirtd. Its domains end with the run."""

    def __init__(self, run: Run):
        self.run = run
        sockets = run.sockets / "libvirt"
        sockets.mkdir()
        self.environment = {"LIBVIRT_DEFAULT_URI": f"qemu+unix:///system?socket={sockets}/libvirt-sock"}
        """For whoever is to find this libvirtd and no other."""
        config = run.directory / "libvirtd.conf"
        config.write_text(LIBVIRTD_CONF.format(sockets=sockets))
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", START, "libvirtd", config]
        self.process = Process(run, "libvirtd", argv, env={"QEMU_CONF": QEMU_CONF})
        run.on_close("end the domains", self._end_domains)
        wait_until("libvirtd answers", self._answers, READY_S, [self.process])

    def _answers(self) -> bool:
        try:
            self.virsh("list")
        except RuntimeError:
            return False
        return True

    def virsh(self, *words: object) -> str:
        """Runs `virsh` and returns what it prints."""
        argv = ["env", *(f"{name}={value}" for name, value in self.environment.items()), "virsh", "--quiet", *words]
        return run_command(argv, f"run virsh {words[0]}", timeout_s=READY_S).strip()

    def start(self, name: str, document: str) -> None:
        """Defines a domain and starts it."""
        path = self.run.directory / f"{name}.xml"
        path.write_text(document)
        self.virsh("define", path)
        self.virsh("start", name)

    def state(self, name: str) -> str:
        """The state of a domain, with its reason."""
        return self.virsh("domstate", name, "--reason")

    def _end_domains(self) -> None:
        """QEMU is not a child of ours: it goes on when libvirtd ends."""
        for pid_file in Path(f"/proc/{self.process.pid}/root/run/libvirt/qemu").glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)


def initramfs_with(image: GuestImage, init: str, into: Path) -> Path:
    """The guest image's initramfs with another first process: of two archives in a row, the kernel takes the later
    file."""
    with into.open("wb") as out:
        out.write(image.initrd.read_bytes())
        out.write(_newc("init", init.encode(), stat.S_IFREG | 0o755))
        out.write(_newc("TRAILER!!!", b"", 0))
    return into


def _newc(name: str, content: bytes, mode: int) -> bytes:
    """A file of a cpio archive: https://docs.kernel.org/driver-api/early-userspace/buffer-format.html."""
    fields = [1, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)
