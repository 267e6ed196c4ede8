"""The host daemon of a run: its configuration, its process, and what it says of itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidelock_testbed.risk import word_of, words_of

from .net import GuestNet
from .netns import Netns
from .paths import BIN
from .pki import TlsFiles
from .process import Process, run_command, wait_until
from .run import Run

GROUP, MEMBER, HOST = "drill", "db", "host-a"
"""Names of the configuration where there is one group with one VM on one host."""

BACKUP_PORT = 9640


@dataclass(frozen=True)
class Protection:
    """How a guest is protected; the defaults are the daemon's own."""

    mode: str = "pipelined"
    lease_s: float = 10
    grace_s: float = 15
    backlog: str = "256MiB"
    when_unreachable: str = "hold"
    before_first_contact: str = "wait"
    backlog_on_disk: str = ""
    """Its size, or nothing for none."""
    copy_rate: str = ""
    """The most that the initial copy sends, or nothing for no limit."""


@dataclass(frozen=True)
class Member:
    """A VM of a group, as the configuration describes it."""

    name: str
    net: GuestNet
    disks: dict[str, Path]
    outbound: bool = True
    machine: Path | None = None
    host: str | None = None
    """Where it runs; only needed in a group that is spread over several hosts."""
    removed: bool = False
    """Taken out for good: its section stays, so that the other writers keep their places."""

    def toml(self, alone: bool) -> list[str]:
        """Its section. What only members of a larger group need is left out if it is `alone`."""
        roles = ["writer"] * bool(self.disks) + ["outbound" if self.outbound or alone else "intermediate"]
        lines = ["[[group.member]]", f'name = "{self.name}"', f"roles = {json.dumps(roles)}"]
        if self.machine:
            lines.append(f'machine = "{self.machine}"')
        if self.host and not alone:
            lines.append(f'host = "{self.host}"')
        if self.removed:
            lines.append("removed = true")
        for name, path in self.disks.items():
            lines += ["[[group.member.disk]]", f'name = "{name}"', f'path = "{path}"', "connections = 8"]
        topology = "bridged" if self.net.segment else "routed"
        lines += ["[[group.member.network]]", f'interface = "{self.net.interface}"', f'topology = "{topology}"']
        if not alone:
            lines.append(f'addresses = ["{self.net.ip4}", "{self.net.ip6}"]')
        return lines


@dataclass(frozen=True)
class Group:
    """A group, as the configuration of every host that has members of it describes it."""

    name: str
    members: list[Member]
    protection: Protection
    keys: dict[str, object] = field(default_factory=dict)
    """Further keys of the section."""

    def toml(self) -> list[str]:
        """Its section."""
        protection = self.protection
        lines = [
            "[[group]]",
            f'name = "{self.name}"',
            f'mode = "{protection.mode}"',
            f'backlog = "{protection.backlog}"',
            f'lease = "{protection.lease_s * 1e3:.0f}ms"',
            f'grace = "{protection.grace_s * 1e3:.0f}ms"',
            f'when_unreachable = "{protection.when_unreachable}"',
            f'before_first_contact = "{protection.before_first_contact}"',
            *(f"{key} = {json.dumps(value)}" for key, value in self.keys.items()),
            *(
                ["[group.backlog_on_disk]", f'size = "{protection.backlog_on_disk}"']
                if protection.backlog_on_disk
                else []
            ),
            *(["[group.copy]", f'rate = "{protection.copy_rate}"'] if protection.copy_rate else []),
        ]
        for member in self.members:
            lines += member.toml(alone=len(self.members) == 1)
        return lines


class ControlClient:
    """A connection to the daemon's control socket."""

    def __init__(self, path: Path, timeout_s: float = 10):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")

    def ask(self, **request: str) -> dict:
        """Sends a request and returns the answer; an error is a RuntimeError."""
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the daemon closed its control socket")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the daemon says: {answer['error']['message']}")
        return answer

    def close(self) -> None:
        """Ends the connection."""
        self._answers.close()
        self._socket.close()


