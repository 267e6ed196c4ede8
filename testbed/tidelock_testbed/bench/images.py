"""Disk images whose every block was written, on the disk or in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..run import Run

MEMORY = Path("/dev/shm")
"""A file system without a disk behind it."""


def memory_directory(run: Run) -> Path:
    """A directory in memory that is gone after the run."""
    directory = Path(tempfile.mkdtemp(prefix=f"{run.prefix}-", dir=MEMORY))
    run.note(directory=str(directory))
    run.on_close(f"remove {directory}", lambda: shutil.rmtree(directory, ignore_errors=True))
    return directory


def disk_directory(run: Run) -> Path:
    """A directory on the disk that is gone after the run: images are large."""
    directory = run.directory / "images"
    directory.mkdir()
    run.note(directory=str(directory))
    run.on_close(f"remove {directory}", lambda: shutil.rmtree(directory, ignore_errors=True))
    return directory


def filled_image(path: Path, size_mib: int) -> Path:
    """An image of random bytes: no holes, nothing that a disk could shorten."""
    block = os.urandom(1 << 20)
    with path.open("wb") as image:
        for number in range(size_mib):
            # Random enough: no two megabytes are equal, and it takes no time.
            image.write(number.to_bytes(8, "little") + block[8:])
        image.flush()
        os.fsync(image.fileno())
    forget_cache(path)
    return path


def forget_cache(path: Path) -> None:
    """Writes out what the page cache holds of a file and drops it, so that no turn profits from the one before."""
    with path.open("r+b") as image:
        os.fsync(image.fileno())
        os.posix_fadvise(image.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
