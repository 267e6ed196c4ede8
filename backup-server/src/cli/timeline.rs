//! `tidelock-backup timeline`: the window, how much was written when, and the marks in between.

use super::args::Timeline;
use super::client::Client;
use super::{damaged, marks};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::travel::{DamagedSpan, MarkStatus, Span};
use anyhow::{Result, bail};
use serde_json::json;
use std::fmt::Write;
use tidelock_replica::text;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;

/// Characters of the longest bar.
const BAR: u64 = 30;

pub(super) async fn run(config: Config, args: Timeline) -> Result<()> {
    let client = Client::connect(config).await?;
    let request = Request::Timeline {
        group: args.group.clone(),
        from: args.from.clone().unwrap_or(When::Oldest),
        to: args.to.clone().unwrap_or(When::Latest),
        buckets: args.buckets as usize,
    };
    let reply = client.ask(&request).await;
    client.end().await;
    let Reply::Timeline { oldest, newest, from, to, spans, compressed, damaged, marks } = reply?
    else {
        bail!("the server answered something else");
    };
    if args.json {
        let all = json!({
            "group": args.group, "oldest": oldest, "newest": newest, "from": from, "to": to, "spans": spans,
            "compressed": compressed, "damaged": damaged, "marks": marks,
        });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    print!("{}", render(&args.group, &[&oldest, &newest], &spans, marks));
    if compressed.segments > 0 {
        let (bytes, stored) = (text::bytes(compressed.bytes), text::bytes(compressed.stored_bytes));
        println!("  compressed: {} segments, {bytes} take {stored}", compressed.segments);
    }
    for span in &damaged {
        println!("  DAMAGED {}", damaged_span(span));
    }
    if !damaged.is_empty() {
        println!("  see `tidelock-backup damaged {}`", args.group);
    }
    Ok(())
}

fn render(
    group: &str,
    window: &[&Moment; 2],
    spans: &[Span],
    mut marks: Vec<MarkStatus>,
) -> String {
    let [oldest, newest] = window;
    let mut out = format!("group {group}\n  oldest  {oldest}\n  newest  {newest}\n");
    marks.sort_by_key(|mark| mark.at.hlc_raw);
    let most = spans.iter().map(|span| span.bytes).max().unwrap_or(0);
    let mut marks = marks.into_iter().peekable();
    // A string takes everything.
    for (nth, span) in spans.iter().enumerate() {
        let is_last = nth + 1 == spans.len();
        let amount = match span.records {
            0 => String::new(),
            n => format!("{:>10}  {n} records", text::bytes(span.bytes)),
        };
        let flushes = match &span.last_flush {
            None => String::new(),
            Some(last) if span.flushes == 1 => {
                format!(", 1 flush, after {}={}", last.member, last.seq)
            }
            Some(last) => {
                format!(", {} flushes, the last after {}={}", span.flushes, last.member, last.seq)
            }
        };
        let line = format!(
            "  {}  {}{amount}{flushes}",
            text::utc_ms(span.from_unix_ms),
            bar(span.bytes, most)
        );
        let _ = writeln!(out, "{}", line.trim_end());
        while let Some(mark) = marks.next_if(|mark| is_last || mark.at.unix_ms < span.to_unix_ms) {
            let _ = writeln!(out, "    * {}", marks::line(&mark));
        }
    }
    out
}

fn damaged_span(span: &DamagedSpan) -> String {
    let had = span.segment.map_or("disk image".to_owned(), |segment| format!("segment {segment}"));
    damaged::span(Some(span.from), span.until, span.is_untold) + &format!(" ({had})")
}

/// In eighths of a character; what is not nothing is seen.
fn bar(bytes: u64, most: u64) -> String {
    const PARTS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = match most {
        0 => 0,
        _ => (u128::from(bytes) * u128::from(BAR * 8)).div_ceil(u128::from(most)) as usize,
    };
    let mut bar = "█".repeat(eighths / 8);
    bar.push(PARTS[eighths % 8]);
    let width = BAR as usize + 1;
    format!("{bar:<width$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::Epoch;
    use tidelock_store::journal::MarkKind;

    fn moment(ms: u64) -> Moment {
        let hlc_raw = Hlc::new(ms, 0);
        let (time, hlc) = (text::utc_ms(ms), hlc_raw.to_string());
        Moment { time, unix_ms: ms, hlc, hlc_raw, epoch: Epoch(1), seqs: BTreeMap::new() }
    }

    #[test]
    fn bars_are_as_long_as_what_was_written() {
        assert_eq!(bar(0, 0).trim_end(), "");
        assert_eq!(bar(1, 1 << 40).trim_end(), "▏", "the least is seen");
        assert_eq!(bar(50, 100).chars().filter(|c| *c == '█').count(), 15);
        assert!([0, 1, 50, 100].into_iter().all(|n| bar(n, 100).chars().count() == 31));
    }

    #[test]
    fn each_mark_is_shown_once_and_where_it_is() {
        let span = |from: u64, bytes| Span {
            from_unix_ms: from,
            to_unix_ms: from + 10,
            records: bytes,
            bytes,
            disks: BTreeMap::new(),
            flushes: 0,
            last_flush: None,
        };
        let mark = |name: &str, ms| MarkStatus {
            host: None,
            name: name.into(),
            kind: MarkKind::Bookmark,
            at: moment(ms),
            set_at_unix_ms: 0,
            expires_at_unix_ms: None,
            lost: false,
        };
        let marks = vec![mark("late", 25), mark("early", 5), mark("last", 30)];
        let spans = [span(0, 1), span(10, 0), span(20, 4)];
        let text = render("shop", &[&moment(0), &moment(30)], &spans, marks);
        let lines: Vec<_> = text.lines().skip(3).collect();
        let place = |name: &str| lines.iter().position(|line| line.contains(name)).unwrap();
        assert_eq!(
            (place("early"), place("late"), place("last"), lines.len()),
            (1, 4, 5, 6),
            "{text}"
        );
    }
}