class HostDaemon:
    """`tidelockd` in a host's namespace."""

    def __init__(
        self,
        run: Run,
        netns: Netns,
        directory: Path,
        groups: list[Group],
        backup_address: str,
        tls: TlsFiles,
        host: str = HOST,
        server_name: str | None = None,
        sections: list[str] = (),
    ):
        """`sections` are lines of further sections of its configuration."""
        self.run, self.netns, self.host = run, netns, host
        self._sections = sections
        self.runtime = run.sockets / host
        self.control_socket = self.runtime / "control.sock"
        self._head = [
            "[host]",
            f'name = "{host}"',
            f'runtime_dir = "{self.runtime}"',
            f'state_dir = "{directory / "state"}"',
            'log = "info"',
            "[backup]",
            f'address = "{backup_address}:{BACKUP_PORT}"',
            *([f'server_name = "{server_name}"'] if server_name else []),
            tls.toml(),
        ]
        self.config = directory / "host.toml"
        self.configure(groups)
        self.process: Process | None = None
        self.environment: dict[str, str] = {}
        self._control: ControlClient | None = None

    def configure(self, groups: list[Group]) -> None:
        """Writes the configuration, for its next start."""
        lines = [*self._head, *(line for group in groups for line in group.toml()), *self._sections]
        self.config.write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self.close_control()
        name = "tidelockd" if self.host == HOST else f"tidelockd-{self.host}"
        argv = [BIN / "tidelockd", "--config", self.config]
        self.process = Process(self.run, name, argv, self.netns, env=self.environment)
        wait_until(f"{name} answers on its control socket", self._answers, 30, [self.process])

    def _answers(self) -> bool:
        try:
            self.status()
        except OSError:
            return False
        return True

    def adopt(self, *options: object, group: str = GROUP) -> str:
        """`tidelock adopt`, of the guests of a group."""
        words = [BIN / "tidelock", "adopt", group, *options]
        words += ["--socket", self.control_socket, "--config", self.config]
        return run_command(words, f"adopt the guests of {group}", timeout_s=300)

    def switch_over(self, stop: list[Process], group: str = GROUP) -> dict:
        """`tidelock switchover`, which ends these processes. Returns what it says of it."""
        command = "kill " + " ".join(str(process.pid) for process in stop)
        words = [BIN / "tidelock", "switchover", group, "--stop-command", command, "--json"]
        words += ["--socket", self.control_socket]
        return json.loads(run_command(words, f"switch {group} over", timeout_s=180))["switchover"]

    def remove_rules(self, group: str = GROUP) -> None:
        """`tidelock remove-rules`, after it was fenced and stopped: the next guest there has the same interface."""
        words = [BIN / "tidelock", "remove-rules", group, "--yes", "--config", self.config]
        run_command(words, "take the old gate away", self.netns)

    def bookmark(self, name: str, group: str = GROUP) -> None:
        """`tidelock bookmark`: names what all members of the group have written so far."""
        words = [BIN / "tidelock", "bookmark", group, name, "--socket", self.control_socket]
        run_command(words, f"set the bookmark {name}")

    def uri(self, disk: str, group: str = GROUP, member: str = MEMBER) -> str:
        """Where a disk is served."""
        return f"nbd+unix:///{disk}?socket={self.runtime / group / member / disk}.sock"

    def status(self) -> dict:
        """What it says of itself now; an OSError if it does not answer."""
        fresh = self._control is None
        try:
            self._control = self._control or ControlClient(self.control_socket)
            return self._control.ask(command="status")["status"]
        except OSError:
            self.close_control()
            if fresh:
                raise
        return self.status()  # the daemon ends connections that are silent for a minute

    def close_control(self) -> None:
        """Forgets the connection to the control socket."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def group(self, name: str | None = None) -> dict:
        """A group's status; without a name, its one group's."""
        groups = self.status()["groups"]
        return next(group for group in groups if name in (None, group["name"]))

    def wait_state(
        self,
        state: str,
        timeout_s: float,
        needs: list[Process] = (),
        on_group: Callable[[dict], None] | None = None,
        name: str | None = None,
    ) -> None:
        """Waits until a group is in this state; `on_group` is shown each status on the way there."""

        def reached() -> bool:
            group = self.group(name)
            if on_group:
                on_group(group)
            return state in words_of(group)

        try:
            wait_until(f"the group is {state}", reached, timeout_s, [self.process, *needs], every_s=0.1)
        except TimeoutError as error:
            group = self.group(name)
            raise TimeoutError(
                f"{error}\nthe group is {word_of(group)}: {group['why']['text']}; {group['detail']}"
            ) from None


def writer_of(group: dict) -> dict:
    """The status of a group's one writer."""
    return group["members"][0]["writer"]


def gate_of(group: dict) -> dict:
    """The status of the first gate of a group's one member, if it has one."""
    return next(iter(group["members"][0]["gates"]), None)
