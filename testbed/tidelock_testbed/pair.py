"""A host daemon and a backup server without a guest: for tests that kill, stop, starve and lie to them.

On the loopback interface, or at both ends of a WAN. The test itself is the guest, over NBD (`oracle.py`).
"""

from __future__ import annotations

import fcntl
import filecmp
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tidelock_testbed.risk import word_of, words_of

from .hostdaemon import ControlClient, writer_of
from .net import Net, Reversed
from .oracle import Load, Oracle
from .paths import BIN
from .pki import Pki, TlsFiles
from .process import Process, run_command, wait_until
from .room import SmallFileSystem
from .run import Run

GROUP, MEMBER, DISK, HOST = "shop", "db", "root", "host-a"
MIB = 1 << 20
LONG_S = 90
"""Longer than anything takes that works: what is not done by then never will be."""


def free_port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Options:
    """What a test wants otherwise; see `docs/manual/host-configuration.md` for each."""

    mode: str = "pipelined"
    lease_ms: int = 2000
    grace_ms: int = 3000
    backlog_mib: int = 64
    copy_rate_mib: int = 0
    """0: no limit."""
    copy_more: str = ""
    """More keys beside the rate, each after a comma."""
    disk_mib: int = 32
    configured_size: str = ""
    connections: int = 64
    """Clients of the disk at once: the test bed's guests, and what looks at the disk beside them."""
    disk_before: str = ""
    """Keys of another disk, which comes first, a line each."""
    group: str = ""
    """More keys of `[[group]]`, a line each."""
    disk: Path | None = None
    """A block device, or an image that exists."""
    verify: str = ""
    """Keys of `[group.verify]`, inline."""
    heartbeat: str = ""
    """Keys of `[group.heartbeat]`, inline."""
    window: str = ""
    """Of the past that the backup keeps, if any."""
    backup_more: str = ""
    """More of the backup's configuration."""
    backup_tmpfs_mib: int = 0
    """The backup's data on a file system of this size, in a mount namespace of its own; 0: an ordinary directory."""
    state_tmpfs_mib: int = 0
    """The same of what the daemon keeps."""


