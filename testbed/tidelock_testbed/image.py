"""The guest's image: a kernel, an initramfs, a root disk with PostgreSQL and blank-state data disks.

Built only from Debian packages, by the machine's own apt configuration: the closure of a few
package names is resolved against an empty package database, downloaded into the cache and
unpacked, never installed. The result is kept in `.cache/guest-<hash of the recipe>`, where
the recipe is this file and the files in `guest/`.

Invariant: a directory of that name is complete; it is renamed into place as the last step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from .paths import CACHE
from .progress import say

RECIPE = Path(__file__).resolve().parent / "guest"

PACKAGES = [
    "bash",
    "busybox-static",
    "coreutils",
    "e2fsprogs",
    "linux-image-cloud-amd64",
    "postgresql-15",
    "python3-psycopg2",
]

LEFT_OUT = re.compile(
    r"^(perl|libperl|linux-base|initramfs-tools|klibc|libklibc|libllvm|libz3|locales|libc-l10n|udev|usrmerge"
    r"|debconf|ucf|adduser|postgresql-common|postgresql-client-common|openssl|ssl-cert|lib(json|number|text|file)-.*perl"
    r"|dpkg|kmod|cpio|lsb-base|sensible-utils|libdb5|libgdbm|gcc-12-base|linux-image-cloud-amd64$)"
)
"""Wanted by the packages' maintainer scripts, which never run here, or by features that are off (JIT)."""

PRUNED = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/lib/postgresql/15/lib/bitcode",
    "usr/lib/postgresql/15/lib/llvmjit.so",
    "usr/lib/python3.11/lib2to3",
    "usr/lib/python3.11/pydoc_data",
    "usr/lib/python3.11/unittest",
]

MODULES = ["virtio_pci", "virtio_blk", "virtio_net", "crc32c_generic", "ext4"]
"""Modules of the initramfs; those that they depend on are found in the modules themselves."""

ROOT_MIB = 512
DATA_MIB = 256
WAL_MIB = 192


@dataclass(frozen=True)
class GuestImage:
    """A complete image. The templates are copied for each run; the rest is only read."""

    directory: Path

    @property
    def kernel(self) -> Path:
        """The kernel, as QEMU's `-kernel` takes it."""
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initramfs, with the modules that the root disk needs."""
        return self.directory / "initrd.img"

    @property
    def root(self) -> Path:
        """The root disk, raw ext4, mounted read-only."""
        return self.directory / "root.img"

    @property
    def data(self) -> Path:
        """Template of a data disk: ext4 with an initialised PGDATA."""
        return self.directory / "data.img"

    @property
    def data_split(self) -> Path:
        """Template of a data disk whose PGDATA keeps its write-ahead log on `wal`."""
        return self.directory / "data-split.img"

    @property
    def wal(self) -> Path:
        """Template of the write-ahead log's disk that belongs to `data_split`."""
        return self.directory / "wal.img"


def guest_image() -> GuestImage:
    """The image of the present recipe, built first if it is not in the cache."""
    directory = CACHE / f"guest-{_recipe_key()}"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "guest.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once build it once
        if not directory.exists():
            _build(directory)
    return GuestImage(directory)


