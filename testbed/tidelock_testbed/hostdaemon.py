"""The host daemon of a run: its configuration, its process, and what it says of itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .net import GuestNet
from .netns import Netns
from .paths import BIN
from .pki import TlsFiles
from .process import Process, wait_until
from .run import Run

GROUP, MEMBER, HOST = "drill", "db", "host-a"
"""Names of the configuration: one group with one VM on one host."""

BACKUP_PORT = 9640


@dataclass(frozen=True)
class Protection:
    """How a guest is protected; the defaults are the daemon's own."""

    mode: str = "pipelined"
    lease_s: float = 10
    grace_s: float = 15
    backlog: str = "256MiB"
    copy_rate: str = ""
    """The most that the initial copy sends, or nothing for no limit."""


class ControlClient:
    """A connection to the daemon's control socket."""

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
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
    """`tidelockd` in a site's namespace, for one group with one member."""

    def __init__(
        self,
        run: Run,
        netns: Netns,
        directory: Path,
        disks: dict[str, Path],
        guest: GuestNet,
        backup_address: str,
        tls: TlsFiles,
        protection: Protection,
        machine: Path | None = None,
    ):
        self.run, self.netns = run, netns
        self.runtime = run.sockets / "host"
        self.control_socket = self.runtime / "control.sock"
        self.disks = disks
        self.config = directory / "host.toml"
        self.config.write_text(self._render(directory, guest, backup_address, tls, protection, machine))
        self.process: Process | None = None
        self._control: ControlClient | None = None

    def _render(
        self, directory: Path, guest: GuestNet, backup: str, tls: TlsFiles, protection: Protection, machine: Path | None
    ) -> str:
        lines = [
            "[host]",
            f'name = "{HOST}"',
            f'runtime_dir = "{self.runtime}"',
            f'state_dir = "{directory / "state"}"',
            'log = "info"',
            "[backup]",
            f'address = "{backup}:{BACKUP_PORT}"',
            tls.toml(),
            "[[group]]",
            f'name = "{GROUP}"',
            f'mode = "{protection.mode}"',
            f'backlog = "{protection.backlog}"',
            f'lease = "{protection.lease_s * 1e3:.0f}ms"',
            f'grace = "{protection.grace_s * 1e3:.0f}ms"',
            *(["[group.copy]", f'rate = "{protection.copy_rate}"'] if protection.copy_rate else []),
            "[[group.member]]",
            f'name = "{MEMBER}"',
            *([f'machine = "{machine}"'] if machine else []),
        ]
        for name, path in self.disks.items():
            lines += ["[[group.member.disk]]", f'name = "{name}"', f'path = "{path}"']
        lines += ["[group.member.network]", f'interface = "{guest.interface}"', 'topology = "routed"']
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self.close_control()
        self.process = Process(self.run, "tidelockd", [BIN / "tidelockd", "--config", self.config], self.netns)
        wait_until("tidelockd answers on its control socket", self._answers, 30, [self.process])

    def _answers(self) -> bool:
        try:
            self.status()
        except OSError:
            return False
        return True

    def uri(self, disk: str) -> str:
        """Where a disk is served."""
        return f"nbd+unix:///{disk}?socket={self.runtime / GROUP / MEMBER / disk}.sock"

    def uris(self) -> list[str]:
        """Where the disks are served, in their order."""
        return [self.uri(disk) for disk in self.disks]

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

    def group(self) -> dict:
        """Its one group's status."""
        return self.status()["groups"][0]

    def wait_state(
        self, state: str, timeout_s: float, needs: list[Process] = (), on_group: Callable[[dict], None] | None = None
    ) -> None:
        """Waits until its group is in this state; `on_group` is shown each status on the way there."""

        def reached() -> bool:
            group = self.group()
            if on_group:
                on_group(group)
            return group["state"] == state

        try:
            wait_until(f"the group is {state}", reached, timeout_s, [self.process, *needs], every_s=0.1)
        except TimeoutError as error:
            group = self.group()
            raise TimeoutError(f"{error}\nthe group is {group['state']}: {group['detail']}") from None


def writer_of(group: dict) -> dict:
    """The writer's status of a group's status."""
    return group["members"][0]["writer"]


def gate_of(group: dict) -> dict:
    """The gate's status of a group's status."""
    return group["members"][0]["gate"]
