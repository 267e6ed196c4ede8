"""Where things are in the checkout, and where a run may write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

CACHE = ROOT / ".cache"
"""Things that are dear to make and the same for every run: the guest's image."""

OUT = ROOT / "out"
"""What runs leave behind: logs, reports, artefacts of failures."""

BIN = ROOT / "target" / "release"
"""The programs under test, as `scripts/setup` builds them."""

SYSTEM_PYTHON = "/usr/bin/python3"
"""Debian's interpreter: the only one that sees Debian's `python3-libnbd`."""
