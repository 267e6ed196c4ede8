"""Guests and clients without Tidelock: their disks are served by nbdkit and qemu-nbd.

A guest that is killed and started again on the same disk must have every row that a client was told of.
If one has not, the fault is the testbed's, and no drill proves anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest
from nbd_servers import NbdkitDisk, QemuNbdDisk

from tidelock_testbed.guest import ProcessGuest, VmGuest
from tidelock_testbed.ledger import Ledger, compare
from tidelock_testbed.net import GuestNet, Net
from tidelock_testbed.process import kill_at_once, run_command, wait_until
from tidelock_testbed.workload import Clients, rows_in


def blank(path, size_mib: int):
    with path.open("wb") as file:
        file.truncate(size_mib << 20)
    return path


def wait_for_rows(clients: Clients, rows: int, timeout_s: float = 60) -> None:
    wait_until(
        f"{rows} rows are confirmed",
        lambda: len(clients.ledger.follow().confirmed) >= rows,
        timeout_s,
        [clients.process],
    )


def test_process_guest_keeps_what_it_confirmed_on_two_disks_and_through_two_lives(run, net: Net):
    guest_net = GuestNet(0)
    disks = [NbdkitDisk(run, blank(run.directory / f"disk{n}.img", 32), f"disk{n}").uri for n in range(2)]
    net.route_clients_to(net.primary, guest_net)
    guest = ProcessGuest(run, guest_net, "guest")
    guest.boot(net.primary, disks)
    guest.wait_ready(20)
    clients = Clients(run, net, guest, clients=4)
    wait_for_rows(clients, 200)
    guest.kill()
    disaster_at = time.monotonic()

    # The same address at the other site: the clients find it again by themselves.
    again = ProcessGuest(run, guest_net, "guest-again")
    net.route_clients_to(net.backup, guest_net)
    before = len(clients.ledger.follow().confirmed)
    again.boot(net.backup, disks)
    again.wait_ready(20)
    wait_for_rows(clients, before + 100)
    ledger = clients.stop()
    rows = rows_in(net, again)
    verdict = compare(ledger, rows, disaster_at)
    assert verdict.lost == []
    assert verdict.foreign == []
    assert verdict.confirmed >= before + 100
    assert verdict.rpo_ms == 0


def test_rows_beyond_a_hole_on_one_disk_are_not_recovered(run, net: Net):
    """The row store's recovery is a prefix check across its disks: losing one old block loses all that follow."""
    images = [blank(run.directory / f"disk{n}.img", 8) for n in range(2)]
    servers = [NbdkitDisk(run, image, f"disk{n}") for n, image in enumerate(images)]
    guest_net = GuestNet(0)
    net.route_clients_to(net.primary, guest_net)
    guest = ProcessGuest(run, guest_net, "guest")
    guest.boot(net.primary, [server.uri for server in servers])
    guest.wait_ready(20)
    clients = Clients(run, net, guest, clients=1)
    wait_for_rows(clients, 50)
    ledger = clients.stop()
    guest.kill()
    disaster_at = time.monotonic()
    with images[1].open("r+b") as disk:
        disk.seek(10 * 512)  # block 22 of the log
        disk.write(bytes(512))
    again = ProcessGuest(run, guest_net, "guest-again")
    net.route_clients_to(net.backup, guest_net)
    again.boot(net.backup, [server.uri for server in servers])
    again.wait_ready(20)
    verdict = compare(ledger, rows_in(net, again), disaster_at)
    assert verdict.recovered == 21
    assert len(verdict.lost) == verdict.confirmed - 21
    assert verdict.rpo_ms > 0


