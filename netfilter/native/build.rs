//! Compiles the kernel programs for the host with clang, which the kernel's copy is compiled with as well: once as
//! they are, and once for each planted fault. Where the environment has `TIDELOCK_COUNT_ENTERED`, as `make coverage` sets
//! it, those without a fault say which of their functions are entered.

#[path = "src/planted.rs"]
mod planted;

use planted::{Planted, Replacement};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

const COUNT_ENTERED: &str = "TIDELOCK_COUNT_ENTERED";

fn main() {
    // Read at run time, because a copied target directory was built in another tree.
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let (programs, shim) = (manifest.join("../bpf"), manifest.join("shim"));
    for seen in [&programs, &shim, &manifest.join("src/planted.rs")] {
        println!("cargo:rerun-if-changed={}", seen.display());
    }
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed={COUNT_ENTERED}");
    match env::var_os(COUNT_ENTERED) {
        None => compile("programs", &programs, &shim, None),
        Some(_) => {
            let copy = out.join("counted");
            write_copy(&programs, &copy, &[], |text| {
                text.replace("\n{\n", "\n{ TIDELOCK_ENTERED;\n")
            });
            compile("programs", &copy, &shim, Some(&shim.join("entered.h")));
        }
    }
    for planted in Planted::ALL {
        let copy = out.join(planted.name());
        write_copy(&programs, &copy, planted.replacements(), |text| text);
        compile(planted.name(), &copy, &shim, None);
    }
}

fn compile(name: &str, programs: &Path, shim: &Path, before: Option<&Path>) {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let mut build = cc::Build::new();
    if let Some(before) = before {
        build.flag("-include").flag(before);
    }
    build
        .compiler(clang)
        .opt_level(2)
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .flag("-Wno-unused-parameter")
        .flag("-Wno-sign-compare")
        .define("RUN", format!("tidelock_run_{name}").as_str())
        .define("CPU_BYTES", format!("tidelock_cpu_bytes_{name}").as_str())
        .include(shim.join("include"))
        .include(programs)
        .file(shim.join("native.c"))
        .compile(&format!("tidelock_{name}"));
}

/// The programs with these replacements, and with what `change` makes of each file. Each text to be replaced stands in one
/// place of one file.
fn write_copy(
    programs: &Path,
    to: &Path,
    replacements: &[Replacement],
    change: impl Fn(String) -> String,
) {
    fs::create_dir_all(to).expect("the directory can be made");
    let mut times = vec![0; replacements.len()];
    for entry in fs::read_dir(programs).expect("the programs are there") {
        let path = entry.expect("a file").path();
        let mut text = fs::read_to_string(&path).expect("a text");
        for ((from, to), times) in replacements.iter().zip(&mut times) {
            *times += text.matches(from).count();
            text = text.replace(from, to);
        }
        let file = to.join(path.file_name().expect("a name"));
        fs::write(file, change(text)).expect("there is room");
    }
    for ((from, _), times) in replacements.iter().zip(times) {
        assert!(
            times == 1,
            "{times} times in the programs, to be replaced in a planted fault: {from}"
        );
    }
}
