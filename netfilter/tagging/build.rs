//! Compiles the kernel programs with clang.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    // As it is now, not as it was when this program was built: a copied target belongs to another tree.
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let programs = manifest.join("../bpf");
    println!("cargo:rerun-if-changed={}", programs.display());
    println!("cargo:rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("tag.bpf.o");
    let headers = env::var("DEP_BPF_INCLUDE").expect("libbpf-sys tells where its headers are");
    write_ack_options(&programs.join("ack_options.h"));
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let endian = match env::var("CARGO_CFG_TARGET_ENDIAN").as_deref() {
        Ok("big") => "bpfeb",
        _ => "bpfel",
    };
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let status = Command::new(&clang)
        .args(["-target", endian, "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unused-parameter", "-Wno-sign-compare"])
        .arg("-c")
        .arg(programs.join("tag.bpf.c"))
        .arg("-o")
        .arg(&out)
        .arg("-I")
        .arg(headers)
        // Where Debian keeps the asm/ headers that linux/ ones ask for.
        .arg("-idirafter")
        .arg(format!("/usr/include/{arch}-linux-gnu"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} could not compile tag.bpf.c: {status}"),
        Err(e) => panic!(
            "{clang} is needed to compile the kernel programs (scripts/setup installs it): {e}"
        ),
    }
}

/// The TCP options of pure acknowledgements, which C and Rust both go by.
fn write_ack_options(header: &std::path::Path) {
    let text = std::fs::read_to_string(header).expect("the header is there");
    let listed = text.lines().filter_map(|line| line.strip_prefix("ACK_OPTION("));
    let mut rust = "&[".to_owned();
    for line in listed {
        let numbers = line.split_once(')').expect("its end").0;
        let [kind, least, most, step]: [u8; 4] = numbers
            .split(',')
            .map(|number| number.trim().parse().expect("a number"))
            .collect::<Vec<_>>()
            .try_into()
            .expect("four numbers");
        rust +=
            &format!("AckOption {{ kind: {kind}, least: {least}, most: {most}, step: {step} }},");
    }
    rust.push(']');
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("ack_options.rs"), rust).expect("the directory is there");
}
