//! What a view of a long journal costs: the time to open it at a random instant, first and random reads, and the
//! memory of it. `cargo run --release -p tidelock-backup-server --example view_costs -- DIR MIB`: fills DIR, which must be
//! empty, with a journal of so many MiB of random 4 KiB writes to a disk of 16 GiB, and prints.

use bytes::Bytes;
use std::error::Error;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};
use tidelock_backup_server::journal::{Journal, Options, State};
use tidelock_backup_server::storage::files::Files;
use tidelock_backup_server::storage::{Storage, StorageFile};
use tidelock_backup_server::view::{DiskKey, Overlay, View};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::record::{Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;

const DISK_BYTES: u64 = 16 << 30;
const KEY: DiskKey = DiskKey { writer: WriterId(0), disk: DiskId(0) };

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.unwrap_or(0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(mib)) = (args.next(), args.next()) else {
        return Err("which directory, and how many MiB?".into());
    };
    let bytes = mib.parse::<u64>()? << 20;
    let mut rng = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        rng % below
    };
    let files = Files::new(dir.into());
    let mut journal = Journal::create(files.clone(), "journal", State::new(1), Options::default())?;
    let image = files.create("image")?;
    image.set_size(DISK_BYTES)?;
    let data = Bytes::from(vec![7; 4096]);
    let (mut seq, mut making) = (0, Duration::ZERO);
    // By seq: the segment that has it.
    let mut segments = vec![0];
    while journal.bytes() < bytes {
        for _ in 0..1000 {
            seq += 1;
            journal.stage_record(Record {
                writer: KEY.writer,
                seq: Seq(seq),
                epoch: Epoch(1),
                hlc: Hlc(seq << 16),
                deps: CountVector::new(),
                disk: KEY.disk,
                offset: random(DISK_BYTES / 4096) * 4096,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(data.clone())),
            })?;
        }
        journal.write(|_| {})?;
        segments.resize(seq as usize + 1, journal.end().segment);
        let since = Instant::now();
        while let Some(job) = journal.index_job(0, |_| None).or_else(|| journal.map_job(0)) {
            journal.made(job.run()?);
        }
        making += since.elapsed();
    }
    journal.sync()?;
    println!(
        "{mib} MiB, {} segments, {} maps; indexes and maps took {making:.1?}; resident {} KiB",
        journal.segments().len(),
        journal.tail().maps().len(),
        resident_kib()
    );
    let before = resident_kib();
    let (mut opening, mut first, mut reads, mut views) = (vec![], vec![], vec![], vec![]);
    for _ in 0..40 {
        let at = 1 + random(seq);
        let (cut, end) = (CountVector::of(KEY.writer, Seq(at)), segments[at as usize]);
        let since = Instant::now();
        let overlay = Overlay::past(&journal.tail(), journal.state(), 0..end + 1, &cut)?;
        opening.push(since.elapsed());
        let view = View::new(KEY, DISK_BYTES, image.clone(), Arc::new(RwLock::new(overlay)));
        let mut buf = [0; 4096];
        for nth in 0..200 {
            let since = Instant::now();
            view.read(random(DISK_BYTES / 4096) * 4096, &mut buf)?;
            if nth == 0 { first.push(since.elapsed()) } else { reads.push(since.elapsed()) }
        }
        views.push(view);
    }
    for (what, mut times) in [("open", opening), ("first read", first), ("read of 4 KiB", reads)] {
        times.sort();
        let at = |part: usize| times[(times.len() - 1) * part / 100];
        println!("  {what:<14} median {:.1?}, 99 % {:.1?}, most {:.1?}", at(50), at(99), at(100));
    }
    println!("  {} views open: {} KiB more", views.len(), resident_kib().saturating_sub(before));
    Ok(())
}
