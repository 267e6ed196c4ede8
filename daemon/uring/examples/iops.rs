//! How many 4 KiB operations one thread does per second on a file, at queue depth 1 and 32.
//!
//! `cargo run --release -p tidelock-uring --example iops -- [FILE [SECONDS]]`
//! FILE is made if it does not exist (1 GiB, filled) and is removed again only in that case.

use std::error::Error;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidelock_uring::{BufPool, Buffer, Durability, LocalFile, OpenRequest, Ring};

const BLOCK_BYTES: usize = 4096;
const FILE_BYTES: u64 = 1 << 30;
const FILL_BYTES: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let path = args.next().map_or_else(|| PathBuf::from("iops.img"), PathBuf::from);
    let seconds = match args.next() {
        Some(arg) => arg.to_str().ok_or("SECONDS is not a number")?.parse()?,
        None => 3,
    };
    let made = !path.exists();
    if made {
        fill(&path)?;
    }
    let outcome = run(&path, Duration::from_secs(seconds));
    if made {
        std::fs::remove_file(&path)?;
    }
    outcome
}

/// Writes real data, so that reads do not find holes and writes need not allocate.
fn fill(path: &Path) -> std::io::Result<()> {
    let file = std::fs::File::create_new(path)?;
    let chunk = vec![0xa5; FILL_BYTES];
    for offset in (0..FILE_BYTES).step_by(FILL_BYTES) {
        file.write_all_at(&chunk, offset)?;
    }
    file.sync_all()
}

fn run(path: &Path, time: Duration) -> Result<(), Box<dyn Error>> {
    let disk = LocalFile::open(path, &OpenRequest::default())?;
    let mut ring = Ring::new(256)?;
    println!("{}, {}", ring.mode(), disk.io_mode());
    println!("{:>6} {:>6} {:>12} {:>16}", "depth", "what", "IOPS", "mean latency us");
    for depth in [1, 32] {
        for write in [true, false] {
            let done = measure(&mut ring, &disk, depth, write, time)?;
            let per_s = done as f64 / time.as_secs_f64();
            let what = if write { "write" } else { "read" };
            println!("{depth:>6} {what:>6} {per_s:>12.0} {:>16.1}", depth as f64 * 1e6 / per_s);
        }
    }
    Ok(())
}

fn measure(
    ring: &mut Ring,
    disk: &LocalFile,
    depth: u64,
    write: bool,
    time: Duration,
) -> Result<u64, Box<dyn Error>> {
    let pool = BufPool::new(64 << 20);
    let blocks = disk.len_bytes() / BLOCK_BYTES as u64;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut start = |ring: &mut Ring, token| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (random >> 20) % blocks * BLOCK_BYTES as u64;
        let mut buf = pool.get(BLOCK_BYTES);
        if write {
            buf.set_len(BLOCK_BYTES);
            // A fresh buffer for each write, as the owner loop has it.
            let data: Bytes = buf.freeze_all();
            ring.write(token, disk.fd(), data, offset, Durability::Cached);
        } else {
            ring.read(token, disk.fd(), buf, 0..BLOCK_BYTES, offset);
        }
    };
    for token in 0..depth {
        start(ring, token);
    }
    let deadline = Instant::now() + time;
    let mut done = 0;
    let mut stopping = false;
    while ring.in_flight() > 0 {
        ring.submit_and_wait(1)?;
        while let Some(completion) = ring.next_completion() {
            let count = completion.result?;
            assert_eq!(count as usize, BLOCK_BYTES, "a short transfer");
            assert!(!matches!(completion.buffer, Buffer::None));
            if !stopping {
                done += 1;
                start(ring, completion.token);
            }
        }
        stopping = stopping || Instant::now() >= deadline;
    }
    Ok(done)
}
