"""A drill with several guests as a test runs it: process guests, short leases."""

from __future__ import annotations

from tidelock_testbed.appdrill import AppDrill
from tidelock_testbed.drilling import Knobs
from tidelock_testbed.run import Run


def drilled(run: Run, kind: type[AppDrill], **knobs) -> AppDrill:
    """The whole drill, with other knobs where they are given."""
    this = kind(run, Knobs(**{"scenario": kind.name, "guest": "process", "hurry": True, **knobs}))
    this.execute()
    return this
