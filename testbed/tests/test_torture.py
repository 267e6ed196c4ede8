"""A short torture, and that it bites: a recovered disk that is not what it should be is found out and reported."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tidelock_testbed.nbdwire import Connection
from tidelock_testbed.oracle import BLOCK, block_data
from tidelock_testbed.pair import DISK, GROUP
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import run_command, wait_until
from tidelock_testbed.torture import __main__ as torture
from tidelock_testbed.torture import client_round, disk_round, marks
from tidelock_testbed.torture.client_round import ClientRound, Degraded
from tidelock_testbed.torture.disk_round import DiskRound
from tidelock_testbed.torture.failback_round import FailbackRound
from tidelock_testbed.torture.faults import Switch, Troublemaker, Victim, World, rises
from tidelock_testbed.torture.marks import Marks
from tidelock_testbed.torture.past_rows import Past
from tidelock_testbed.torture.verdict import Report, Unjudged, Verdict

ALL_RULES = set(range(1, 11))


@pytest.mark.parametrize("seed", [16, 23])
def test_a_disk_lives_through_it(run, seed: int):
    verdict = DiskRound(run, seed).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.writes > 0
    # Where something is of an older moment at the end, nothing counts as told.
    forgets = {1} if any(fault.startswith("state") for fault in verdict.faults) else set()
    assert set(verdict.checks) | forgets == ALL_RULES


@pytest.mark.parametrize("seed", [6])
def test_a_disk_goes_to_the_other_site_and_home(run, seed: int):
    verdict = FailbackRound(run, seed).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.writes > 0
    assert set(verdict.checks) == ALL_RULES
    assert any(fault.startswith("switchover: ") for fault in verdict.faults)


class LostInTheSwitch(FailbackRound):
    """What arrives at home lacks the guest's last write, as if the switch had not waited for it."""

    def leave(self) -> bool:
        return self.switch_home()

    def arrive(self) -> bool:
        blocks = range(self.oracle.blocks - 1, self.oracle.blocks)
        self.oracle.complete(self.oracle.issue(blocks, zero=False))
        return super().arrive()


def test_what_was_lost_in_a_switch_is_found_out(run):
    verdict = LostInTheSwitch(run, 1).execute()
    assert [text for text in verdict.violations if text.startswith("rule 1: 1 blocks were lost in the switch")]


class StillHoldsALease(FailbackRound):
    """The old primary is asked as if it had never been replaced."""

    def leave(self) -> bool:
        self.old = self.pair
        self.pair.wait_state("protected")
        self.watch_old()
        return False


def test_an_old_primary_that_holds_a_lease_is_found_out(run):
    verdict = StillHoldsALease(run, 1).execute()
    assert [text for text in verdict.violations if text.startswith("rule 4: the old primary holds a lease again")]


@pytest.mark.parametrize(("seed", "guest"), [(8, "process"), (24, "postgres")])
def test_clients_live_through_it(run, seed: int, guest: str):
    verdict = ClientRound(run, seed, guest).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.rows > 0
    assert set(verdict.checks) >= ALL_RULES - {4}


class Rested(DiskRound):
    """No fault: what is looked at is the middle of a round."""

    def suffer(self, least: int, most: int) -> None:
        self.work(0.3)

    def disaster(self) -> None:
        """It does not come to that."""

    def _found(self, rule: int) -> list[str]:
        return [text for text in self.execute().violations if text.startswith(f"rule {rule}: ")]


class OneByteOfAView(Marks):
    """From the third look on a bit of what views and exports show is another one."""

    looks = 0

    def look_at(self, name: str) -> Path | None:
        image = super().look_at(name)
        self.looks += 1
        if self.looks > 2:
            with image.open("r+b") as file:
                file.seek(5 * BLOCK + 77)
                byte = file.read(1)[0]
                file.seek(5 * BLOCK + 77)
                file.write(bytes([byte ^ 16]))
        return image


