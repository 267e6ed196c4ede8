"""`boot.toml`: what the backup site gives QEMU for a machine beside what its host describes."""

from __future__ import annotations

import json
from pathlib import Path

from .guest import root_disk
from .image import GuestImage


def link_boot_files(data: Path, image: GuestImage) -> GuestImage:
    """Puts kernel, initramfs and root disk where a backup server looks for them."""
    boot = data / "boot"
    boot.mkdir(parents=True)
    for file in (image.kernel, image.initrd, image.root):
        (boot / file.name).symlink_to(file)
    return GuestImage(boot)


def write_machines(config: Path, there: GuestImage, kernel_options: dict[tuple[str, str], str]) -> None:
    """Writes `boot.toml` beside a backup server's configuration: for each group and member its kernel's options."""
    lines: list[str] = []
    for (group, member), options in kernel_options.items():
        lines += [
            "[[machine]]",
            f"group = {json.dumps(group)}",
            f"member = {json.dumps(member)}",
            f"kernel = {json.dumps(there.kernel.name)}",
            f"initrd = {json.dumps(there.initrd.name)}",
            f"append = {json.dumps(options)}",
            f"arguments = {json.dumps(['-no-reboot', *root_disk(there)])}",
        ]
    (config / "boot.toml").write_text("\n".join(lines) + "\n")
