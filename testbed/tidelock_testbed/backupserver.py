"""The backup server of a run: an ordinary process without any privilege, and its command line."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from .hostdaemon import BACKUP_PORT, GROUP, MEMBER
from .netns import Netns
from .paths import BIN
from .pki import TlsFiles
from .process import Process, run_command, wait_until
from .run import Run

UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]
"""Even as root: without a capability, root is the user that owns the run's files and nothing more."""


class BackupServer:
    """`tidelock-backup` in the backup site's namespace."""

    def __init__(
        self,
        run: Run,
        netns: Netns,
        directory: Path,
        tls: TlsFiles,
        hosts: dict[str, list[str]] | None = None,
        window: str = "",
        name: str = "",
        sections: list[str] = (),
    ):
        """A second server of a run needs a name. `sections` are lines of further sections of its configuration."""
        self.run, self.netns = run, netns
        self.name = f"tidelock-backup-{name}" if name else "tidelock-backup"
        sockets = run.sockets / name
        sockets.mkdir(exist_ok=True)
        self.exports = sockets / "exports"
        self.control_socket = sockets / "backup.sock"
        self.config = directory / "backup.toml"
        self.data = directory / "data"
        lines = [
            "[server]",
            'name = "backup-a"',
            f'listen = "0.0.0.0:{BACKUP_PORT}"',
            f'data_dir = "{self.data}"',
            f'control = "{self.control_socket}"',
            f'exports_dir = "{self.exports}"',
            tls.toml(),
            *(["[retention]", f'window = "{window}"'] if window else []),
        ]
        for group, names in (hosts or {}).items():  # only a group of several hosts must be named
            lines += ["[[group]]", f'name = "{group}"', f"hosts = {json.dumps(names)}"]
        self.config.write_text("\n".join([*lines, *sections]) + "\n")
        self.process: Process | None = None
        self.environment = {"NO_COLOR": "1"}
        self.confined = UNPRIVILEGED
        """None of it: a server that runs PostgreSQL as another user."""

    def _command(self, *words: object) -> list:
        return [*self.confined, BIN / "tidelock-backup", *words, "--config", self.config]

    def command(self, *words: object) -> str:
        """Runs its command line, and returns what that prints."""
        return run_command(self._command(*words), f"run tidelock-backup {words[0]}", self.netns, timeout_s=300)

    def start(self) -> None:
        """Starts it and waits until it listens for its command line."""
        self.process = Process(self.run, self.name, self._command("serve"), self.netns, env=self.environment)
        wait_until(f"{self.name} listens", self._listens, 30, [self.process])

    def _listens(self) -> bool:
        # Not by asking for the status: without a server, that opens the data directory itself.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            try:
                control.connect(str(self.control_socket))
            except OSError:
                return False
        return True

    def status(self) -> dict:
        """What it says of itself."""
        return json.loads(run_command(self._command("status", "--json"), "ask the backup server", self.netns))

    def recover(
        self,
        *options: str,
        name: str = "recover",
        on_line: Callable[[float, str], None] | None = None,
        group: str = GROUP,
    ) -> Process:
        """Begins a recovery: the process of the command, which is over when it says so."""
        # The last of the options may be QEMU's.
        # A drill knows that the primary is dead, even where the backup has heard it a moment ago.
        knows = ["--although-connected"] if "--primary-is-dead" in options else []
        words = [*self._command("recover", group), *knows, *options]
        return Process(self.run, name, words, self.netns, on_line=on_line)

    def seed(self, disks: dict[str, Path], group: str = GROUP, member: str = MEMBER) -> None:
        """Makes a group of disks that are at this site; their files are taken, not copied."""
        self.seed_all({f"{member}.{name}": path for name, path in disks.items()}, group)

    def seed_all(self, disks: dict[str, Path], group: str) -> None:
        """The same with the disks of several members, by MEMBER.DISK."""
        words = [f"{disk}={path}" for disk, path in disks.items()]
        run_command(self._command("seed", group, *words, "--move"), f"seed {group}", self.netns)

    def export(self, disk: str, out: Path, at: str = "latest", group: str = GROUP, member: str = MEMBER) -> None:
        """Copies a disk into a raw image."""
        words = ["export", group, f"{member}.{disk}", out, "--at", at]
        run_command(self._command(*words), f"export {disk}", self.netns, timeout_s=300)

    def bookmark(self, name: str, group: str = GROUP) -> None:
        """Names the state that a recovery would take now."""
        run_command(self._command("bookmark", group, name), f"set the bookmark {name}", self.netns)

    def remove(self, group: str, member: str) -> None:
        """Takes a member out of a group for good."""
        run_command(self._command("remove", group, member), f"remove {member}", self.netns)

    def uri(self, disk: str, group: str = GROUP, member: str = MEMBER) -> str:
        """Where a recovered disk is served."""
        return f"nbd+unix:///{member}.{disk}?socket={self.exports / group / member}.{disk}.sock"