class Moved(Marks):
    """Somebody moves the bookmark to what the guest has written since."""

    def set_while_still(self) -> None:
        super().set_while_still()
        guest = Connection(self.pair.socket, DISK)
        write = self.oracle.issue(range(3, 4), zero=False)
        guest.write(3 * BLOCK, block_data(write.version, 3))
        self.oracle.complete(write)
        guest.close()
        words = [BIN / "tidelock", "bookmark", GROUP, self.known[-1].name, "--move"]
        run_command([*words, "--socket", self.pair.control_socket], "move a bookmark")


class Paused(Marks):
    """While somebody writes to the view nothing is replicated."""

    def _write_some(self, view) -> None:
        super()._write_some(view)
        self.pair.net.wans[0].cut()

    def check_goes_on(self, work) -> None:
        super().check_goes_on(work)
        self.pair.net.wans[0].mend()


class SetsOneItself(Marks):
    """A drill leaves a bookmark of its own."""

    def _write_some(self, view) -> None:
        super()._write_some(view)
        self.pair.backup_command("pin", GROUP, f"of-the-drill-{time.monotonic_ns()}")


@pytest.mark.parametrize(
    ("points", "rule", "says"),
    [
        (OneByteOfAView, 5, "something else than before: 1 blocks, the first of them [5]"),
        (Moved, 5, "something else than before: 1 blocks, the first of them [3]"),
        (Paused, 7, "replication pauses for a view"),
        (SetsOneItself, 7, "a drill has changed the history"),
    ],
    ids=["one byte", "moved", "paused", "history"],
)
def test_what_is_wrong_with_the_past_or_a_drill_is_found_out(run, monkeypatch, points, rule: int, says: str):
    monkeypatch.setattr(Rested, "points", points)
    monkeypatch.setattr(marks, "PAUSE_S", 3)
    # A pin cannot be moved by the primary.
    monkeypatch.setattr(disk_round, "SHORT_WINDOW", "1h")
    found = Rested(run, 5)._found(rule)
    assert found and all(says in text for text in found), found


class WithPolicy(DiskRound):
    """The recovery names nobody."""

    def suffer(self, least: int, most: int) -> None:
        self.work(0.3)

    def check_exposed(self, exposed: list[dict], may_have_left: bool = False) -> None:
        assert [one["host"] for one in exposed] == ["host-a"]
        super().check_exposed([])


def test_a_recovery_that_does_not_say_what_clients_may_have_seen_is_found_out(run, monkeypatch):
    monkeypatch.setattr(disk_round, "settings", lambda *_: 'when_unreachable = "async after 1s"\n')
    verdict = WithPolicy(run, 5).execute()
    assert len(verdict.violations) == 1 and verdict.violations[0].startswith("rule 6: the policies are"), verdict


class Forgetful(Past):
    """A view lacks a row that a client was told of, and each export has other bytes."""

    exports = 0

    def rows(self, database, disks):
        rows = super().rows(database, disks)
        return rows - {min(rows)}

    def digest(self, database, mark: str) -> str:
        self.exports += 1
        return super().digest(database, mark) + str(self.exports)


def test_a_past_that_lacks_what_clients_were_told_is_found_out(run, monkeypatch):
    monkeypatch.setattr(client_round, "Past", Forgetful)
    monkeypatch.setattr(Troublemaker, "episode", lambda *_: None)
    found = ClientRound(run, 14).execute().violations
    assert len(found) == 3 and "rows that clients were told of before are not in guest" in found[0], found
    assert all(text.startswith("rule 5: at the bookmark there were") for text in found[1:]), found


def test_since_when_a_host_is_degraded_is_known_by_the_kernels_clock(tmp_path):
    record = tmp_path / "_degraded.json"
    watch = Degraded(record)
    assert watch.since is None
    began = time.monotonic()
    record.write_text("{}")
    wait_until("it is seen", lambda: watch.since, 10)
    assert began - 0.2 < watch.since < began + 0.2
    record.unlink()
    wait_until("it is over", lambda: watch.since is None, 10)
    older = tmp_path / "older"
    older.write_text("{}")
    os.utime(older, (time.time() - 5, time.time() - 5))
    older.rename(record)
    watch.stop()
    assert watch.since < time.monotonic() - 4


