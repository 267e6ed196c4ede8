"""How much of production's code the simulator runs: in lines of functions that were entered at least once.

Functions come from a build of production's crates as they are shipped, with counters in each function: so those that
nobody calls in the simulator's program are there, tests and the simulator's own switches are not. A function has the
lines from its signature to its closing brace, comments among them; closures and the bodies of async functions belong
to the function around them, a function within a function is one of its own.

The last row but one is of the crates that only decide (`scripts/check-rooms`): the others talk to the kernel, to peers
and to other programs.

Not counted: command lines, configuration, metrics, planted bugs, and what serves tests alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .counters import Function, Unreadable, functions_of, ran
from .paths import OUT, ROOT
from .progress import say

TARGET = ROOT / "target" / "coverage"
SIMULATOR = "tidelock-sim"
NOT_PRODUCTION = (
    "testbed/",
    "fuzz/",
    "protocol/planted/",
    "netfilter/native/",
    "netfilter/src/bin/gate-drive.rs",
    "target/",
)
NOT_COUNTED = re.compile(
    r"^protocol/config/"
    r"|/src/(\w+/)*(cli|config|metrics)(/|\.rs$)"
    r"|^daemon/src/bin/tidelock\.rs$|^backup-server/src/bin/"
)
KERNEL_PROGRAMS = "netfilter/bpf"
"""C for the kernel's virtual machine. The simulator has it compiled for the host (netfilter/native)."""
NAMED = re.compile(r"(?:pub(?:\([^)]*\))?\s+)?(?:(?:default|const|async|unsafe|extern|\"\w+\")\s+)*fn\s+(\$?\w+)")


@dataclass(eq=False)
class Named:
    """A function with its own lines."""

    file: str
    line: int
    name: str
    lines: int = 0
    ran: bool = False


def end_of(source: list[str], line: int, last: int) -> int:
    """The line of the closing brace, by rustfmt's layout: a function's stands below its signature's first letter.

    `line` is the signature's first, `last` the last that is known to belong to the function; they count from 1.
    """
    indent = re.match(r"\s*", source[line - 1])[0]
    for at in range(last, len(source) + 1):
        text = source[at - 1].rstrip()
        if text == indent + "}" or (at == last and text.endswith("}") and _is_closed(source[line - 1 : at])):
            return at
    raise ValueError(f"no end of {source[line - 1].strip()!r}")


def _is_closed(lines: list[str]) -> bool:
    text = "\n".join(lines)
    return text.count("{") == text.count("}")


def named_of(file: str, source: list[str], made: Iterable[tuple[Function, bool]]) -> list[Named]:
    """The functions of a source file, of what the compiler made of it and whether that ran."""
    owner: dict[int, Named] = {}
    found: list[Named] = []
    inner = []
    seen: dict[tuple[int, int], Named] = {}
    for function, has_run in sorted(made, key=lambda each: (each[0].start, -each[0].last)):
        line, column = function.start
        if function.start not in seen:
            name = NAMED.match(source[line - 1][column - 1 :])
            if not name:
                inner.append((function, has_run))
                continue
            named = seen[function.start] = Named(file, line, name[1])
            found.append(named)
            for at in range(line, end_of(source, line, function.last) + 1):
                owner[at] = named
        seen[function.start].ran |= has_run
    for function, has_run in inner:
        line = function.start[0]
        if line not in owner:
            named = Named(file, line, "(closure)")
            found.append(named)
            owner |= {at: named for at in range(line, function.last + 1)}
        owner[line].ran |= has_run
    for named, lines in Counter(owner.values()).items():
        named.lines = lines
    return found


def c_functions_of(file: str, source: list[str], entered: set[int]) -> list[Named]:
    """Functions of a kernel program's text, where their braces stand alone at the margin.

    `entered`: the lines of the opening braces of those that ran, from 1.
    """
    found = []
    for opening in (at for at, text in enumerate(source) if text == "{"):
        begin = next(at for at in range(opening - 1, -1, -1) if re.match(r"\w.*\(", source[at]))
        end = source.index("}", opening)
        name = re.search(r"(\w+)\(", source[begin])[1]
        found.append(Named(file, begin + 1, name, end - begin + 1, opening + 1 in entered))
    return found


def place_of(file: str, crates: Iterable[str]) -> tuple[str, str]:
    """The crate, and in it the folder of modules; a module of one file beside a folder of its name belongs to that."""
    crate = max((crate for crate in crates if file.startswith(crate + "/")), key=len)
    if crate == KERNEL_PROGRAMS:
        return crate, ""
    first, *more = Path(file).relative_to(Path(crate, "src")).parts
    module = first.removesuffix(".rs")
    return crate, f"{module}/" if more or (ROOT / crate / "src" / module).is_dir() else "(files)"


def built(packages: Iterable[str], level: int) -> list[Path]:
    """The programs and libraries of packages of this workspace, with counters.

    `level` of optimisation: at 0 the compiler leaves each function in its place. From 2 on it forgets some of those
    that it has put into their callers.
    """
    command = ["cargo", "build", "--profile", "bench", "--config", f"profile.bench.opt-level={level}"]
    command += ["--target-dir", str(TARGET), "--message-format", "json-render-diagnostics"]
    for package in packages:
        command += ["-p", package]
    environment = os.environ | {
        "RUSTC_WORKSPACE_WRAPPER": str(ROOT / "scripts" / "rustc-with-counters"),
        "TIDELOCK_COUNT_ENTERED": "1",
    }
    told = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    files = []
    for message in map(json.loads, told.splitlines()):
        if message["reason"] == "compiler-artifact" and Path(message["manifest_path"]).is_relative_to(ROOT):
            libraries = [name for name in message["filenames"] if name.endswith(".rlib")]
            files += [Path(name) for name in [message["executable"], *libraries] if name]
    return files


