"""Disks without room."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def take_all(ballast: Path) -> None:
    """Takes all the room that the file system of this file has; removing it gives the room back."""
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while file.write(b"\xba" * size) == size:
                    pass
            except OSError:
                pass