class Tampered(DiskRound):
    """At its end somebody puts an old version of a block beside what came long after it was overwritten."""

    def rest(self) -> bool:
        return True

    def come_back(self) -> bool:
        return True

    def disaster(self) -> None:
        self.pair.wait_state("protected")
        wait_until("the guest writes", self._is_writing, 60, [self.pair.daemon])
        self.load.finish()
        self._end_load()
        guest = Connection(self.pair.socket, DISK)
        self.block = self.oracle.blocks - 1
        self.old = self._write(guest, self.block)
        self._write(guest, self.block)
        # Of this one something is there, so what had completed before it must be.
        self._write(guest, 0)
        guest.close()
        self.pair.wait_settled()
        super().disaster()

    def _write(self, guest: Connection, block: int) -> bytes:
        write = self.oracle.issue(range(block, block + 1), zero=False)
        data = block_data(write.version, block)
        guest.write(block * BLOCK, data)
        self.oracle.complete(write)
        return data

    def _recovered_image(self):
        # Of what somebody puts there nothing was told.
        self.told = 0
        image = super()._recovered_image()
        with image.open("r+b") as file:
            file.seek(self.block * BLOCK)
            file.write(self.old)
        return image


def test_a_recovered_disk_that_is_no_state_of_the_past_is_found_out(run):
    verdict = Tampered(run, 3).execute()
    assert [text for text in verdict.violations if text.startswith("rule 2: 1 blocks are of no prefix")], verdict


