//! `tidelock-records DIR` prints what the records of a group's journal write, in the journal's order.
//!
//! DIR has the journal's segments, as they were written or compressed. Opening a journal cuts a torn tail, so DIR must be a
//! copy if a server uses the journal.
//!
//! For each record that writes or zeroes, on standard output, little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 8 | epoch |
//! | 8 | seq |
//! | 8 | offset on the disk |
//! | 4 | length of the extent |
//! | 4 | length of the data that follow: 0 of an extent that is zeroed |
//! | 2 | writer |
//! | 2 | disk |
//! | 4 | 1 if the record is a copy of what the disk held, and no write of the guest; else 0 |
//!
//! `tidelock-records --store DIR SHARD UP_TO` prints the entries of one shard of a store, up to that position. DIR is the store's
//! directory, and no server uses it. A line for each entry with content: its end, its effective stamp, the content in hexadecimal.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, bail};
use tidelock_protocol::record::{Effect, Record};
use tidelock_shard::LogIndex;
use tidelock_shard_logs::{Limits, Store};
use tidelock_storage::files::Files;
use tidelock_store::journal::{Entry, Journal, Options, Position};

fn main() -> anyhow::Result<()> {
    let words: Vec<_> = env::args_os().skip(1).collect();
    if let [first, dir, shard, up_to] = words.as_slice()
        && first == "--store"
    {
        let number = |word: &OsString| word.to_str().and_then(|word| word.parse().ok());
        let shard = number(shard).and_then(|shard: u64| u16::try_from(shard).ok());
        let up_to = number(up_to).map(LogIndex);
        let (Some(shard), Some(up_to)) = (shard, up_to) else {
            bail!("SHARD and UP_TO are numbers")
        };
        return print_shard(PathBuf::from(dir), shard, up_to);
    }
    let [dir] = words.as_slice() else { bail!("say which directory: tidelock-records DIR") };
    let files = Files::new(PathBuf::from(dir));
    let journal = Journal::open(files, "", Position::default(), Options::default())?.journal;
    let mut out = BufWriter::with_capacity(1 << 20, io::stdout().lock());
    for batch in journal.reader(journal.start(), journal.durable_end()) {
        for entry in batch?.entries {
            if let Entry::Record { head, payload, .. } = entry? {
                print(&mut out, &head.finish(payload)?).context("write to standard output")?;
            }
        }
    }
    out.flush().context("write to standard output")
}

fn print_shard(dir: PathBuf, shard: u16, up_to: LogIndex) -> anyhow::Result<()> {
    let opened = Store::open(Files::new(dir), Options::default(), Limits::default(), u64::MAX)?;
    let (store, _) = opened.context("there is no store in this directory")?;
    let mut out = BufWriter::new(io::stdout().lock());
    for entry in store.log().entries(shard, LogIndex(0), up_to)? {
        let entry = entry?;
        let Some(data) = entry.data else { continue };
        let hex: String = data.data().iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(out, "{} {} {hex}", entry.end, entry.stamp.0)?;
    }
    Ok(out.flush()?)
}

fn print(out: &mut impl Write, record: &Record) -> io::Result<()> {
    let data: &[u8] = match &record.body.effect {
        Effect::Write(payload) => payload.data(),
        Effect::Zero { .. } => &[],
        Effect::CopyDone | Effect::Idle => return Ok(()),
    };
    out.write_all(&record.epoch.0.to_le_bytes())?;
    out.write_all(&record.seq.0.to_le_bytes())?;
    out.write_all(&record.body.offset.to_le_bytes())?;
    out.write_all(&record.body.len_bytes().to_le_bytes())?;
    out.write_all(&(data.len() as u32).to_le_bytes())?;
    out.write_all(&record.writer.0.to_le_bytes())?;
    out.write_all(&record.body.disk.0.to_le_bytes())?;
    out.write_all(&u32::from(record.body.copy).to_le_bytes())?;
    out.write_all(data)
}
