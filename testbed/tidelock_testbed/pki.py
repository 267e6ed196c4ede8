"""Certificates for both sites, made as a user makes them: with `tidelock pki`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from .paths import BIN
from .process import run_command


@dataclass(frozen=True)
class TlsFiles:
    """What one side needs to prove who it is."""

    ca: Path
    certificate: Path
    key: Path

    def toml(self) -> str:
        """The section of a configuration file."""
        return f'[tls]\nca = "{self.ca}"\ncertificate = "{self.certificate}"\nkey = "{self.key}"\n'


class Pki:
    """An authority in a directory of its own."""

    def __init__(self, directory: Path, same_as: Pki | None = None):
        self.directory = directory
        if same_as:
            # For renewed certificates: nothing is overwritten in the directory of the old ones.
            directory.mkdir(parents=True)
            for file in ("ca.pem", "ca.key"):
                shutil.copy2(same_as.directory / file, directory / file)
            return
        run_command([BIN / "tidelock", "pki", "init", "--dir", directory], "make an authority")

    def issue(self, role: str, name: str, into: Path) -> TlsFiles:
        """A certificate for a `host` or a `backup`, copied to where that side keeps its files."""
        run_command(
            [BIN / "tidelock", "pki", "issue", f"--{role}", name, "--dir", self.directory],
            f"make a {role}'s certificate",
        )
        into.mkdir(parents=True, exist_ok=True)
        names = ["ca.pem", f"{name}.pem", f"{name}.key"]
        return TlsFiles(*(Path(shutil.copy2(self.directory / file, into / file)) for file in names))
