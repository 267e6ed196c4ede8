"""PostgreSQL on whatever disk, for one session and nothing in between: to ask a view of the past what is in it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from .bench.postgres import private

SCRIPT = Path(__file__).with_name("sql-alone")


class SqlAlone:
    """The programs of a VM guest's root image, each time on another disk. `work` is where they are mounted."""

    def __init__(self, root_image: Path, work: Path):
        self.root_image, self.work = root_image, work
        work.mkdir()

    def command(self, uri: str) -> list[str]:
        """The command line that runs the SQL of its standard input on the disk of an NBD URI."""
        return [str(word) for word in private('exec "$@"', SCRIPT, self.root_image, uri, self.work)]

    def run(self, uri: str, sql: str) -> str:
        """Runs statements, one in each line; returns all that it says."""
        done = subprocess.run(self.command(uri), input=sql, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"PostgreSQL alone cannot run on {uri}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def check(self, member: str, disk: str, sql: str, good: str, bad: list[str]) -> str:
        """A check for `tidelock-backup bisect`, as a shell script: what the statement says if all is well, and if not.

        Anything else ends the search: an answer that nobody expected says nothing.
        """
        socket = f"$TIDELOCK_VIEW_{member.upper()}_{disk.upper()}".replace("-", "_")
        command = shlex.join(self.command("URI")).replace("URI", '"$uri"')
        bad_cases = "\n".join(f"            *{shlex.quote(text)}*) exit 1 ;;" for text in bad)
        return f"""
        uri="nbd+unix:///{member}.{disk}?socket={socket}"
        said=$(echo {shlex.quote(sql)} | {command} 2>&1)
        case $said in
            *{shlex.quote(good)}*) exit 0 ;;
{bad_cases}
            *) echo "$said"; exit 200 ;;
        esac
        """
