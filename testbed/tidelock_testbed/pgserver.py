"""PostgreSQL with its data in a directory of the run: programs of the VM guest's root image, on this machine's kernel.

Nothing stands between it and the run's file system, and nobody reaches it but through this class: it listens on a
socket in a mount namespace of its own, and on the loopback of a network namespace if it is given one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from .bench.postgres import PGBIN, private
from .image import GuestImage
from .netns import Netns
from .process import Process, run_command, runs, wait_until
from .run import Run

UID = 999
"""Number of the image's user."""
START_S = 60
STOP_S = 60

_MOUNTS = """
mount -o loop,ro "$1" "$2" && mount --bind "$3" "$2/data"
for dir in run tmp dev; do mount -t tmpfs tmpfs "$2/$dir"; done
for device in null zero urandom; do
    touch "$2/dev/$device" && mount --bind "/dev/$device" "$2/dev/$device"
done
mkdir -m 1777 "$2/dev/shm" "$2/run/postgresql" && chmod 1777 "$2/tmp"
echo ready && exec sleep infinity
"""


class PgServer:
    """A server that is stopped and started at will. `settings` are of its configuration.

    Given a network namespace, it also listens there, on 127.0.0.1 at `port`. Given a server to copy, it begins as a
    base backup of that one, and as a standby. Its data are in the run's directory, or at `place`.
    """

    def __init__(
        self,
        run: Run,
        image: GuestImage,
        name: str,
        segment_mib: int = 16,
        netns: Netns | None = None,
        port: int = 5432,
        copy_of: PgServer | None = None,
        place: Path | None = None,
        **settings: object,
    ):
        self.run, self.name, self.settings = run, name, settings
        self.netns, self.port = netns, port
        self.directory = (place or run.directory) / name
        self.root = run.directory / f"{name}-root"
        for directory in (self.directory, self.root):
            directory.mkdir()
        os.chown(self.directory, UID, UID)
        argv = private(_MOUNTS, image.root, self.root, self.directory)
        self.holder = Process(run, f"{name}-mounts", argv)
        wait_until("its programs are mounted", lambda: "\nready" in self.holder.log.read_text(), START_S, [self.holder])
        if copy_of:
            copy = ["-h", "127.0.0.1", "-p", copy_of.port, "-D", "/data/pg", "-c", "fast", "-X", "stream", "-N"]
            self.command("pg_basebackup", *copy, timeout_s=START_S)
            (self.data / "standby.signal").touch()
        else:
            initdb = ["initdb", "-D", "/data/pg", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"]
            self.command(*initdb, f"--wal-segsize={segment_mib}", timeout_s=START_S)
        self._lives = 0
        self.process: Process | None = None

    @property
    def data(self) -> Path:
        """PGDATA, as it is seen from here."""
        return self.directory / "pg"

    @property
    def wal(self) -> Path:
        """The directory of the log's segments."""
        return self.data / "pg_wal"

    def admit(self, network: str) -> None:
        """Lets clients of a network in, from its next start on. `listen_addresses` must be among the settings."""
        with (self.data / "pg_hba.conf").open("a") as access:
            access.write(f"host all all {network} trust\n")

    def start(self) -> None:
        """Starts it, and waits until it takes connections."""
        self._lives += 1
        words = [
            "postgres",
            "-D",
            "/data/pg",
            "-c",
            f"listen_addresses={'127.0.0.1' if self.netns else ''}",
            "-p",
            self.port,
            "-c",
            "unix_socket_directories=/run/postgresql",
        ]
        words += [word for key, value in self.settings.items() for word in ("-c", f"{key}={value}")]
        self.process = Process(self.run, f"{self.name}-{self._lives}", self.inside(*words))
        ready = ["pg_isready", "-q", "-h", "/run/postgresql", "-p", str(self.port)]
        wait_until(
            f"{self.name} takes connections",
            lambda: subprocess.run(self.inside(*ready)).returncode == 0,
            START_S,
            [self.process],
        )

    def stop(self, immediate: bool = False) -> None:
        """Stops it: cleanly, or so that it must recover when it is started."""
        self.process.signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self.process.wait(STOP_S)

    def kill_now(self) -> list[int]:
        """Sends SIGKILL to all of its processes, and does not wait. Returns the numbers of all but the first, which
        otherwise would outlive that one for a moment."""
        pid, others = self.process.pid, []
        with contextlib.suppress(OSError):
            others = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        self.process.kill_now()
        for other in others:
            with contextlib.suppress(OSError):
                os.kill(other, signal.SIGKILL)
        return others

    def kill(self) -> None:
        """Ends it as a power cut would, and waits until nothing of it runs."""
        others = self.kill_now()
        self.process.kill()
        wait_until(f"nothing of {self.name} runs", lambda: not any(map(runs, others)), STOP_S)

    def destroy(self) -> None:
        """Removes all that a killed server had."""
        self.holder.kill()
        for directory in (self.directory, self.root):
            shutil.rmtree(directory)

    def sql(self, text: str) -> str:
        """Runs statements as the superuser, each as a transaction of its own; returns their rows."""
        words = ["-h", "/run/postgresql", "-U", "postgres", "-qAtX", "-v", "ON_ERROR_STOP=1", "-f", "-"]
        argv = [str(word) for word in self.inside("psql", *words, "postgres")]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {text[:200]}\n{done.stderr}")
        return done.stdout

    def command(self, program: str, *words: object, timeout_s: float = 120) -> str:
        """Runs one of its programs to the end."""
        return run_command(self.inside(program, *words), f"run {program}", timeout_s=timeout_s)

    def inside(self, program: str, *words: object) -> list:
        """The command line of one of its programs."""
        user = f"--userspec={UID}:{UID}"
        enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", "--", "chroot", user, self.root]
        environment = ["env", "LC_ALL=C.UTF-8", "HOME=/tmp", "TZ=UTC", "PGUSER=postgres", f"PGPORT={self.port}"]
        argv = [*enter, *environment, f"{PGBIN}/{program}", *words]
        return self.netns.enter(argv) if self.netns else argv