def test_vm_keeps_what_it_confirmed_with_its_log_on_a_second_disk(run, net: Net, image):
    guest_net = GuestNet(0)
    templates = [image.data_split, image.wal]
    servers = []
    for template in templates:
        subprocess.run(["cp", "--sparse=always", template, run.directory / template.name], check=True)
        servers.append(QemuNbdDisk(run, run.directory / template.name, template.stem))
    disks = [server.uri for server in servers]
    net.route_clients_to(net.primary, guest_net)
    guest = VmGuest(run, guest_net, "guest")
    guest.boot(net.primary, image, disks)
    guest.wait_ready()
    clients = Clients(run, net, guest, clients=4)
    wait_for_rows(clients, 100)
    # The disk's server dies with the guest: what it had not flushed is still in the page cache, as in any crash
    # of processes; the power cut of a whole machine is the simulator's to test.
    kill_at_once([guest.process, *(server.process for server in servers)])
    disaster_at = time.monotonic()

    for template in templates:
        (run.sockets / f"{template.stem}.nbd").unlink()
        QemuNbdDisk(run, run.directory / template.name, template.stem)
    again = VmGuest(run, guest_net, "guest-again")
    net.route_clients_to(net.backup, guest_net)
    again.boot(net.backup, image, disks)
    again.wait_ready()
    before = len(clients.ledger.follow().confirmed)
    wait_for_rows(clients, before + 20)
    verdict = compare(clients.stop(), rows_in(net, again), disaster_at)
    assert verdict.lost == []
    assert verdict.foreign == []
    assert list(again.phases) == ["kernel", "disks", "postgres-start", "ready"]
    shutil.rmtree(run.directory)
    run.directory.mkdir()


def test_vm_formats_a_blank_disk(run, net: Net, image):
    disk = blank(run.directory / "blank.img", 256)
    guest = VmGuest(run, GuestNet(0), "guest")
    guest.boot(net.primary, image, [str(disk)])
    guest.wait_ready()
    assert {"formatting", "initdb"} <= set(guest.phases)


def test_ledger_reads_only_whole_lines_and_the_verdict_counts_each_kind(run):
    path = run.directory / "ledger"
    path.write_bytes(b"1.0 sent 1 1\n1.5 ok 1 1\n2.0 sent 1 2\n2.5 ok 1 2\n3.0 sent 1 3\n3.1 o")
    ledger = Ledger(path).follow()
    assert set(ledger.confirmed) == {(1, 1), (1, 2)}
    with path.open("ab") as file:
        file.write(b"k 1 3\n")
    assert ledger.follow().confirmed[(1, 3)] == 3.1
    assert ledger.reply_times_ms() == pytest.approx([100, 500, 500])
    verdict = compare(ledger, {(1, 1), (1, 4), (9, 9)}, disaster_at=4.0)
    assert verdict.lost == [(1, 2), (1, 3)]
    assert verdict.recovered_unconfirmed == 2
    assert verdict.foreign == [(1, 4), (9, 9)]
    assert verdict.rpo_ms == pytest.approx(1500)


SEND_OPTIONS = """
import socket, sys
four, six, port = sys.argv[1], sys.argv[2], 9
for options in (b"", bytes([158, 8]) + b"TIDE42"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        if options:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
        sender.sendto(b"four", (four, port))
for options in (b"", bytes([0, 0, 0x1E, 4]) + b"TIDE"):
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
        if options:
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_DSTOPTS, options)
        sender.sendto(b"six", (six, port))
"""
"""Sends a packet of each kind as any host would, and then one with a tag left in."""


@pytest.mark.parametrize("kind", ["vm", "process"])
def test_a_guest_tells_of_each_packet_that_has_an_option(run, net: Net, request, kind):
    """Drills rely on it: a guest that was silent about a tag that was left in would prove nothing."""
    guest_net = GuestNet(0)
    if kind == "vm":
        guest = VmGuest(run, guest_net, "guest", web=[], capture=True)
        guest.boot(net.primary, request.getfixturevalue("image"), [])
    else:
        guest = ProcessGuest(run, guest_net, "guest", web=[], capture=True)
        guest.boot(net.primary, [])
    guest.wait_ready()
    assert guest.options_seen == []
    run_command([sys.executable, "-c", SEND_OPTIONS, guest_net.ip4, guest_net.ip6], "send packets", net.primary.netns)
    wait_until("the guest tells of both", lambda: len(guest.options_seen) >= 2, 30, guest.processes)
    four, six = map(bytes.fromhex, guest.options_seen)
    assert four[0] == 0x47 and b"TIDE42" in four
    assert six[0] == 0x60 and b"\x1e\x04TIDE" in six