def _recipe_key() -> str:
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(RECIPE.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _build(directory: Path) -> None:
    started = time.monotonic()
    work = directory.with_suffix(".building")
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    say("guest image: not in the cache, building it (a few minutes, once)")
    try:
        debs = _download(work)
    except RuntimeError:
        say("guest image: updating the list of Debian packages")
        _run(["apt-get", "update", "-qq"], "update the list of Debian packages")
        debs = _download(work)
    say(f"guest image: unpacking {len(debs)} packages")
    root = work / "root"
    _unpack(debs, root)
    release = _kernel_release(root)
    shutil.copy(root / "boot" / f"vmlinuz-{release}", work / "vmlinuz")
    say(f"guest image: initramfs for {release}")
    _initramfs(root, release, work)
    shutil.rmtree(root / "boot")
    shutil.rmtree(root / "usr" / "lib" / "modules")
    say("guest image: PGDATA and disks")
    _configure(root)
    _initialise(root, work)
    _make_ext4(root, work / "root.img", ROOT_MIB)
    for leftover in (root, work / "debs"):
        shutil.rmtree(leftover)
    work.rename(directory)
    for old in CACHE.glob("guest-*"):
        if old != directory and old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
    say(f"guest image: done in {time.monotonic() - started:.0f} s")


def _download(work: Path) -> list[Path]:
    """Fetches the closure of PACKAGES with the machine's apt configuration, beside its package database."""
    kept, fresh = CACHE / "debs", work / "debs"
    kept.mkdir(exist_ok=True)
    (fresh / "partial").mkdir(parents=True, exist_ok=True)
    empty = work / "dpkg-status"
    empty.touch()
    apt = [
        "apt-get",
        "-o",
        f"Dir::State::status={empty}",
        "-o",
        f"Dir::Cache::archives={fresh}",
        "-o",
        "Debug::NoLocking=1",
        "-o",
        "APT::Sandbox::User=root",
        "-o",
        "APT::Install-Recommends=0",
        "-y",
        "-qq",
    ]
    plan = _run([*apt, "--print-uris", "install", *PACKAGES], "resolve the guest's packages")
    wanted = re.findall(r"^'[^']*' ((\S+?)_(\S+)_\w+\.deb) \d+", plan, re.MULTILINE)
    wanted = [row for row in wanted if not LEFT_OUT.match(row[1])]
    missing = [row for row in wanted if not (kept / row[0]).exists()]
    if missing:
        say(f"guest image: downloading {len(missing)} Debian packages")
        names = [f"{name}={version.replace('%3a', ':')}" for _, name, version in missing]
        _run([*apt, "download", *names], "download the guest's packages", cwd=fresh)
        for file, _, _ in missing:
            (fresh / file).rename(kept / file)  # whole or not at all
    return [kept / file for file, _, _ in wanted]


def _unpack(debs: list[Path], root: Path) -> None:
    for name in ["bin", "sbin", "lib", "lib64"]:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for deb in debs:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as tarfile:
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", root], stdin=tarfile.stdout, check=True)
        if tarfile.returncode != 0:
            raise RuntimeError(f"{deb} is damaged: delete it and run again")
    for path in PRUNED:
        target = root / path
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()


def _kernel_release(root: Path) -> str:
    releases = list((root / "usr" / "lib" / "modules").iterdir())
    if len(releases) != 1:
        raise RuntimeError(f"expected one guest kernel, found {releases}")
    return releases[0].name


def _initramfs(root: Path, release: str, work: Path) -> None:
    tree = work / "initramfs"
    (tree / "bin").mkdir(parents=True)
    (tree / "modules").mkdir()
    shutil.copy(root / "bin" / "busybox", tree / "bin" / "busybox")
    shutil.copy(RECIPE / "initramfs-init", tree / "init")
    (tree / "init").chmod(0o755)
    order = _module_order(root / "usr" / "lib" / "modules" / release)
    for module in order:
        shutil.copy(module, tree / "modules" / module.name)
    (tree / "modules" / "order").write_text("".join(f"{module.name}\n" for module in order))
    names = "".join(f"{path.relative_to(tree)}\n" for path in sorted(tree.rglob("*")))
    busybox = root / "bin" / "busybox"  # static: it runs here as well
    archive = subprocess.run(
        [busybox, "cpio", "-o", "-H", "newc"], input=names.encode(), cwd=tree, check=True, capture_output=True
    ).stdout
    (work / "initrd.img").write_bytes(archive)
    shutil.rmtree(tree)


def _module_order(modules: Path) -> list[Path]:
    """MODULES and what they depend on, each after its dependencies. What is built in has no file and is left out."""
    by_name = {path.stem.replace("-", "_"): path for path in modules.rglob("*.ko")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = by_name.get(name.replace("-", "_"))
        if path is None or path in order:
            return
        for needed in re.findall(rb"\0depends=([^\0]*)\0", path.read_bytes()):
            for dependency in filter(None, needed.decode().split(",")):
                add(dependency)
        order.append(path)

    for name in MODULES:
        add(name)
    return order


def _configure(root: Path) -> None:
    for directory in ["data", "wal", "dev", "proc", "sys", "run", "tmp", "var", "root", "etc/tidelock"]:
        (root / directory).mkdir(parents=True, exist_ok=True)
    for name in [
        "postgresql.conf",
        "pg_hba.conf",
        "pg_ident.conf",
        "initdb",
        "rows.sql",
        "say-rows",
        "tier.py",
        "capture.py",
    ]:
        shutil.copy(RECIPE / name, root / "etc" / "tidelock" / name)
    for program in ["initdb", "say-rows"]:
        (root / "etc" / "tidelock" / program).chmod(0o755)
    shutil.copy(RECIPE / "root-init", root / "sbin" / "tidelock-init")
    (root / "sbin" / "tidelock-init").chmod(0o755)
    # The root is mounted read-only: what Python does not find compiled, it compiles at each start.
    compiled = ["chroot", root, "/usr/bin/python3", "-m", "compileall", "-q", "/usr/lib/python3.11", "/usr/lib/python3"]
    _run(compiled, "compile the guest's Python")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\npostgres:x:999:999::/data:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\npostgres:x:999:\n")
    if not (root / "bin" / "sh").exists():
        (root / "bin" / "sh").symlink_to("bash")


def _initialise(root: Path, work: Path) -> None:
    """Runs the guest's own initdb in a chroot and makes the data disks' templates of what it wrote."""
    for name, minor in [("null", 3), ("zero", 5), ("urandom", 9)]:
        os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        (root / "dev" / name).chmod(0o666)
    (root / "dev" / "shm").mkdir()
    (root / "dev" / "shm").chmod(0o1777)
    (root / "tmp").chmod(0o1777)
    data, wal = root / "data", root / "wal"
    for directory in (data, wal):
        os.chown(directory, 999, 999)
    as_postgres = ["chroot", "--userspec=999:999", root, "/etc/tidelock/initdb", "/data/pg"]
    _run(as_postgres, "initialise PGDATA")
    _make_ext4(data, work / "data.img", DATA_MIB)
    shutil.rmtree(data / "pg")
    _run([*as_postgres, "--waldir=/wal/pg_wal"], "initialise PGDATA with a separate log")
    _make_ext4(data, work / "data-split.img", DATA_MIB)
    _make_ext4(wal, work / "wal.img", WAL_MIB)
    for directory in (data, wal, root / "dev"):
        shutil.rmtree(directory)
        directory.mkdir()


def _make_ext4(tree: Path, image: Path, size_mib: int) -> None:
    label = f"tidelock-{image.stem}"[:16]  # ext4 has room for no more
    _run(["mke2fs", "-q", "-t", "ext4", "-L", label, "-d", tree, image, f"{size_mib}M"], f"make {image.name}")


def _run(command: list, what: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    if done.returncode != 0:
        raise RuntimeError(f"cannot {what}: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    say(f"guest image: {guest_image().directory}")
