"""A guest of libvirt as Debian 12 has it (9.0, which drops `<reconnect>`): a restart of the daemon under write load
costs no write, because the domain pauses at an error and the daemon resumes it."""

from __future__ import annotations

import signal

from tidelock_testbed.libvirt import Libvirt, initramfs_with
from tidelock_testbed.pair import DISK, LONG_S, Options, Pair
from tidelock_testbed.process import wait_until

DOMAIN = "shop-db"
BLOCKS = 1024
INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
while read -r module; do /bin/busybox insmod "/modules/$module"; done < /modules/order
number=0
while true; do
    number=$((number + 1))
    /bin/busybox printf '%4096d' "$number" > /block
    if /bin/busybox dd if=/block of=/dev/vda bs=4096 seek=$((number % {BLOCKS})) \\
        oflag=direct conv=notrunc,fsync 2> /error
    then echo "wrote $number"
    else echo "failed $number: $(/bin/busybox cat /error)"
    fi
done
"""
DOCUMENT = """\
<domain type='qemu'>
  <name>{name}</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
    <cmdline>console=ttyS0 panic=-1 quiet no_timer_check</cmdline>
  </os>
  <cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model></cpu>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw' cache='none' discard='unmap' error_policy='stop' rerror_policy='stop'/>
      <source protocol='nbd' name='{disk}'><host transport='unix' socket='{socket}'/></source>
      <target dev='vda' bus='virtio'/>
    </disk>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <serial type='file'><source path='{console}'/><target port='0'/></serial>
  </devices>
</domain>
"""


def test_a_restart_of_the_daemon_fails_no_write_of_a_libvirt_guest(run, image):
    libvirt = Libvirt(run)
    pair = Pair(run, Options(disk_mib=8))
    pair.daemon_environment = libvirt.environment
    pair.start()
    console = run.directory / "console.log"
    initrd = initramfs_with(image, INIT, run.directory / "initrd.img")
    document = DOCUMENT.format(
        name=DOMAIN, kernel=image.kernel, initrd=initrd, disk=DISK, socket=pair.socket, console=console
    )
    libvirt.start(DOMAIN, document)

    def written() -> int:
        text = console.read_text(errors="replace") if console.exists() else ""
        assert "failed" not in text, text[text.index("failed") :][:200]
        return text.count("wrote ")

    def wait_written(count: int) -> None:
        wait_until(f"the guest has written {count} times", lambda: written() >= count, 2 * LONG_S, [libvirt.process])

    wait_written(50)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        pair.daemon.signal(number)
        pair.daemon.wait(LONG_S)
        wait_until("the domain has paused", lambda: "I/O error" in libvirt.state(DOMAIN), LONG_S, [libvirt.process])
        before = written()
        pair.start_daemon()
        wait_written(before + 50)
        pair.wait_state("protected")
    libvirt.virsh("destroy", DOMAIN)
    assert "was resumed" in pair.daemon.log.read_text()
    pair.check_sites()
