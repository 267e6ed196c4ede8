"""`tidelock bookmark`: a name that is set at the primary is for a point that has all that was written before it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tidelock_testbed import nbdwire
from tidelock_testbed.pair import DISK, GROUP, MEMBER, Options, Pair
from tidelock_testbed.paths import BIN
from tidelock_testbed.process import wait_until

BLOCK = 4096
BEFORE, AFTER = b"before" * 682 + b"....", b"after-" * 682 + b"...."
DONE, REFUSED = 0, 1


def command(pair: Pair, *words: str) -> list[str]:
    """As the guest's administrator gives it."""
    return [str(BIN / "tidelock"), "bookmark", GROUP, *words, "--socket", str(pair.control_socket)]


def bookmark(pair: Pair, *words: str) -> subprocess.CompletedProcess:
    """To its end."""
    return subprocess.run(command(pair, *words), capture_output=True, text=True, timeout=120, check=False)


def first_block_at(pair: Pair, name: str) -> bytes:
    """What a view of the bookmark has."""
    view = json.loads(pair.backup_command("view", GROUP, "--at", f"bookmark:{name}", "--detach", "--json"))
    disk = nbdwire.Connection(Path(view["disks"][0]["uri"].split("socket=")[1]), f"{MEMBER}.{DISK}")
    found = disk.read(0, BLOCK)
    disk.close()
    pair.backup_command("view", "--close", view["name"])
    return found


def test_it_has_what_was_written_before_it_and_nothing_else_also_over_an_outage(run):
    pair = Pair(run, Options(window="1h"))
    pair.start()
    guest = nbdwire.Connection(pair.socket, DISK)

    # The backup is away: what the guest was told is not there yet, and so neither is the bookmark.
    pair.backup.kill()
    guest.write(0, BEFORE)
    late = bookmark(pair, "never", "--timeout", "100ms")
    assert late.returncode == REFUSED and "the backup is not connected" in late.stderr, late
    waiting = subprocess.Popen(
        command(pair, "deploy", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(
        "it says what it waits for", lambda: "waiting: the backup is not connected" in waiting.stderr.readline(), 30
    )
    pair.start_backup()
    said, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == DONE
    point = json.loads(said)["bookmark"]
    assert point["seqs"][MEMBER] >= 1 and not point["without"], point

    guest.write(0, AFTER)
    pair.wait_settled()
    assert first_block_at(pair, "deploy") == BEFORE
    again = bookmark(pair, "next")
    assert again.returncode == DONE and again.stdout.startswith("bookmark next  "), again
    assert first_block_at(pair, "next") == AFTER
    guest.close()


def test_without_a_past_there_is_nothing_to_name(run):
    pair = Pair(run)
    pair.start()
    done = bookmark(pair, "deploy")
    assert done.returncode == REFUSED and "set retention.window" in done.stderr, done


def test_a_name_that_is_taken_stays_where_it_is_unless_it_is_moved_by_who_has_set_it(run):
    pair = Pair(run, Options(window="1h"))
    pair.start()
    guest = nbdwire.Connection(pair.socket, DISK)
    guest.write(0, BEFORE)
    assert bookmark(pair, "deploy").returncode == DONE
    pair.backup_command("bookmark", GROUP, "clean")

    guest.write(0, AFTER)
    taken = bookmark(pair, "deploy")
    assert taken.returncode == REFUSED and "there is a bookmark deploy already" in taken.stderr, taken
    theirs = bookmark(pair, "clean", "--move")
    assert theirs.returncode == REFUSED and "set at the backup" in theirs.stderr, theirs
    odd = bookmark(pair, "../deploy")
    assert odd.returncode == REFUSED and "cannot be a name" in odd.stderr, odd
    assert first_block_at(pair, "deploy") == BEFORE
    assert first_block_at(pair, "clean") == BEFORE
    assert bookmark(pair, "deploy", "--move", "--expires", "1h").returncode == DONE
    assert first_block_at(pair, "deploy") == AFTER
    marks = {
        mark["name"]: mark for mark in json.loads(pair.backup_command("bookmark", GROUP, "--list", "--json"))["marks"]
    }
    assert marks["deploy"]["host"] and marks["deploy"]["expires_at_unix_ms"], marks
    assert "host" not in marks["clean"], marks
    guest.close()
