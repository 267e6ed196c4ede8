"""Whose a member is, which group a host knows, and a fence that lasts: what the backup believes of a valid
certificate."""

from __future__ import annotations

import shutil

import pytest

from tidelock_testbed.oracle import Oracle
from tidelock_testbed.pair import GROUP, HOST, MEMBER, MIB, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import run_command, wait_until
from tidelock_testbed.risk import word_of

OTHER = "host-b"
LISTED = f'[[group]]\nname = "{GROUP}"\nhosts = ["{HOST}", "{OTHER}"]\n'


def write(pair: Pair, seed: str) -> Oracle:
    """A guest, for a while."""
    oracle = Oracle(32 * MIB)
    load = pair.load(oracle, seed)
    wait_until("some writes", lambda: load.replies > 500, 60, [pair.daemon])
    load.finish()
    assert load.errors == []
    pair.wait_settled()
    return oracle


def move(pair: Pair, host: str) -> str:
    return pair.backup_command("member", "move", GROUP, MEMBER, "--to", host, "--yes", "--json")


def refused(pair: Pair) -> str:
    return pair.wait_state("stalled")["detail"]


def test_a_listed_host_takes_no_member_of_another_until_the_operator_moves_it(run):
    """Another host of the list, with a certificate, a disk and a configuration of its own for the same member."""
    pair = Pair(run, Options(backup_more=LISTED))
    pair.start()
    oracle = write(pair, "owner")
    thief = Pair(run, name="thief")
    thief.port = pair.port
    tls = pair.pki.issue("host", OTHER, thief.directory / "listed-tls")
    thief.write_host_config(tls, name=OTHER)
    thief.disk.write_bytes(b"\xee" * thief.disk.stat().st_size)
    thief.start_daemon()
    assert f"belongs to host {HOST}" in refused(thief)
    assert word_of(pair.group()) == "protected"
    assert pair.backup_group()["writers"][0]["host"] == HOST
    pair.check_sites(oracle)

    # Nor is the owner locked out at its next start.
    pair.kill(pair.daemon)
    pair.start_daemon()
    pair.wait_state("protected")
    pair.check_sites(oracle)
    with pytest.raises(RuntimeError, match=f"is attached by {HOST}"):
        move(pair, OTHER)

    pair.daemon.stop()
    assert f'"to":"{OTHER}"' in move(pair, OTHER)
    thief.wait_state("protected")
    exported = pair.export()
    assert exported.read_bytes() == thief.disk.read_bytes()
    pair.start_daemon()
    assert f"belongs to host {OTHER}" in refused(pair)


def test_a_host_that_was_installed_anew_says_so_and_one_command_helps(run):
    """Same name, same certificate, no state: not fenced, and not believed before the operator says so."""
    pair = Pair(run)
    pair.start()
    oracle = write(pair, "before")
    pair.daemon.stop()
    shutil.rmtree(pair.state_dir)
    pair.start_daemon()
    detail = refused(pair)
    assert "installed anew" in detail and f"member move {GROUP} {MEMBER} --to {HOST}" in detail, detail
    assert pair.backup_group()["writers"][0]["copy"] == "whole", "nothing of it was taken"
    pair.daemon.stop()
    move(pair, HOST)
    pair.start_daemon()
    pair.wait_state("protected")
    pair.check_sites(oracle)


def test_a_group_that_was_made_anew_is_noticed_by_both(run):
    """The backup's data is gone, or another group of that name stands there: no copy begins by itself."""
    pair = Pair(run)
    pair.start()
    oracle = write(pair, "first life")
    known = pair.backup_group()["id"]
    pair.backup.kill()
    shutil.rmtree(pair.data_dir / "groups")
    pair.start_backup()
    detail = refused(pair)
    assert "there is no group" in detail and known in detail, detail
    assert pair.backup_status()["groups"] == []
    pair.daemon.stop()
    shutil.rmtree(pair.state_dir / GROUP)
    pair.start_daemon()
    pair.wait_state("protected")
    pair.check_sites(oracle)
    assert pair.backup_group()["id"] != known


def test_a_fence_outlives_a_backup_that_was_reverted(run):
    """Recovered, then the backup's machine is reverted to a snapshot of before: the old primary does not come back by
    itself, also not after a restart."""
    pair = Pair(run)
    pair.start()
    oracle = write(pair, "before")
    pair.backup.stop()
    snapshot = pair.directory / "snapshot"
    shutil.copytree(pair.data_dir, snapshot)
    pair.start_backup()
    pair.wait_state("protected")
    assert pair.start_recovery("--primary-is-dead").wait(60) == 0
    pair.wait_state("fenced")
    pair.backup.kill()
    shutil.rmtree(pair.data_dir)
    shutil.copytree(snapshot, pair.data_dir)
    pair.start_backup()
    for _ in range(2):
        pair.kill(pair.daemon)
        pair.start_daemon()
        wait_until("the link is up", lambda: pair.status()["link"]["state"] == "connected", 60, [pair.daemon])
        group = pair.group()
        assert word_of(group) == "fenced" and not group["lease"]["held"], group
        assert "was recovered" in group["detail"] and f"tidelock unfence {GROUP}" in group["detail"], group["detail"]
        assert pair.backup_group()["writers"][0]["connected_since_unix_ms"] is None
    unfence = [BIN / "tidelock", "unfence", GROUP, "--yes", "--config", pair.host_config]
    with pytest.raises(RuntimeError, match="stop it first"):
        run_command(unfence, "unfence")
    pair.daemon.stop()
    run_command(unfence, "unfence")
    pair.start_daemon()
    pair.wait_state("protected")
    pair.check_sites(oracle)
