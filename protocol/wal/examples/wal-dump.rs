//! Prints what the reader finds in segment files, an item a line, as JSON; at last the fault at which it ended.
//!
//! `wal-dump PIECE_BYTES[,PIECE_BYTES...] SEGMENT_FILE... [HISTORY_FILE]`: files that follow each other, of the names
//! that PostgreSQL gave them. They are read in pieces of these lengths, over and over.

use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufWriter, Read, Write, stdout};
use std::path::Path;
use std::{env, fs};
use tidelock_wal::{Ending, Kind, Lsn, TimelineHistory, TimelineId, WalItem, WalReader};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let (pieces, mut files) = words.split_first().ok_or("which lengths of pieces?")?;
    let pieces: Vec<usize> = pieces.split(',').map(str::parse).collect::<Result<_, _>>()?;
    if pieces.contains(&0) {
        return Err("pieces have at least one byte".into());
    }
    let mut history = None;
    if let Some((last, others)) = files.split_last()
        && let Some(id) =
            Path::new(last).file_name().and_then(|name| name.to_str()?.strip_suffix(".history"))
    {
        let id = TimelineId(u32::from_str_radix(id, 16)?);
        history = Some(TimelineHistory::parse(id, &fs::read(last)?)?);
        files = others;
    }
    let first = files.first().ok_or("which segment files?")?;
    let segment_bytes = u32::try_from(fs::metadata(first)?.len())?;
    let (timeline, start) =
        place(first, segment_bytes).ok_or("this is no name of a segment file")?;
    let history = history.unwrap_or_else(|| TimelineHistory::only(timeline));
    let mut reader = WalReader::new(start, segment_bytes, history)?;
    let mut lengths = pieces.iter().cycle();
    let mut out = BufWriter::new(stdout().lock());
    for file in files {
        let mut file = fs::File::open(file)?;
        loop {
            let mut piece = vec![];
            let length = lengths.next().copied().unwrap_or(1);
            Read::by_ref(&mut file).take(length as u64).read_to_end(&mut piece)?;
            if piece.is_empty() {
                break;
            }
            reader.push(&piece);
            for item in &mut reader {
                match item {
                    Ok(item) => writeln!(out, "{}", line(&item))?,
                    Err(error) => {
                        let (lsn, kind) = (error.lsn.to_string(), error.fault.kind());
                        writeln!(
                            out,
                            "{}",
                            json!({"lsn": lsn, "fault": kind, "text": error.to_string()})
                        )?;
                        return Ok(out.flush()?);
                    }
                }
            }
        }
    }
    Ok(out.flush()?)
}

/// Timeline and begin of a segment, by its file's name.
fn place(file: &str, segment_bytes: u32) -> Option<(TimelineId, Lsn)> {
    let name = Path::new(file).file_name()?.to_str()?;
    let number = |digits: std::ops::Range<usize>| u32::from_str_radix(name.get(digits)?, 16).ok();
    let (timeline, upper, segment) = (number(0..8)?, number(8..16)?, number(16..24)?);
    let lower = u64::from(segment) * u64::from(segment_bytes);
    (name.len() == 24).then_some((TimelineId(timeline), Lsn((u64::from(upper) << 32) + lower)))
}

fn line(item: &WalItem) -> Value {
    let mut line = json!({
        "begin": item.begin.to_string(),
        "end": item.end.to_string(),
        "xid": item.xid.0,
    });
    line["kind"] = match &item.kind {
        Kind::Other => "OTHER",
        Kind::Rest => "REST",
        Kind::Switch => "SWITCH",
        Kind::GivenUp => "GIVEN_UP",
        Kind::Overwrites { .. } => "OVERWRITES",
        Kind::EndOfRecovery(_) => "END_OF_RECOVERY",
        Kind::ShutdownCheckpoint(_) => "SHUTDOWN_CHECKPOINT",
        Kind::Message { .. } => "MESSAGE",
        Kind::Transaction(transaction) => match transaction.ending {
            Ending::Commit => "COMMIT",
            Ending::Abort => "ABORT",
            Ending::Prepare => "PREPARE",
            Ending::CommitPrepared => "COMMIT_PREPARED",
            Ending::AbortPrepared => "ABORT_PREPARED",
        },
        _ => "UNKNOWN",
    }
    .into();
    match &item.kind {
        Kind::Overwrites { given_up } => line["given_up"] = given_up.to_string().into(),
        Kind::EndOfRecovery(change) | Kind::ShutdownCheckpoint(change) => {
            line["timelines"] = json!([change.before.0, change.timeline.0]);
        }
        Kind::Transaction(transaction) => {
            line["stamp"] = transaction.stamp.0.into();
            line["unix_ns"] = transaction.stamp.unix_ns().into();
            if let Some(two_phase) = &transaction.two_phase {
                line["prepared_xid"] = two_phase.xid.0.into();
                line["gid"] = two_phase.gid.as_ref().map(ToString::to_string).into();
            }
        }
        _ => {}
    }
    line
}
