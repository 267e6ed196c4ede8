"""Networks: guests that talk to each other, on one host or two, and what is cut off when a host dies."""

from __future__ import annotations

import subprocess
import sys

from tidelock_testbed.guest import ProcessGuest
from tidelock_testbed.net import GuestNet, Net
from tidelock_testbed.netns import Netns
from tidelock_testbed.process import wait_until

SEND_WITH_OPTIONS = """
import socket, sys
four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
four.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([158, 4, 1, 2]))
four.sendto(b"x", (sys.argv[1], 9))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_DSTOPTS, bytes([0, 0, 0x1E, 4, 1, 2, 3, 4]))
six.sendto(b"x", (sys.argv[2], 9))
"""


def reaches(netns: Netns, address: str) -> bool:
    argv = netns.enter(["ping", "-c", "1", "-W", "1", address])
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def add_guest(run, net: Net, index: int, host: int, site=None) -> tuple[Netns, GuestNet]:
    guest = GuestNet(index, segment=True, host=host)
    site = site or net.hosts[host]
    netns = Netns(run, f"guest{index}-{site.name}")
    site.add_veth(guest, netns)
    net.route_clients_to(site, guest)
    return netns, guest


def test_guests_of_two_hosts_are_on_one_segment_and_clients_reach_all(run):
    net = Net(run, hosts=2, segment=True)
    (a, a_net), (b, b_net), (c, c_net) = (add_guest(run, net, n, host) for n, host in ((0, 0), (1, 0), (2, 1)))
    for netns, other in ((a, b_net), (a, c_net), (c, a_net)):
        assert reaches(netns, other.ip4)
        assert reaches(netns, other.ip6)
    for guest in (a_net, b_net, c_net):
        assert reaches(net.clients, guest.ip4)
        assert reaches(net.clients, guest.ip6)
    # Each host has a WAN of its own.
    assert all(reaches(net.hosts[host].netns, net.backup_address(host)) for host in (0, 1))
    net.wans[0].cut()
    assert not reaches(net.hosts[0].netns, net.backup_address(0))
    assert reaches(net.hosts[1].netns, net.backup_address(1))


def test_a_guest_that_is_added_does_not_take_the_others_gateway_away(run):
    """A bridge by itself has the lowest address of its ports, and a new one may be lower."""
    net = Net(run, hosts=2, segment=True)
    site = net.backup
    _, first = add_guest(run, net, 0, 0, site)
    site.netns.ip(f"link set {first.interface} address 02:00:00:00:00:02")
    other, other_net = add_guest(run, net, 1, 1, site)
    assert reaches(other, other_net.gateway4)  # it knows its gateway's hardware address from now on
    _, added = add_guest(run, net, 2, 0, site)
    site.netns.ip(f"link set {added.interface} address 02:00:00:00:00:01")
    for guest in (first, other_net, added):
        assert reaches(net.clients, guest.ip4)


def test_a_host_that_is_cut_off_takes_only_its_own_guests_with_it(run):
    net = Net(run, hosts=2, segment=True)
    (_, a_net), (b, b_net) = (add_guest(run, net, n, n) for n in (0, 1))
    net.cut_off(0)
    assert not reaches(net.clients, a_net.ip4)
    assert not reaches(b, a_net.ip4)
    assert reaches(net.clients, b_net.ip4)
    assert reaches(net.hosts[1].netns, net.backup_address(1))
    # At the backup site they are on one segment again, wherever they were before.
    (_, again_net), (b_again, _) = (add_guest(run, net, n, n, net.backup) for n in (0, 1))
    assert reaches(b_again, again_net.ip4)
    assert reaches(net.clients, again_net.ip4)


def test_a_guest_says_so_if_a_packet_with_an_option_reaches_it(run):
    net = Net(run, hosts=1, segment=True)
    sender, _ = add_guest(run, net, 0, 0)
    guest = ProcessGuest(run, GuestNet(1, segment=True), "guest", web=[], capture=True)
    guest.boot(net.primary, [])
    guest.wait_ready(20)
    assert reaches(sender, guest.net.ip4)
    assert guest.options_seen == []
    argv = sender.enter([sys.executable, "-c", SEND_WITH_OPTIONS, guest.net.ip4, guest.net.ip6])
    subprocess.run(argv, check=True)
    wait_until("both options are seen", lambda: len(guest.options_seen) == 2, 10, guest.processes)
    four, six = sorted(guest.options_seen)
    assert (four[:2], four[40:48]) == ("46", "9e040102")
    assert (six[:1], six[12:14], six[84:96]) == ("6", "3c", "1e0401020304")