class Pair:
    """Both processes and all that they need. Nothing is started yet."""

    def __init__(self, run: Run, options: Options = Options(), net: Net | Reversed | None = None, name: str = "pair"):
        """Several pairs of one run need names of their own."""
        self.run, self.options, self.net, self.name = run, options, net, name
        self._names = itertools.count()
        self.directory = run.directory / name
        self.directory.mkdir()
        self.sockets = run.sockets if name == "pair" else run.sockets / name
        self.sockets.mkdir(exist_ok=True)
        self.runtime = self.sockets / "host"
        self.socket = self.runtime / GROUP / MEMBER / f"{DISK}.sock"
        self.control_socket = self.runtime / "control.sock"
        self.data_dir = self.directory / "data"
        self.data_dir.mkdir()
        self.backup_room = self._small(self.data_dir, options.backup_tmpfs_mib, "backup-mounts")
        self.state_dir = self.directory / "state"
        self.state_room = self._small(self.state_dir, options.state_tmpfs_mib, "daemon-mounts")
        self.state_files = self.state_room.files if self.state_room else self.state_dir
        """What the daemon keeps, as seen from outside."""
        self.state_file = self.state_files / GROUP / f"{MEMBER}.json"
        self.disk = options.disk or self._blank_disk()
        self.address = net.BACKUP4 if net else "127.0.0.1"
        self.port = 9640 if net else free_port()
        self.pki = Pki(self.directory / "authority")
        self.backup_tls = self.pki.issue("backup", self.address, self.directory / "backup-tls")
        self.host_tls = self.pki.issue("host", HOST, self.directory / "host-tls")
        self.host_config, self.backup_config = self.directory / "host.toml", self.directory / "backup.toml"
        self.write_host_config(self.host_tls)
        self.write_backup_config()
        self.daemon: Process | None = None
        self.backup: Process | None = None
        self.daemon_programs, self.backup_programs = BIN, BIN
        self.daemon_environment: dict[str, str] = {}
        self.backup_environment: dict[str, str] = {}

    def _process_name(self, program: str) -> str:
        number = next(self._names)
        return f"{program}-{number}" if self.name == "pair" else f"{self.name}-{program}-{number}"

    def _small(self, directory: Path, size_mib: int, name: str) -> SmallFileSystem | None:
        name = name if self.name == "pair" else f"{self.name}-{name}"
        return SmallFileSystem(self.run, directory, size_mib, name) if size_mib else None

    def _blank_disk(self) -> Path:
        path = self.directory / "disk.img"
        with path.open("wb") as file:
            file.truncate(self.options.disk_mib * MIB)
        return path

    def write_host_config(self, tls: TlsFiles, name: str = HOST) -> None:
        """The daemon's configuration, for its next start."""
        o = self.options
        size = f'size = "{o.configured_size}"\n' if o.configured_size else ""
        copy = f'copy = {{ rate = "{o.copy_rate_mib}MiB/s"{o.copy_more} }}\n' if o.copy_rate_mib else ""
        verify = f"verify = {{ {o.verify} }}\n" if o.verify else ""
        heartbeat = f"heartbeat = {{ {o.heartbeat} }}\n" if o.heartbeat else ""
        self.host_config.write_text(
            f'[host]\nname = "{name}"\nruntime_dir = "{self.runtime}"\nstate_dir = "{self.state_dir}"\n'
            f'[backup]\naddress = "{self.address}:{self.port}"\n{tls.toml()}'
            f'[[group]]\nname = "{GROUP}"\nmode = "{o.mode}"\nbacklog = "{o.backlog_mib}MiB"\n'
            f'lease = "{o.lease_ms}ms"\ngrace = "{o.grace_ms}ms"\n'
            f"{o.group}{copy}{verify}{heartbeat}"
            f'[[group.member]]\nname = "{MEMBER}"\nroles = ["writer"]\n'
            + (f"[[group.member.disk]]\n{o.disk_before}" if o.disk_before else "")
            + f'[[group.member.disk]]\nname = "{DISK}"\npath = "{self.disk}"\nconnections = {o.connections}\n{size}'
        )

    def write_backup_config(self) -> None:
        """The server's configuration, for its next start."""
        self.backup_config.write_text(
            f'[server]\nname = "backup-a"\nlisten = "{self.address}:{self.port}"\ndata_dir = "{self.data_dir}"\n'
            f'control = "{self.sockets / "backup.sock"}"\nexports_dir = "{self.sockets / "exports"}"\n'
            + self.backup_tls.toml()
            + (f'[retention]\nwindow = "{self.options.window}"\n' if self.options.window else "")
            + self.options.backup_more
        )

    # The backup server.

    def start_backup(self) -> None:
        """Starts it and waits until it answers."""
        words = self._in_mounts([self.backup_programs / "tidelock-backup", "serve", "--config", self.backup_config])
        netns = self.net.backup.netns if self.net else None
        name = self._process_name("backup")
        self.backup = Process(self.run, name, words, netns, env=self.backup_environment)
        # Not by asking: without a server, the command opens the data directory itself.
        wait_until("tidelock-backup is ready", lambda: " ready " in self.backup.log.read_text(), LONG_S, [self.backup])

    def _in_mounts(self, argv: list) -> list:
        """The command as the backup site sees its file systems."""
        return self.backup_room.enter(argv) if self.backup_room else argv

    def backup_files(self) -> Path:
        """The backup's data, as seen from outside."""
        return self.backup_room.files if self.backup_room else self.data_dir

    def backup_command(self, *words: object, timeout_s: float = 60) -> str:
        """Runs `tidelock-backup` and returns what it prints."""
        # A test knows that the primary is dead, even where the backup has heard it a moment ago.
        knows = ["--although-connected"] if "--primary-is-dead" in words else []
        argv = [self.backup_programs / "tidelock-backup", *words, *knows, "--config", self.backup_config]
        argv = self._in_mounts(argv)
        netns = self.net.backup.netns if self.net else None
        return run_command(argv, f"run tidelock-backup {words[0]}", netns, timeout_s)

    def backup_status(self) -> dict:
        """What the server says of itself."""
        return json.loads(self.backup_command("status", "--json"))

    def backup_group(self) -> dict:
        """What it says of the group."""
        return self.backup_status()["groups"][0]

    def export(self) -> Path:
        """The backup's disk as an image."""
        out = self.directory / f"export-{next(self._names)}.img"
        self.backup_command("export", GROUP, f"{MEMBER}.{DISK}", "--format", "raw", out)
        return out

    def start_recovery(self, *options: str) -> Process:
        """`recover`, under way."""
        knows = ["--although-connected"] if "--primary-is-dead" in options else []
        words = [self.backup_programs / "tidelock-backup", "recover", GROUP, *knows, *options]
        words += ["--config", self.backup_config]
        return Process(self.run, self._process_name("recover"), words, self.net.backup.netns if self.net else None)

    # The host daemon.

    def start_daemon(self, wait: bool = True) -> None:
        """Starts it and waits until it answers."""
        words = [self.daemon_programs / "tidelockd", "--config", self.host_config]
        words = self.state_room.enter(words) if self.state_room else words
        netns = self.net.primary.netns if self.net else None
        name = self._process_name("tidelockd")
        self.daemon = Process(self.run, name, words, netns, env=self.daemon_environment)
        if wait:
            wait_until("tidelockd answers", self._daemon_runs, LONG_S, [self.daemon])

    def start_clone(self, state: Path, content: bytes) -> Process:
        """Starts a daemon beside it that takes itself for this host: on a copy of a state directory, and a disk with
        this content."""
        clone = self.directory / f"clone-{next(self._names)}"
        shutil.copytree(state, clone / "state")
        disk, config = clone / "disk.img", clone / "host.toml"
        disk.write_bytes(content)
        text = self.host_config.read_text()
        for old, new in (self.runtime, self.sockets / clone.name), (self.state_dir, clone / "state"), (self.disk, disk):
            text = text.replace(f'"{old}"', f'"{new}"')
        config.write_text(text)
        netns = self.net.primary.netns if self.net else None
        words = [self.daemon_programs / "tidelockd", "--config", config]
        return Process(self.run, self._process_name("clone-of-tidelockd"), words, netns)

    def _daemon_runs(self) -> bool:
        try:
            return bool(self.status())
        except OSError:
            return False

    def status(self, timeout_s: float = 10) -> dict:
        """What the daemon says of itself."""
        client = ControlClient(self.control_socket, timeout_s)
        try:
            return client.ask(command="status")["status"]
        finally:
            client.close()

    def group(self) -> dict:
        """What it says of the group."""
        return self.status()["groups"][0]

    def status_text(self) -> str:
        """What an operator reads."""
        return run_command([BIN / "tidelock", "status", "--socket", self.control_socket], "ask for the status")

    def set_mode(self, mode: str) -> None:
        """As an operator does."""
        words = [BIN / "tidelock", "mode", GROUP, mode, "--yes", "--socket", self.control_socket]
        run_command(words, f"switch to {mode}")

    def wait_state(self, *states: str) -> dict:
        """Waits until the group is in one of these states, and returns what it says then."""
        seen: list[dict] = []

        def reached() -> bool:
            seen[:] = [self.group()]
            return not words_of(seen[0]).isdisjoint(states)

        try:
            wait_until(f"the group is {' or '.join(states)}", reached, LONG_S, [self.daemon])
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nthe group: {json.dumps(seen, indent=1)}") from None
        return seen[0]

    def start(self) -> None:
        """Both, until the group is protected."""
        self.start_backup()
        self.start_daemon()
        self.wait_state("protected", "following")

    def load(self, oracle: Oracle, seed: str, depth: int = 16) -> Load:
        """A guest that writes."""
        return Load(self.socket, DISK, oracle, seed, depth)

    def write(self, oracle: Oracle, seed: str, replies: int = 500) -> None:
        """A guest writes until it has had so many replies, without an error."""
        load = self.load(oracle, seed)
        wait_until("writes are done", lambda: load.replies > replies or not load.alive(), LONG_S, [self.daemon])
        load.finish()
        assert load.errors == []

    def wait_settled(self) -> None:
        """Waits until the backup has everything, and nothing is being compared."""

        def settled() -> bool:
            group = self.group()
            writer = writer_of(group)
            return word_of(group) in ("protected", "following") and writer["lag"]["writes"] == 0

        try:
            wait_until("the stream settles", settled, LONG_S, [self.daemon])
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nthe group: {json.dumps(self.group(), indent=1)}") from None

    def activity(self) -> dict:
        """The activity log in the status."""
        return writer_of(self.group())["activity"]

    def wait_mapped(self) -> None:
        """Waits until a crash would compare only what the activity log has."""
        wait_until("the map is all there is", lambda: self.activity()["compares"] == "map", LONG_S, [self.daemon])

    def compared_bytes(self) -> int:
        """The bytes that the last comparison has looked at, from the daemon's log."""
        return int(self.daemon.log.read_text().split("compared_bytes=")[-1].split()[0])

    def check_sites(self, *oracles: Oracle) -> None:
        """Both sites hold the same bytes, and these are bytes that the guest may find."""
        self.wait_settled()
        exported = self.export()
        with self.disk.open("rb") as local:
            size = local.seek(0, os.SEEK_END)
        assert exported.stat().st_size == size
        local = self._plain_copy() if self.disk.is_block_device() else self.disk
        if not filecmp.cmp(local, exported, shallow=False):
            raise AssertionError(f"the sites differ: {different_blocks(local, exported)}")
        for oracle in oracles:
            found = oracle.violations(exported)
            assert not found, f"{len(found)} blocks: {found[:5]}"
        exported.unlink()

    def local_content(self) -> bytes:
        """What the primary's disk has now."""
        if not self.disk.is_block_device():
            return self.disk.read_bytes()
        copy = self._plain_copy()
        content = copy.read_bytes()
        copy.unlink()
        return content

    def _plain_copy(self) -> Path:
        copy = self.directory / f"local-{next(self._names)}.img"
        # Past any cache of the block device.
        subprocess.run(["dd", f"if={self.disk}", f"of={copy}", "bs=1M", "iflag=direct", "status=none"], check=True)
        return copy

    def kill(self, *processes: Process) -> None:
        """A power cut: SIGKILL to all of them before it waits for any."""
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            process.kill()

    def wait_disk_closed(self) -> None:
        """Requests of a killed daemon may end a moment after its process, and the disk's lock is held until then."""
        with self.disk.open("r+b") as disk:

            def is_free() -> bool:
                try:
                    fcntl.fcntl(disk, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                except BlockingIOError:
                    return False
                return True

            wait_until("nobody has the disk open", is_free, LONG_S)


def different_blocks(one: Path, other: Path, block: int = 4096) -> str:
    """Where two images differ, for people."""
    places = []
    with one.open("rb") as a, other.open("rb") as b:
        for number in range(one.stat().st_size // block):
            x, y = a.read(block), b.read(block)
            if x != y:
                places.append(f"block {number}: {x[:16].hex()} and {y[:16].hex()}")
    return f"{len(places)} blocks; {'; '.join(places[:5])}"
