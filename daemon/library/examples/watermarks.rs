//! Watermarks of a store, as a backup server tells them: `watermarks BACKUP HOST STORE SHARDS [CA CERTIFICATE KEY NAME]` connects as
//! a host that leads no shard, and writes a line for each: wall clock in nanoseconds when it was heard, and the watermark. SHARDS
//! is a number, for s0, s1 and so on, or the names with commas. Connects again when the connection has ended.
#![allow(missing_docs)]

use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tidelock_dial::{Security, Stream};
use tidelock_protocol::ids::MonoNanos;
use tidelock_shard::host::{Heard, HostEnd};
use tidelock_tls::{Files, server_name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

/// Lines are kept for so long while nothing comes.
const QUIET: Duration = Duration::from_millis(50);
/// The pause before it connects again.
const RETRY: Duration = Duration::from_millis(5);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [address, host, store, shards, tls @ ..] = &words[..] else {
        return Err("watermarks BACKUP HOST STORE SHARDS [CA CERTIFICATE KEY NAME]".into());
    };
    let shards: Vec<_> = match shards.parse::<u16>() {
        Ok(count) => (0..count).map(|nth| format!("s{nth}")).collect(),
        Err(_) => shards.split(',').map(str::to_owned).collect(),
    };
    let security = match tls {
        [ca, certificate, key, name] => {
            let [ca, certificate, key] = [ca, certificate, key].map(PathBuf::from);
            Security::Tls { files: Files { ca, certificate, key }, server_name: server_name(name)? }
        }
        _ => Security::Plaintext,
    };
    let begun = Instant::now();
    let now = || MonoNanos(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let link = || HostEnd::new(host, "watermarks", store, &shards, now());
    loop {
        match tidelock_dial::connect(address, &security, 1 << 18).await {
            Ok(stream) => {
                hear(stream, link(), now).await.unwrap_or_else(|error| eprintln!("{error}"))
            }
            Err(error) => eprintln!("{error}"),
        }
        sleep(RETRY).await;
    }
}

async fn hear(
    mut stream: Box<dyn Stream>,
    mut link: HostEnd,
    now: impl Fn() -> MonoNanos,
) -> Result<(), Box<dyn Error>> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        link.tick(now())?;
        if !link.output().is_empty() {
            stream.write_all(&link.output().split()).await?;
            stream.flush().await?;
        }
        let Ok(read) = timeout(QUIET, stream.read_buf(link.input())).await else {
            out.flush()?;
            continue;
        };
        if read? == 0 {
            return Err("the backup server has closed the connection".into());
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let mut heard = Vec::new();
        link.received(now(), &mut heard)?;
        for heard in heard {
            if let Heard::Progress { watermark, .. } = heard {
                writeln!(out, "{wall} {}", watermark.0)?;
            }
        }
    }
}
