"""Network namespaces of a run."""

from __future__ import annotations

import subprocess

from .run import Run


class Netns:
    """A network namespace, named `<run's prefix>-<name>`, deleted when the run is closed."""

    def __init__(self, run: Run, name: str):
        self.name = f"{run.prefix}-{name}"
        run.note(netns=self.name)
        _ip(["netns", "add", self.name])
        run.on_close(f"delete namespace {self.name}", lambda: _ip(["netns", "delete", self.name]))
        # Addresses are usable at once: no duplicate address detection in a network that has no strangers.
        self.sysctl(
            {
                "net.ipv6.conf.all.accept_dad": 0,
                "net.ipv6.conf.default.accept_dad": 0,
                "net.ipv4.tcp_rmem": "4096 131072 67108864",
                "net.ipv4.tcp_wmem": "4096 65536 67108864",
            }
        )
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """The file that stands for the namespace."""
        return f"/run/netns/{self.name}"

    def enter(self, argv: list) -> list:
        """The command that runs `argv` inside; the process keeps its number."""
        return ["nsenter", f"--net={self.path}", "--", *argv]

    def ip(self, words: str) -> str:
        """Runs `ip <words>` inside."""
        return _ip(["-n", self.name, *words.split()])

    def sysctl(self, values: dict[str, object]) -> None:
        """Sets kernel parameters of this namespace only."""
        words = [f"{name}={value}" for name, value in values.items()]
        done = subprocess.run(self.enter(["sysctl", "-q", "-w", *words]), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"cannot set {words} in {self.name}: {done.stderr}")


def _ip(words: list[str]) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def veth(a: Netns, a_name: str, b: Netns, b_name: str) -> None:
    """A cable between two namespaces. It is made inside them: no interface ever stands outside."""
    _ip(["link", "add", a_name, "netns", a.name, "type", "veth", "peer", "name", b_name, "netns", b.name])
    a.ip(f"link set {a_name} up")
    b.ip(f"link set {b_name} up")


def add_addresses(netns: Netns, interface: str, *addresses: str) -> None:
    """Gives an interface its addresses, each with its prefix length."""
    for address in addresses:
        netns.ip(f"addr add {address} dev {interface}" + (" nodad" if ":" in address else ""))