def simulated(seeds: int) -> tuple[set[tuple[str, int, int]], dict[str, set[int]]]:
    """Beginnings of the functions that the simulator entered, as file, line, column.

    Of the kernel programs, by file: the lines of their opening braces.
    """
    program = next(path for path in built([SIMULATOR], 1) if path.name == SIMULATOR)
    OUT.mkdir(exist_ok=True)
    profile = OUT / "simulator.profraw"
    of_c = OUT / "simulator.entered"
    for left in profile, of_c:
        left.unlink(missing_ok=True)
    say(f"{seeds} seeds")
    environment = os.environ | {"LLVM_PROFILE_FILE": str(profile), "TIDELOCK_ENTERED": str(of_c)}
    subprocess.run([program, "--seeds", str(seeds)], cwd=ROOT, env=environment, check=True)
    entered_c: dict[str, set[int]] = defaultdict(set)
    for text in of_c.read_text().splitlines():
        file, line = text.split(":")
        entered_c[file].add(int(line))
    entered = ran(profile)
    functions = list(functions_of(program))
    if unknown := entered - {function.key for function in functions}:
        raise Unreadable(f"{program}: of {len(unknown)} functions that ran it does not say where they are")
    places = {
        (file, *function.start)
        for function in functions
        if function.key in entered and (file := _of_production(function.file))
    }
    return places, entered_c


def _of_production(path: Path) -> str | None:
    """The file as seen from the checkout, if its functions count."""
    if not path.is_relative_to(ROOT):
        return None
    file = str(path.relative_to(ROOT))
    return None if file.startswith(NOT_PRODUCTION) or NOT_COUNTED.search(file) else file


def measured(seeds: int) -> tuple[list[str], list[Named]]:
    """The crates, and all functions of production."""
    told = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    crates = {
        str(Path(package["manifest_path"]).parent.relative_to(ROOT)): package["name"]
        for package in json.loads(told)["packages"]
    }
    say("building the simulator with counters")
    entered, entered_c = simulated(seeds)
    say("building production's crates with counters")
    made: dict[str, dict[tuple, tuple[Function, bool]]] = defaultdict(dict)
    production = [name for crate, name in crates.items() if not f"{crate}/".startswith(NOT_PRODUCTION)]
    for binary in built(production, 0):
        for function in functions_of(binary):
            if file := _of_production(function.file):
                has_run = (file, *function.start) in entered
                made[file][function.start, function.last] = function, has_run
    functions = []
    for file, of_file in sorted(made.items()):
        functions += named_of(file, (ROOT / file).read_text().splitlines(), of_file.values())
    for path in sorted((ROOT / KERNEL_PROGRAMS).glob("*.[ch]")):
        source = path.read_text().splitlines()
        functions += c_functions_of(str(path.relative_to(ROOT)), source, entered_c[path.name])
    return [*crates, KERNEL_PROGRAMS], functions


def crates_without_io() -> set[str]:
    """The crates that only decide."""
    return runpy.run_path(str(ROOT / "scripts" / "check-rooms"))["SANS_IO"]


SUMS = ("crates without I/O", "total")


def table(crates: list[str], functions: Iterable[Named]) -> str:
    """Rows of lines: of each folder of modules, of each crate, of those that only decide, of all."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    decide = crates_without_io()
    for function in functions:
        crate, module = place_of(function.file, crates)
        sums = {(name, "") for name in (SUMS if crate in decide else SUMS[1:])}
        for row in {(crate, module), (crate, "")} | sums:
            rows[row][0] += function.lines
            rows[row][1] += function.lines * function.ran
    wide = max(len(crate) for crate, _ in rows), max(len(module) for _, module in rows)
    text = [f"{'crate':{wide[0]}}  {'modules':{wide[1]}}  {'lines':>6}  {'run':>6}  {'%':>3}"]
    for (crate, module), (lines, run) in sorted(rows.items(), key=lambda row: (row[0][0] in SUMS, row[0])):
        shown = crate if not module else ""
        text.append(f"{shown:{wide[0]}}  {module:{wide[1]}}  {lines:6}  {run:6}  {100 * run / lines:3.0f}")
    return "\n".join(text)


def main(words: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="make coverage", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="SEEDS: of the simulator (%(default)s)")
    parser.add_argument("--never", action="store_true", help="NEVER=1: list what never ran, largest first")
    options = parser.parse_args(words)
    crates, functions = measured(options.seeds)
    if options.never:
        for function in sorted(functions, key=lambda each: -each.lines):
            if not function.ran:
                print(f"{function.lines:5}  {function.file}:{function.line}  {function.name}")
    print(table(crates, functions))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unreadable as unreadable:
        sys.exit(f"coverage: {unreadable}")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"coverage: {failed.cmd[0]} ended with exit status {failed.returncode}")