def test_a_violation_is_reported_with_the_command_that_runs_it_again(tmp_path, monkeypatch, capsys):
    def perform(seed: int, vms: bool) -> Verdict:
        verdict = Verdict("disk", seed)
        verdict.check(2, seed != 8, "not as it was\nand more of it")
        verdict.failure = "no disk" if seed == 9 else ""
        verdict.unjudged = "too few rows" if seed == 11 else ""
        return verdict

    monkeypatch.setattr(torture, "perform", perform)
    assert torture.main(["--rounds", "2", "--seed", "7", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "torture-report.md").read_text()
    assert "**1 violations**" in text and "- rule 2: not as it was\n      and more of it" in text
    assert "make torture ROUNDS=1 SEED=8" in text
    assert "VIOLATED: rule 2: not as it was" in capsys.readouterr().out
    rounds = json.loads((tmp_path / "torture-report.json").read_text())["rounds"]
    assert [one["violations"] for one in rounds] == [[], ["rule 2: not as it was\nand more of it"]]
    assert torture.main(["--rounds", "1", "--seed", "7", "--out", str(tmp_path)]) == 0
    assert torture.main(["--rounds", "1", "--seed", "9", "--out", str(tmp_path)]) == 1
    assert "- not to its end: no disk" in (tmp_path / "torture-report.md").read_text()
    assert torture.main(["--rounds", "1", "--seed", "11", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "torture-report.md").read_text()
    assert "- not judged: too few rows" in text and "1 that could not be judged" in text


def test_a_round_that_had_too_little_to_judge_is_no_failure(monkeypatch):
    class TooShort:
        def __init__(self, run, seed: int):
            self.verdict = Verdict("disk", seed)

        def execute(self) -> Verdict:
            raise Unjudged("only 3 rows")

    monkeypatch.setattr(torture, "DISKS", {"disk": TooShort})
    verdict = torture.perform(1)
    assert (verdict.unjudged, verdict.failure, verdict.violations) == ("only 3 rows", "", [])


def test_reports_are_added_up(tmp_path, capsys):
    def made(name: str, seed: int, began: float, *verdicts: Verdict) -> str:
        report = Report(tmp_path / name, seed, began)
        for verdict in verdicts:
            report.add(verdict)
        return str(tmp_path / name / "torture-report.json")

    good, bad = Verdict("disk", 7, writes=1000, seconds=60), Verdict("failback", 50, seconds=90)
    good.check(2, True, "")
    good.faults["link: cut"] += 2
    bad.bitten("link: cut")
    bad.check(2, False, "not as it was")
    later = made("later", 50, 2e9, bad)
    sooner = made("sooner", 7, 1e9, good, Verdict("disk", 8, seconds=30))
    out = tmp_path / "sum"
    assert torture.main(["--sum", later, sooner, "--out", str(out)]) == 1
    text = (out / "torture-report.md").read_text()
    assert "seeds 7 to 8" in text and "seeds 50 to 50" in text and text.index("seeds 7") < text.index("seeds 50")
    assert "3 minutes in 2 runs: 3 rounds, 3 faults, **1 violations**" in text and "1,000 writes" in text
    assert "| link: cut | 3 | 1 |" in text and "had | 2 | 2 |" in text
    assert text.count(f"commit {Report(tmp_path, 1).commit}") == 2
    assert "make torture ROUNDS=1 SEED=50" in text

    # A report of before commits were told.
    old = json.loads(Path(later).read_text())
    del old["parts"][0]["commit"], old["rounds"][0]["bites"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    torture.main(["--sum", str(tmp_path / "old.json"), "--out", str(tmp_path / "of-old")])
    assert "commit unknown" in (tmp_path / "of-old" / "torture-report.md").read_text()

    third = made("third", 90, 3e9, Verdict("disk", 90, seconds=600))
    total = tmp_path / "total"
    assert torture.main(["--sum", str(out / "torture-report.json"), third, "--out", str(total)]) == 1
    assert "13 minutes in 3 runs: 4 rounds, 3 faults" in (total / "torture-report.md").read_text()
    capsys.readouterr()
    assert torture.main(["--sum", str(out / "torture-report.json"), later, "--out", str(total)]) == 2
    assert "is in another file, too" in capsys.readouterr().err
    assert torture.main(["--sum", third, "--out", str(total)]) == 0


def test_what_a_round_is_follows_from_its_seed():
    kinds = [torture.kind_of(seed, vms=True) for seed in range(20)]
    assert kinds[:10] == kinds[10:] and set(kinds) == {"vm", "disk", "process", "postgres", "failback"}
    assert "vm" not in {torture.kind_of(seed, vms=False) for seed in range(20)}


@pytest.mark.parametrize("words", [["--time", "5"], ["--time", "m"], ["--rounds", "-1"]])
def test_knobs_that_are_wrong_are_refused(words, capsys):
    with pytest.raises(SystemExit) as refused:
        torture.parse(words)
    assert refused.value.code == 2
    assert "write" in capsys.readouterr().err or "--rounds" in words


def test_what_was_begun_is_undone_and_of_one_subject_there_is_one_fault_at_a_time():
    """Also where something cannot start as long as another fault lasts."""
    log: list[str] = []
    ill = [False]

    def start() -> None:
        if ill[0]:
            raise RuntimeError("it ended")
        log.append("start")

    class FakeProcess:
        pid = os.getpid()

        def alive(self) -> bool:
            return log.count("start") >= log.count("kill")

        def kill(self) -> None:
            log.append("kill")

        def signal(self, number: int) -> None:
            log.append("kill" if number == signal.SIGKILL else "stop" if number == signal.SIGSTOP else "go on")

        def stop(self, timeout_s: float) -> None:
            log.append("kill")

    def fall_ill() -> None:
        ill[0] = True

    def recover() -> None:
        ill[0] = False

    victim = Victim("it", FakeProcess, start)
    world = World([victim], [], {"ill": Switch(fall_ill, recover, rises(lambda: ill[0]))}, frozenset({"ill"}))
    maker = Troublemaker(world, random.Random(1))
    for _ in range(200):
        log.clear()
        maker.episode(0.0, lambda seconds: None)
        assert not ill[0]
        assert log.count("start") == (1 if "kill" in log else 0), log
        assert log.count("go on") == log.count("stop"), log
        assert not {"kill", "stop"} <= set(log), "of one subject one fault at a time"
    assert maker.bites["ill"] == maker.counts["ill"] > maker.counts["SIGSTOP: it"] > 0
    assert maker.bites["kill -9: it"] == maker.counts["kill -9: it"] and not maker.bites["SIGSTOP: it"]
    assert set(maker.counts) == {"kill -9: it", "kill -9 at once: all", "SIGSTOP: it", "SIGTERM: it", "ill"}
