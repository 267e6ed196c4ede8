"""The network of a run: two sites, the clients, and the WAN between the sites.

    clients ── lan ── primary ── vm0 ── guest        (guest traffic is routed: it passes FORWARD)
       │                 ║ wan (delayed, can be cut)
       └────── lan ── backup ── vm0 ── guest again, after recovery

Or, for guests that talk to each other, a segment that all of them are on, which may reach over two hosts:

    clients ── lan ── primary ── br0 ─┬─ vm0 ── guest
       │  │              ║ wan        ├─ vm1 ── guest
       │  │              ║            └─ host-lan ─┐
       │  └──── lan ── primary-b ── br0 ─┬─ host-lan
       │                 ║ wan-b          └─ vm2 ── guest
       └─────── lan ── backup ── br0 ─── vm0, vm1, vm2 ── guests again, after recovery

A guest keeps its address wherever it runs; the clients' route says at which site that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from .netns import Netns, add_addresses, veth
from .run import Run
from .wan import Wan, WanParams

BRIDGE = "br0"
HOST_LAN = "host-lan"
HOSTS_MAX = 2


@dataclass(frozen=True)
class GuestNet:
    """Addresses of guest number `index`, the same at both sites. By itself behind its host, or on the segment."""

    index: int
    segment: bool = False
    host: int = 0
    """Which of the primary hosts it runs on; its gateway on the segment is that host."""

    @property
    def interface(self) -> str:
        """The guest's interface on its host: where the gate stands."""
        return f"vm{self.index}"

    @property
    def _place(self) -> tuple[int, int]:
        """The number of its network, and its own there."""
        return (100, 10 + self.index) if self.segment else (100 + self.index, 2)

    @property
    def ip4(self) -> str:
        """The guest's own address."""
        network, own = self._place
        return f"10.77.{network}.{own}"

    @property
    def ip6(self) -> str:
        """The guest's own IPv6 address."""
        network, own = self._place
        return f"fd77:{network}::{own}"

    @property
    def gateway4(self) -> str:
        """Its host's address on the guest's interface, or on the segment."""
        return f"10.77.{self._place[0]}.{1 + self.host}"

    @property
    def gateway6(self) -> str:
        """Its host's IPv6 address there."""
        return f"fd77:{self._place[0]}::{1 + self.host}"

    @property
    def mac(self) -> str:
        """The guest's hardware address."""
        return f"52:54:00:77:00:{self.index:02x}"


class Site:
    """One site, or one of its hosts: a namespace that forwards between its guests and the clients."""

    def __init__(self, run: Run, name: str):
        self.run = run
        self.name = name
        self.netns = Netns(run, name)
        self.netns.sysctl({"net.ipv4.ip_forward": 1, "net.ipv6.conf.all.forwarding": 1})

    def add_tap(self, guest: GuestNet) -> None:
        """A TAP for a QEMU guest, with its host's addresses."""
        self.netns.ip(f"tuntap add dev {guest.interface} mode tap")
        self._set_up(guest)

    def add_veth(self, guest: GuestNet, netns: Netns) -> None:
        """A cable to a process guest's namespace, `eth0` there."""
        veth(self.netns, guest.interface, netns, "eth0")
        netns.ip(f"link set eth0 address {guest.mac}")
        self._set_up(guest)
        add_addresses(netns, "eth0", f"{guest.ip4}/24", f"{guest.ip6}/64")
        netns.ip(f"route add default via {guest.gateway4}")
        netns.ip(f"-6 route add default via {guest.gateway6}")

    def unplug(self, guest: GuestNet) -> None:
        """Takes a guest's interface away, and with a process guest's the cable: it runs elsewhere from now on."""
        self.netns.ip(f"link delete {guest.interface}")

    def add_bridge(self, *hosts: int) -> None:
        """The segment's bridge, and on it the gateways of these hosts' guests."""
        # Its own address, as libvirt gives one: otherwise it has its ports' lowest, and when a guest is added that
        # changes it, what the others send through their gateway is dropped until they ask for it again.
        self.netns.ip(f"link add {BRIDGE} address 52:54:00:77:01:{hosts[0]:02x} type bridge")
        # Packets between ports pass FORWARD, too: the gate stands there.
        self.netns.sysctl({"net.bridge.bridge-nf-call-iptables": 1, "net.bridge.bridge-nf-call-ip6tables": 1})
        self.netns.ip(f"link set {BRIDGE} up")
        for host in hosts:
            of = GuestNet(0, segment=True, host=host)
            add_addresses(self.netns, BRIDGE, f"{of.gateway4}/24", f"{of.gateway6}/64")

    def _set_up(self, guest: GuestNet) -> None:
        self.netns.ip(f"link set {guest.interface} up")
        if guest.segment:
            self.netns.ip(f"link set {guest.interface} master {BRIDGE}")
        else:
            add_addresses(self.netns, guest.interface, f"{guest.gateway4}/24", f"{guest.gateway6}/64")


