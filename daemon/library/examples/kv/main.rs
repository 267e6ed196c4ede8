//! A tiny sharded key-value store whose shards are shipped to a backup server: `store.rs` is the store, `shipped.rs` the change.
//!
//! `kv DIRECTORY BACKUP HOST STORE SHARDS LED [CA CERTIFICATE KEY NAME]`: the shards s0 to s(SHARDS-1), of which this host leads LED
//! (`FROM-TO`), and the backup server with its TLS, if any. Lines of the standard input are commands, and each is answered by a line.
//!
//! | command | meaning |
//! |---|---|
//! | `put SHARD KEY VALUE` | writes; answered when a client may know of it |
//! | `get SHARD KEY` | reads |
//! | `clock good`, `clock bad` | the verdict on the clock from now on |
//! | `compact SHARD` | trims the log as far as it may be; answered with its head and its end |
//! | `resign SHARD` | leads the shard no more |
//! | `status` | state of the shipping |
//! | `load together SECONDS EVERY_US FILE` | one entry of each shard every so often, with one stamp |
//! | `load apart SECONDS EVERY_US FILE` | the same of each shard, each at a time of its own |
//!
//! A load writes its entries into FILE: wall clock in nanoseconds when it was committed, and effective stamp.
#![allow(missing_docs)]

mod shipped;
mod store;

use serde_json::{Value, json};
use shipped::Shipped;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs, io, thread};
use tidelock_clock::{Verdict, Why};
use tidelock_shard_library::{Backup, LogPoint, Names, Pace, Security, Shipping, StampClock};
use tidelock_tls::{Files, server_name};

const EPSILON_NS: u64 = 100_000;

type Failure = Box<dyn Error>;

struct Store {
    shards: BTreeMap<u16, Shipped>,
    shipping: Shipping,
    clock: StampClock,
    is_good: Arc<AtomicBool>,
}

fn wall_ns() -> i64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX)
}

fn security(words: &[String]) -> Result<Security, Failure> {
    let [ca, certificate, key, name] = words else { return Ok(Security::Plaintext) };
    let [ca, certificate, key] = [ca, certificate, key].map(PathBuf::from);
    Ok(Security::Tls { files: Files { ca, certificate, key }, server_name: server_name(name)? })
}

fn main() -> Result<(), Failure> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [directory, address, host, store, shards, led, tls @ ..] = &words[..] else {
        return Err("kv DIRECTORY BACKUP HOST STORE SHARDS LED [CA CERTIFICATE KEY NAME]".into());
    };
    let (first, last) = led.split_once('-').ok_or("LED is FROM-TO")?;
    let names = Names {
        host: host.clone(),
        software: "kv".to_owned(),
        store: store.clone(),
        shards: (0..shards.parse::<u16>()?).map(|nth| format!("s{nth}")).collect(),
    };
    let backup = Backup { address: address.clone(), security: security(tls)? };
    let shipping = Shipping::start(names, backup, Pace::default())?;
    let is_good = Arc::new(AtomicBool::new(true));
    let of = Arc::clone(&is_good);
    let verdict = move || match of.load(Ordering::SeqCst) {
        true => Verdict::Believed { epsilon_ns: EPSILON_NS },
        false => Verdict::NotBelieved { why: Why::NotLocked },
    };
    let clock = StampClock::judged(move || (wall_ns(), verdict()), EPSILON_NS);
    let is_durable = env::var_os("KV_IN_MEMORY").is_none();
    let open = |number: u16| {
        let dir = Path::new(directory).join(format!("s{number}"));
        Ok((number, Shipped::open(&dir, is_durable, clock.clone(), &shipping, number)?))
    };
    let shards = (first.parse()?..=last.parse()?).map(open).collect::<io::Result<_>>()?;
    let mut store = Store { shards, shipping, clock, is_good };
    println!("{}", json!({ "ready": store.shards.len() }));
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = store.obey(&line.split_whitespace().collect::<Vec<_>>());
        let answer = answer.unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(io::stdout().lock(), "{answer}")?;
    }
    Ok(())
}

impl Store {
    fn shard(&self, number: &str) -> Result<&Shipped, Failure> {
        self.shards.get(&number.parse()?).ok_or_else(|| "not led here".into())
    }

    fn obey(&mut self, words: &[&str]) -> Result<Value, Failure> {
        Ok(match words {
            ["put", shard, key, value] => {
                self.shard(shard)?.put(key.as_bytes(), value.as_bytes())?;
                json!({ "put": key })
            }
            ["get", shard, key] => {
                let value = self.shard(shard)?.get(key.as_bytes())?;
                json!({ "value": value.map(|value| String::from_utf8_lossy(&value).into_owned()) })
            }
            ["clock", verdict] => {
                self.is_good.store(*verdict == "good", Ordering::SeqCst);
                json!({ "clock": verdict })
            }
            ["compact", shard] => {
                let (head, end) = self.shard(shard)?.compact()?;
                json!({ "head": head, "end": end })
            }
            ["resign", shard] => {
                let led = self.shards.remove(&shard.parse()?).ok_or("not led here")?;
                led.resign();
                json!({ "resigned": shard })
            }
            ["status"] => serde_json::to_value(self.shipping.status())?,
            ["load", how, seconds, every_us, file] => {
                let spans = (seconds.parse()?, Duration::from_micros(every_us.parse()?));
                let made = self.load(*how == "together", spans)?;
                let mut text = String::new();
                made.iter()
                    .for_each(|(at, of)| writeln!(text, "{at} {}", of.stamp.0).expect("a string"));
                fs::write(file, text)?;
                json!({ "loaded": made.len() })
            }
            _ => return Err("no such command".into()),
        })
    }

    fn load(
        &self,
        is_together: bool,
        (seconds, every): (f64, Duration),
    ) -> Result<Vec<(i64, LogPoint)>, Failure> {
        let mut made = Vec::new();
        let value = [b'x'; 100];
        let (begun, count) = (Instant::now(), self.shards.len() as u32);
        let rounds = (seconds / every.as_secs_f64()) as u32;
        let gap = if is_together { Duration::ZERO } else { every / count };
        for round in 0..rounds {
            let mut stamp = None;
            for (nth, shard) in (0..).zip(self.shards.values()) {
                let due = every * round + gap * nth;
                if let Some(rest) =
                    due.checked_sub(begun.elapsed()).filter(|_| stamp.is_none() || !is_together)
                {
                    thread::sleep(rest);
                }
                let stamp = match stamp.filter(|_| is_together) {
                    Some(stamp) => stamp,
                    None => *stamp.insert(self.clock.begin()?),
                };
                let at = shard.begin_put(stamp, b"key", &value)?;
                made.push((wall_ns(), at));
            }
        }
        Ok(made)
    }
}
