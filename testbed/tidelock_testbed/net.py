"""The network of a run: two sites, the clients, and the WAN between the sites.

    clients ── lan ── primary ── vm0 ── guest        (guest traffic is routed: it passes FORWARD)
       │                 ║ wan (delayed, can be cut)
       └────── lan ── backup ── vm0 ── guest again, after recovery

A guest keeps its address wherever it runs; the clients' route says at which site that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from .netns import Netns, add_addresses, veth
from .run import Run
from .wan import Wan, WanParams


@dataclass(frozen=True)
class GuestNet:
    """Addresses of guest number `index`, the same at both sites."""

    index: int

    @property
    def interface(self) -> str:
        """The guest's interface on its host: where the gate stands."""
        return f"vm{self.index}"

    @property
    def ip4(self) -> str:
        """The guest's own address."""
        return f"10.77.{100 + self.index}.2"

    @property
    def ip6(self) -> str:
        """The guest's own IPv6 address."""
        return f"fd77:{100 + self.index}::2"

    @property
    def gateway4(self) -> str:
        """Its host's address on the guest's interface."""
        return f"10.77.{100 + self.index}.1"

    @property
    def gateway6(self) -> str:
        """Its host's IPv6 address on the guest's interface."""
        return f"fd77:{100 + self.index}::1"

    @property
    def mac(self) -> str:
        """The guest's hardware address."""
        return f"52:54:00:77:00:{self.index:02x}"


class Site:
    """One site: a namespace that forwards between its guests and the clients."""

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
        self._set_up(guest)
        add_addresses(netns, "eth0", f"{guest.ip4}/24", f"{guest.ip6}/64")
        netns.ip(f"route add default via {guest.gateway4}")
        netns.ip(f"-6 route add default via {guest.gateway6}")

    def _set_up(self, guest: GuestNet) -> None:
        self.netns.ip(f"link set {guest.interface} up")
        add_addresses(self.netns, guest.interface, f"{guest.gateway4}/24", f"{guest.gateway6}/64")


class Net:
    """Namespaces `primary`, `backup` and `clients`, and what connects them."""

    PRIMARY4, BACKUP4 = "10.77.3.1", "10.77.3.2"
    """Addresses of the sites on the WAN."""
    PRIMARY6, BACKUP6 = "fd77:3::1", "fd77:3::2"

    def __init__(self, run: Run, rtt_ms: float = 0, seed: int = 1, wan: WanParams = WanParams()):
        self.run = run
        self.primary = Site(run, "primary")
        self.backup = Site(run, "backup")
        self.clients = Netns(run, "clients")
        for number, site in [(1, self.primary), (2, self.backup)]:
            lan = f"lan-{site.name}"
            veth(self.clients, lan, site.netns, "lan")
            add_addresses(site.netns, "lan", f"10.77.{number}.1/24", f"fd77:{number}::1/64")
            add_addresses(self.clients, lan, f"10.77.{number}.2/24", f"fd77:{number}::2/64")
        params = WanParams(**{**wan.__dict__, "delay_ms": rtt_ms / 2}) if rtt_ms else wan
        self.wan = Wan(run, self.primary.netns, self.backup.netns, params, seed)
        add_addresses(self.primary.netns, self.wan.interface, f"{self.PRIMARY4}/24", f"{self.PRIMARY6}/64")
        add_addresses(self.backup.netns, self.wan.interface, f"{self.BACKUP4}/24", f"{self.BACKUP6}/64")

    def route_clients_to(self, site: Site, guest: GuestNet) -> None:
        """From now on the clients find the guest at this site."""
        number = 1 if site is self.primary else 2
        self.clients.ip(f"route replace {guest.ip4}/32 via 10.77.{number}.1")
        self.clients.ip(f"-6 route replace {guest.ip6}/128 via fd77:{number}::1")

    def cut_off_primary(self) -> None:
        """No packet enters or leaves the primary site any more, on any cable."""
        self.primary.netns.ip("link set lan down")
        self.wan.cut()
