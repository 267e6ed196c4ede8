"""`make coverage`: functions are found in what the compiler leaves, those that nobody calls among them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tidelock_testbed.counters import functions_of, ran
from tidelock_testbed.coverage import Named, c_functions_of, end_of, named_of, place_of, table

LIBRARY = """\
pub fn called(
    one: u32,
) -> u32 {
    // A comment belongs to the function.
    let closure = || {
        one + inner()
    };
    fn inner() -> u32 { 1 }

    closure()
}

pub fn generic<T: ToString>(one: T) -> String {
    let text = "{
}
";
    one.to_string() + text
}

pub async fn asynchronous() -> u32 {
    let one = called(1);

    one + 1
}

fn unused() {}

pub struct Here;

impl Here {
    #[inline]
    pub const fn inlined(&self) -> u32 {
        2
    }

    pub(in crate) unsafe extern "C" fn ends_the_process(&self) -> ! {
        panic!("{:?}", self.inlined())
    }
}

#[cfg(test)]
mod tests {
    fn not_built() {}
}
"""
PROGRAM = """\
fn main() {
    assert_eq!(library::called(1) + library::Here.inlined(), 4);
}
"""


def compiled(directory: Path, name: str, text: str, level: int, *words: str) -> Path:
    """The source, which lies beside what is made of it."""
    source = directory / f"{name}.rs"
    source.write_text(text)
    command = ["rustc", "--edition", "2024", "-A", "warnings", "-C", "instrument-coverage", "-C", f"opt-level={level}"]
    subprocess.run([*command, *words, source.name], cwd=directory, check=True)
    return source


def test_functions_that_ran_and_that_did_not(tmp_path):
    compiled(tmp_path, "library", LIBRARY, 1, "--crate-type", "rlib")
    compiled(tmp_path, "program", PROGRAM, 1, "--extern", "library=liblibrary.rlib")
    profile = tmp_path / "profile"
    subprocess.run([tmp_path / "program"], env=os.environ | {"LLVM_PROFILE_FILE": str(profile)}, check=True)
    keys, functions = ran(profile), list(functions_of(tmp_path / "program"))
    assert keys <= {function.key for function in functions}
    entered = {(function.file, function.start) for function in functions if function.key in keys}
    assert (tmp_path / "program.rs", (1, 1)) in entered

    source = compiled(tmp_path, "library", LIBRARY, 0, "--crate-type", "rlib")
    all_functions = functions_of(tmp_path / "liblibrary.rlib")
    made = [(function, (function.file, function.start) in entered) for function in all_functions]
    assert {function.file for function, _ in made} == {source}
    found = named_of("library.rs", LIBRARY.splitlines(), made)
    assert [(each.name, each.lines, each.ran) for each in found] == [
        ("called", 10, True),
        ("inner", 1, True),
        ("generic", 6, False),
        ("asynchronous", 5, False),
        ("unused", 1, False),
        ("inlined", 3, True),
        ("ends_the_process", 3, False),
    ]


def test_the_end_of_a_function_is_below_its_beginning():
    source = [
        "    fn one(",
        "        Pair { a, b }: Pair,",
        "    )",
        "    where",
        "        A: B,",
        "    {",
        "    }",
        "}",
    ]
    assert end_of(source, 1, 3) == 7
    assert end_of(["fn one() -> u32 { 1 }", "}"], 1, 1) == 1


def test_functions_of_the_kernel_programs():
    source = ["struct way", "{", "\tint a;", "};", "", "APART int one(int a,", "\t\tint b)", "{", "\treturn a;", "}"]
    found = c_functions_of("tag.h", source[5:], {3})
    assert [(each.name, each.line, each.lines, each.ran) for each in found] == [("one", 1, 5, True)]


def test_a_folder_of_modules():
    crates = ["daemon", "daemon/core", "daemon/uring", "netfilter/bpf"]
    assert place_of("daemon/core/src/owner/mod.rs", crates) == ("daemon/core", "owner/")
    assert place_of("daemon/core/src/degrade.rs", crates) == ("daemon/core", "degrade/")
    assert place_of("daemon/src/lib.rs", crates) == ("daemon", "(files)")
    assert place_of("daemon/uring/src/ring.rs", crates) == ("daemon/uring", "(files)")
    assert place_of("netfilter/bpf/tag.h", crates) == ("netfilter/bpf", "")


def test_the_sums_are_of_what_decides_and_of_all():
    crates = ["daemon", "daemon/core"]
    functions = [
        Named("daemon/core/src/lib.rs", 1, "decides", 30, True),
        Named("daemon/core/src/lib.rs", 31, "rests", 10, False),
        Named("daemon/src/lib.rs", 1, "reads", 60, False),
    ]
    rows = [line.split() for line in table(crates, functions).splitlines()]
    assert rows[-2] == ["crates", "without", "I/O", "40", "30", "75"]
    assert rows[-1] == ["total", "100", "30", "30"]