class Net:
    """Namespaces `primary`, `backup` and `clients`, and what connects them; with two hosts, also `primary-b`."""

    PRIMARY4, BACKUP4 = "10.77.3.1", "10.77.3.2"
    """Addresses of the sites on the WAN."""
    THIRD4 = "10.77.7.2"
    """Of a third one, if there is one."""
    PRIMARY6, BACKUP6 = "fd77:3::1", "fd77:3::2"

    def __init__(
        self,
        run: Run,
        rtt_ms: float = 0,
        seed: int = 1,
        wan: WanParams = WanParams(),
        hosts: int = 1,
        segment: bool = False,
    ):
        self.run = run
        self._hosts_are_joined = segment and hosts == HOSTS_MAX
        self.primary = Site(run, "primary")
        self.backup = Site(run, "backup")
        self.clients = Netns(run, "clients")
        self.hosts = [self.primary, *(Site(run, f"primary-{chr(ord('a') + n)}") for n in range(1, hosts))]
        """The hosts of the primary site."""
        self._lan = {
            site.name: number
            for number, site in zip((1, 2, 5), [self.primary, self.backup, *self.hosts[1:]], strict=False)
        }
        for site in [self.backup, *self.hosts]:
            self._join_clients(site)
        params = WanParams(**{**wan.__dict__, "delay_ms": rtt_ms / 2}) if rtt_ms else wan
        self.wans = [self._add_wan(number, params, seed) for number in range(hosts)]
        """Each host's own WAN to the backup."""
        if segment:
            self._join_hosts()

    @property
    def wan(self) -> Wan:
        """The WAN between the sites; with two hosts, the first host's."""
        return self.wans[0]

    def backup_address(self, host: int = 0) -> str:
        """The backup's address on a host's WAN."""
        return f"10.77.{3 + host}.2"

    def _add_wan(self, number: int, params: WanParams, seed: int) -> Wan:
        host = self.hosts[number].netns
        interface = "wan" if number == 0 else f"wan-{chr(ord('a') + number)}"
        wan = Wan(self.run, host, self.backup.netns, params, seed + number, interface=interface)
        add_addresses(host, interface, f"10.77.{3 + number}.1/24", f"fd77:{3 + number}::1/64")
        add_addresses(self.backup.netns, interface, f"10.77.{3 + number}.2/24", f"fd77:{3 + number}::2/64")
        return wan

    def _join_clients(self, site: Site) -> None:
        number = self._lan[site.name]
        lan = f"lan-{site.name}"
        veth(self.clients, lan, site.netns, "lan")
        add_addresses(site.netns, "lan", f"10.77.{number}.1/24", f"fd77:{number}::1/64")
        add_addresses(self.clients, lan, f"10.77.{number}.2/24", f"fd77:{number}::2/64")

    def add_third_site(self, rtt_ms: float) -> Site:
        """One more site, which the clients reach, with a WAN to the backup site, `THIRD4` there."""
        site = Site(self.run, "third")
        self._lan[site.name] = 6
        self._join_clients(site)
        wan = Wan(self.run, self.backup.netns, site.netns, WanParams(delay_ms=rtt_ms / 2), interface="wan-third")
        add_addresses(self.backup.netns, wan.interface, "10.77.7.1/24", "fd77:7::1/64")
        add_addresses(site.netns, wan.interface, f"{self.THIRD4}/24", "fd77:7::2/64")
        return site

    def _join_hosts(self) -> None:
        """One segment over all primary hosts, one at the backup."""
        for number, host in enumerate(self.hosts):
            host.add_bridge(number)
        self.backup.add_bridge(*range(len(self.hosts)))
        if self._hosts_are_joined:
            veth(self.hosts[0].netns, HOST_LAN, self.hosts[1].netns, HOST_LAN)
            for host in self.hosts:
                host.netns.ip(f"link set {HOST_LAN} master {BRIDGE}")

    def lan_address(self, site: Site) -> str:
        """Address at which the clients find a site, or a host of the primary one."""
        return f"10.77.{self._lan[site.name]}.1"

    def reversed(self) -> Reversed:
        """The same network for a group that is protected the other way round."""
        return Reversed(self)

    def route_clients_to(self, site: Site, guest: GuestNet) -> None:
        """From now on the clients find the guest at this site."""
        number = self._lan[site.name]
        self.clients.ip(f"route replace {guest.ip4}/32 via {self.lan_address(site)}")
        self.clients.ip(f"-6 route replace {guest.ip6}/128 via fd77:{number}::1")

    def cut_off_primary(self) -> None:
        """No packet enters or leaves the primary site any more, on any cable."""
        for number in range(len(self.hosts)):
            self.cut_off(number)

    def cut_off(self, host: int) -> None:
        """No packet enters or leaves this host any more, on any cable."""
        self.wans[host].cut()
        netns = self.hosts[host].netns
        netns.ip("link set lan down")
        if self._hosts_are_joined:
            netns.ip(f"link set {HOST_LAN} down")

    def reconnect(self, host: int = 0) -> None:
        """Undoes `cut_off`."""
        self.wans[host].mend()
        site = self.hosts[host]
        site.netns.ip("link set lan up")
        # The kernel forgets an interface's IPv6 addresses when it goes down.
        add_addresses(site.netns, "lan", f"fd77:{self._lan[site.name]}::1/64")
        if self._hosts_are_joined:
            site.netns.ip(f"link set {HOST_LAN} up")


class Reversed:
    """A network in which what was the backup site is the primary one, and the other way round."""

    def __init__(self, net: Net):
        self.primary, self.backup = net.backup, net.primary
        self.BACKUP4 = net.PRIMARY4
        self.wans = net.wans
