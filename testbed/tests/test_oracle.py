"""The oracle bites: an image that lacks a completed write, or has one that was overwritten, is found out."""

from __future__ import annotations

from tidelock_testbed.oracle import BLOCK, Oracle, block_data


def image(path, *versions: int):
    path.write_bytes(b"".join(block_data(v, n) if v > 0 else bytes(BLOCK) for n, v in enumerate(versions)))
    return path


def test_a_lost_write_and_a_revived_one_are_found(tmp_path):
    oracle = Oracle(2 * BLOCK)
    first = oracle.issue(range(2), zero=False)
    assert not oracle.violations(image(tmp_path / "a", first.version, 0)), "in doubt: either may be there"
    oracle.complete(first)
    assert len(oracle.violations(image(tmp_path / "b", first.version, 0))) == 1
    second = oracle.issue(range(1), zero=False)
    oracle.complete(second)
    assert len(oracle.violations(image(tmp_path / "c", first.version, first.version))) == 1
    assert not oracle.violations(image(tmp_path / "d", second.version, first.version))
    zeroed = oracle.issue(range(1, 2), zero=True)
    oracle.complete(zeroed)
    assert not oracle.violations(image(tmp_path / "e", second.version, 0))
    assert len(oracle.violations(image(tmp_path / "f", second.version, first.version))) == 1


def test_writes_in_flight_at_once_may_land_in_any_order(tmp_path):
    oracle = Oracle(BLOCK)
    one, two = oracle.issue(range(1), zero=False), oracle.issue(range(1), zero=False)
    oracle.complete(two)
    oracle.complete(one)
    for write in (one, two):
        assert not oracle.violations(image(tmp_path / f"{write.version}", write.version))
    assert oracle.violations(image(tmp_path / "neither", 0))


def test_a_write_without_a_reply_may_be_there_until_it_is_overwritten(tmp_path):
    oracle = Oracle(BLOCK)
    lost = oracle.issue(range(1), zero=False)
    oracle.server_died()
    assert not oracle.violations(image(tmp_path / "a", lost.version))
    assert not oracle.violations(image(tmp_path / "b", 0))
    after = oracle.issue(range(1), zero=False)
    oracle.complete(after)
    assert oracle.violations(image(tmp_path / "c", lost.version))
    assert not oracle.violations(image(tmp_path / "d", after.version))
