"""The disaster that is replicated faithfully: a client drops a table."""

from __future__ import annotations

import json
import sys
import time

from .drilling import CONFIRMED_MIN, SERVED_AGAIN, Drill
from .hostdaemon import GROUP, MEMBER, Protection
from .ledger import Row
from .paths import BIN
from .process import Process, run_command, wait_until
from .progress import say
from .rig import DISKS, Rig
from .sqlalone import SqlAlone
from .workload import rows_in

WINDOW = "1h"
BEFORE, CLEAN = "before-deploy", "clean"
"""What the administrator bookmarks, and what the search pins."""
SEARCH_S = 600
DROP = "import sys, psycopg; psycopg.connect(sys.argv[1], autocommit=True).execute('DROP TABLE rows')"


class Oops(Drill):
    """Both sites do as they are told: what is wrong is what they were told."""

    name = "oops"
    about = (
        "a client drops the table, and replication carries it; the instant is found by asking PostgreSQL on views of "
        "the past, and the group is recovered to just before it"
    )
    guests = ("vm",)

    def __init__(self, run, knobs):
        super().__init__(run, knobs)
        self.entry.promise = "every row that a client was told of before the table was dropped is there"

    def make_rig(self, protection: Protection) -> Rig:
        """Two sites; the backup keeps a window."""
        knobs = self.knobs
        return Rig(self.run, knobs.guest, knobs.rtt_ms, knobs.seed, self.disks, protection, window=WINDOW)

    def execute(self) -> None:
        """The table goes while clients work, and work goes on: nobody has seen it yet."""
        self.protect()
        self.start_clients()
        self.known = self.bookmark()
        self.work(self.random.uniform(*self.load_s[self.knobs.guest]))
        self.load_to = time.monotonic()
        self.drop_table()
        self.find()
        self.disaster()
        self.recover("--at", f"bookmark:{CLEAN}", "--primary-is-dead")
        self.serve_again()
        self.judge()

    def backup_says(self, *words: object) -> dict:
        """What a command at the backup says to programs."""
        argv = [BIN / "tidelock-backup", *words, "--json", "--config", self.rig.backup.config]
        return json.loads(run_command(argv, f"{words[0]} at the backup"))

    def bookmark(self) -> Row:
        """The administrator sets a bookmark before a deployment. Returns a row that was confirmed before that."""
        known = min(self.ledger.follow().confirmed.items(), key=lambda item: item[1])[0]
        told = self.backup_says("bookmark", GROUP, BEFORE)
        say(f"backup: bookmark {BEFORE} at {told['mark']['at']['time']}")
        return known

    def drop_table(self) -> None:
        """The mistake. Clients go on, in a table that their application makes anew."""
        rig = self.rig
        self.dropping_at = self.event("table dropped")
        target = f"host={rig.guest.net.ip4} port={rig.guest.port} user=postgres dbname=postgres connect_timeout=10"
        run_command([sys.executable, "-c", DROP, target], "drop the table", rig.net.clients, timeout_s=60)
        self.dropped_at = time.monotonic()
        say("OOPS: a client has dropped the table, and replication carries it")

        def again() -> bool:
            ledger = self.ledger.follow()
            return sum(sent > self.dropped_at for row, sent in ledger.sent.items() if row in ledger.confirmed) >= 20

        wait_until("clients work on", again, 60, [self.clients.process, rig.guest.process])
        self.work(self.random.uniform(1, 3))
        self.still_replicates("nothing that watches replication sees anything wrong")

    def still_replicates(self, what: str) -> None:
        """Both sites are as well as before. A lease that has lapsed on a busy machine comes back."""
        self.rig.daemon.wait_state(self.settled, 60, [self.rig.guest.process, self.rig.backup.process])
        say(f"{what}: the group is {self.settled}")

    def find(self) -> None:
        """The operator asks PostgreSQL on views of the past, while replication goes on."""
        rig = self.rig
        alone = SqlAlone(rig.image.root, self.run.directory / "sql")
        client, n = self.known
        sql = f"SELECT count(*) AS found FROM rows WHERE client = {client} AND n = {n};"
        check = alone.check(MEMBER, DISKS[0], sql, 'found = "1"', ['found = "0"', 'relation "rows" does not exist'])
        words = ["--from", f"bookmark:{BEFORE}", "--pin", CLEAN, "--", "sh", "-c", check]
        argv = [BIN / "tidelock-backup", "bisect", GROUP, "--config", rig.backup.config, *words]
        began = time.monotonic()
        say("backup: bisect asks PostgreSQL on views of the past")
        search = Process(self.run, "bisect", argv, env={"NO_COLOR": "1"}, on_line=lambda _, line: say(f"  {line}"))
        self.check("the first bad instant was found, exact to one record", search.wait(SEARCH_S) == 0)
        pin = next(mark for mark in self.backup_says("pin", GROUP, "--list")["marks"] if mark["name"] == CLEAN)
        seconds = time.monotonic() - began
        self.entry.notes.append(f"bisect took {seconds:.0f} s; the last good point is {pin['at']['time']}")
        self.still_replicates("replication goes on under the search")

    def judge(self) -> None:
        """Rows confirmed before the mistake are there; rows of the table that came after it are not."""
        ledger = self.clients.stop()
        say("clients: stopped; reading every row of the recovered database")
        rows = rows_in(self.rig.net, self.recovery.guest)
        entry = self.entry
        before = {row for row, at in ledger.confirmed.items() if at < self.dropping_at}
        old = {row for row in rows if ledger.sent.get(row, 0) < self.gone_at}
        later = {row for row, at in ledger.confirmed.items() if at > self.recovery.recovered_at}
        entry.confirmed, entry.recovered, entry.lost = len(before), len(old), len(before - old)
        told_since = [row for row, at in ledger.confirmed.items() if self.dropping_at <= at < self.gone_at]
        entry.given_up = sum(row not in old for row in told_since)
        entry.recovered_unconfirmed = len(old - ledger.confirmed.keys())
        entry.foreign = sum(row not in ledger.sent for row in rows)
        entry.lost_after_recovery = len(later - rows)
        if entry.confirmed < CONFIRMED_MIN or len(later) < SERVED_AGAIN:
            raise RuntimeError(f"only {entry.confirmed} and {len(later)} rows were confirmed: this proves nothing")
        self.measure_rows(ledger)
        self.measure(ledger)
        self.check("no row that was confirmed before the table was dropped is lost", entry.lost == 0)
        self.check("no row is there that nobody sent", entry.foreign == 0)
        after = [row for row in old if ledger.sent[row] > self.dropped_at]
        self.check("no row of the table that replaced it is there", not after)
        self.check("the recovered guest kept everything that it confirmed", entry.lost_after_recovery == 0)
        self.conclude()
