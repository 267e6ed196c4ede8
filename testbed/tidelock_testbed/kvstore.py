"""A tiny sharded key-value store whose shards are shipped (`daemon/library/examples/kv`), and the watermarks that a
backup server tells of it (`examples/watermarks`)."""

from __future__ import annotations

import json
import queue
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .netns import Netns
from .paths import BIN
from .pki import TlsFiles
from .process import Process, wait_until
from .run import Run

ANSWER_S = 60


@dataclass(frozen=True)
class Far:
    """The backup server, as hosts of a store see it."""

    address: str
    store: str
    shards: int
    server: str = "backup-a"
    """The name in its certificate."""

    def words(self, tls: TlsFiles | None) -> list:
        """TLS of a command line."""
        return [tls.ca, tls.certificate, tls.key, self.server] if tls else []


class KvStore:
    """One host of the store, which leads some of its shards."""

    def __init__(
        self,
        run: Run,
        netns: Netns,
        name: str,
        directory: Path,
        far: Far,
        led: range,
        tls: TlsFiles | None = None,
        in_memory: bool = False,
    ):
        self.run, self.netns, self.name, self.led = run, netns, name, led
        shards = f"{led.start}-{led.stop - 1}"
        words = [directory, far.address, name, far.store, far.shards, shards, *far.words(tls)]
        self._argv = [BIN / "examples" / "kv", *words]
        self._env = {"KV_IN_MEMORY": "1"} if in_memory else {}
        self._lives = 0
        self.start()

    def start(self) -> None:
        """Starts it, also after it was killed."""
        self._lives += 1
        self._answers: queue.Queue[str] = queue.Queue()
        self.process = Process(
            self.run,
            f"kv-{self.name}-{self._lives}",
            self._argv,
            self.netns,
            self._env,
            on_line=lambda _at, line: self._answers.put(line),
            stdin=subprocess.PIPE,
        )
        self._answer(ANSWER_S)

    def _answer(self, timeout_s: float) -> dict:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.name} does not answer\n{self.process.tail()}") from None
        if not line.startswith("{"):
            raise RuntimeError(f"{self.name}: {line}\n{self.process.tail()}")
        return json.loads(line)

    def say(self, *words: object) -> None:
        """Gives it a command, and waits for no answer."""
        self.process.popen.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.popen.stdin.flush()

    def hear(self, timeout_s: float = ANSWER_S) -> dict:
        """The answer to a command."""
        return self._answer(timeout_s)

    def ask(self, *words: object) -> dict:
        """Gives it a command; returns the answer."""
        self.say(*words)
        return self.hear()

    def wait_shipped(self) -> None:
        """Waits until the backup has everything."""

        def shipped() -> bool:
            shards = self.ask("status")["shards"].values()
            return all(shard["stands"] is None and shard["b_commit"] == shard["committed"] for shard in shards)

        wait_until("everything is at the backup", shipped, ANSWER_S, [self.process])


class Watermarks:
    """Watermarks with the wall clock's nanoseconds at which they were heard, where this runs."""

    def __init__(self, run: Run, netns: Netns, name: str, far: Far, shards: str = "", tls: TlsFiles | None = None):
        words = [far.address, name, far.store, shards or far.shards, *far.words(tls)]
        self.path = run.directory / f"{name}.watermarks"
        argv = ["sh", "-ec", 'out=$1; shift; exec "$@" > "$out"', "-", self.path]
        self.process = Process(run, name, [*argv, BIN / "examples" / "watermarks", *words], netns)

    def read(self) -> list[tuple[int, int]]:
        """When each was heard, and the watermark."""
        lines = self.path.read_text().splitlines()
        return [(int(at), int(mark)) for at, mark in (line.split() for line in lines if line.count(" ") == 1)]
