"""A short torture, and that it bites: a recovered disk that is not what it should be is found out and reported."""

from __future__ import annotations

import json
import random
import signal

import pytest

from tidelock_testbed.nbdwire import Connection
from tidelock_testbed.oracle import BLOCK, block_data
from tidelock_testbed.pair import DISK
from tidelock_testbed.process import wait_until
from tidelock_testbed.torture import __main__ as torture
from tidelock_testbed.torture.client_round import ClientRound
from tidelock_testbed.torture.disk_round import DiskRound
from tidelock_testbed.torture.failback_round import FailbackRound
from tidelock_testbed.torture.faults import Troublemaker, Victim, World
from tidelock_testbed.torture.verdict import Report, Verdict


@pytest.mark.parametrize("seed", [1, 5, 7, 115])
def test_a_disk_lives_through_it(run, seed: int):
    verdict = DiskRound(run, seed).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.writes > 0
    assert {3, 10} <= set(verdict.checks)


@pytest.mark.parametrize("seed", [6])
def test_a_disk_goes_to_the_other_site_and_home(run, seed: int):
    verdict = FailbackRound(run, seed).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.writes > 0
    assert {1, 2, 3, 4, 6, 8, 9, 10} == set(verdict.checks)
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


@pytest.mark.parametrize("seed", [2, 8, 24])
def test_clients_live_through_it(run, seed: int):
    verdict = ClientRound(run, seed).execute()
    assert verdict.violations == []
    assert sum(verdict.faults.values()) > 0 and verdict.rows > 0
    assert {1, 2} <= set(verdict.checks)


class Tampered(DiskRound):
    """At its end somebody puts an old version of a block beside what came long after it was overwritten."""

    def come_back(self) -> None:
        self.disaster()

    def disaster(self) -> None:
        self.pair.wait_state("protected")
        wait_until("the guest writes", self._is_writing, 60, [self.pair.daemon])
        self.load.finish()
        self.load = None
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


def test_reports_are_added_up(tmp_path, capsys):
    def made(name: str, seed: int, began: float, *verdicts: Verdict) -> str:
        report = Report(tmp_path / name, seed, began)
        for verdict in verdicts:
            report.add(verdict)
        return str(tmp_path / name / "torture-report.json")

    good, bad = Verdict("disk", 7, writes=1000, seconds=60), Verdict("failback", 50, seconds=90)
    good.check(2, True, "")
    good.faults["link: cut"] += 2
    bad.faults["link: cut"] += 1
    bad.check(2, False, "not as it was")
    later = made("later", 50, 2e9, bad)
    sooner = made("sooner", 7, 1e9, good, Verdict("disk", 8, seconds=30))
    out = tmp_path / "sum"
    assert torture.main(["--sum", later, sooner, "--out", str(out)]) == 1
    text = (out / "torture-report.md").read_text()
    assert "seeds 7 to 8" in text and "seeds 50 to 50" in text and text.index("seeds 7") < text.index("seeds 50")
    assert "3 minutes in 2 runs: 3 rounds, 3 faults, **1 violations**" in text and "1,000 writes" in text
    assert "| link: cut | 3 |" in text and "had | 2 |" in text
    assert "make torture ROUNDS=1 SEED=50" in text

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
    assert kinds[:10] == kinds[10:] and set(kinds) == {"vm", "disk", "process", "failback"}
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
    world = World([victim], [], {"ill": (fall_ill, recover)})
    maker = Troublemaker(world, random.Random(1))
    for _ in range(200):
        log.clear()
        maker.episode(0.0, lambda seconds: None)
        assert not ill[0]
        assert log.count("start") == (1 if "kill" in log else 0), log
        assert log.count("go on") == log.count("stop"), log
        assert not {"kill", "stop"} <= set(log), "of one subject one fault at a time"
    assert set(maker.counts) == {"kill -9: it", "kill -9 at once: all", "SIGSTOP: it", "SIGTERM: it", "ill"}
