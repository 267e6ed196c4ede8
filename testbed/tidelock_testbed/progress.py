"""One line per step, with the time since the program began, at once also through a pipe."""

import sys
import time

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"[{time.monotonic() - _STARTED:7.2f}] {text}", flush=True, file=sys.stdout)
