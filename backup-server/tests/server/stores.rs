//! Stores: a primary host that is played by the test ships entries of shards' logs.

use super::common::{HANG, Process, cli, cli_json, config, refused};
use bytes::BytesMut;
use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::RefusalKind;
use tidelock_protocol::record::Payload;
use tidelock_shard::link::{self, Origin, StoreFrame, StoreMessage};
use tidelock_shard::{Backup, Entry, LogIndex, Reply, Verdict, stamp_at};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STORE: &str = "[[store]]\nname = \"orders\"\nhosts = [\"host-a\", \"host-b\"]\n";

struct Host {
    stream: TcpStream,
    input: BytesMut,
}

impl Host {
    async fn hello(address: SocketAddr, host: &str, store: &str, shards: &[&str]) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        let mut this = Self { stream, input: BytesMut::new() };
        let hello = StoreMessage::Hello {
            oldest: 1,
            newest: 1,
            host: host.to_owned(),
            software: "test".to_owned(),
            store: store.to_owned(),
            shards: shards.iter().map(|name| (*name).to_owned()).collect(),
        };
        this.send(0, &hello).await;
        this
    }

    /// A host that ships all shards.
    async fn connected(address: SocketAddr, shards: &[&str]) -> Self {
        let mut host = Self::hello(address, "host-a", "orders", shards).await;
        assert!(matches!(host.next().await, Some((_, StoreMessage::Welcome { .. }))));
        for shard in 0..shards.len() as u16 {
            host.send(shard, &StoreMessage::Origin(Origin::default())).await;
        }
        host
    }

    async fn send(&mut self, shard: u16, message: &StoreMessage) {
        let mut bytes = BytesMut::new();
        frame::encode_control(Channel(shard), message, &mut bytes);
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn ship(&mut self, shard: u16, after: u64, entries: Vec<Entry>) {
        let backup = Backup { attempt: 1, after: LogIndex(after), entries };
        let mut bytes = BytesMut::new();
        link::encode(shard, &backup, &mut bytes).unwrap();
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn next(&mut self) -> Option<(u16, StoreMessage)> {
        let next = async {
            loop {
                let frame: Option<StoreFrame> = frame::decode_of(&mut self.input).unwrap();
                match frame {
                    Some(Frame::Control(Channel(shard), message)) => return Some((shard, message)),
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
                match self.stream.read_buf(&mut self.input).await {
                    Ok(1..) => {}
                    Ok(0) | Err(_) => return None,
                }
            }
        };
        tokio::time::timeout(HANG, next).await.expect("an answer")
    }

    /// Waits for a message that is one of these.
    async fn until<T>(&mut self, mut wanted: impl FnMut(u16, StoreMessage) -> Option<T>) -> T {
        loop {
            let (shard, message) = self.next().await.expect("the connection stays");
            if let Some(found) = wanted(shard, message) {
                return found;
            }
        }
    }

    /// Waits until the backup has committed a shard's log up to there.
    async fn durable(&mut self, shard: u16, end: u64) {
        self.until(|of, message| match message {
            StoreMessage::Reply(reply) if of == shard => {
                let commit = reply.verdict.standing()?.commit.index;
                (commit >= LogIndex(end)).then_some(())
            }
            _ => None,
        })
        .await;
    }

    async fn watermark(&mut self, at: Hlc) {
        self.until(|_, message| match message {
            StoreMessage::Progress { watermark, .. } => (watermark == at).then_some(()),
            _ => None,
        })
        .await;
    }

    async fn verdict(&mut self, shard: u16) -> Verdict {
        self.send(shard, &StoreMessage::Ask { attempt: 9 }).await;
        self.until(|of, message| match message {
            StoreMessage::Reply(Reply { attempt: 9, verdict }) if of == shard => Some(verdict),
            _ => None,
        })
        .await
    }

    async fn refusal(&mut self) -> (RefusalKind, String) {
        self.until(|_, message| match message {
            StoreMessage::Refused { kind, reason } => Some((kind, reason)),
            _ => None,
        })
        .await
    }
}

/// A stamp so many milliseconds after a moment ago.
fn stamp(ms: u64) -> Hlc {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    stamp_at((now / 100 * 100 * 1000 + ms) * 1_000_000)
}

fn entry(end: u64, stamp: Hlc) -> Entry {
    Entry::update(LogIndex(end), stamp, Payload::new(vec![end as u8; 100].into()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_keeps_what_it_acknowledged_and_is_recovered_at_its_watermark() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), STORE);
    let server = Process::start(&config);
    let mut host = Host::connected(server.address, &["s0", "s1"]).await;
    let [first, second, third] = [stamp(1), stamp(2), stamp(3)];
    host.ship(0, 0, vec![entry(100, first), entry(200, third)]).await;
    host.ship(1, 0, vec![entry(100, second)]).await;
    host.durable(0, 200).await;
    host.watermark(second).await;
    let status = cli_json(&config, &["status", "--json"]);
    assert_eq!(status["stores"][0]["held_back_by"], "s1");
    assert_eq!(status["stores"][0]["shards"][0]["apply_to"], 100);
    let text = cli(&config, &["status"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("held back by s1"), "{text:?}");
    server.kill();
    let server = Process::start(&config);
    let mut host = Host::connected(server.address, &["s0", "s1"]).await;
    let Verdict::Asked(standing) = host.verdict(0).await else { panic!("it is asked") };
    assert_eq!(standing.commit.index, LogIndex(200));
    let why = refused(&config, &["recover", "orders"]);
    assert!(why.contains("host-a") && why.contains("--primary-is-dead"), "{why}");
    let dry = cli_json(&config, &["recover", "orders", "--dry-run", "--json"]);
    assert!(dry["store"]["recovered"].is_null(), "{dry}");
    let recovered = cli_json(&config, &["recover", "orders", "--primary-is-dead", "--json"]);
    assert_eq!(recovered["store"]["recovered"], second.0);
    assert_eq!(recovered["store"]["shards"][0]["apply_to"], 100);
    host.ship(0, 200, vec![entry(300, third)]).await;
    host.until(|shard, message| match message {
        StoreMessage::Reply(Reply { verdict: Verdict::Fenced, .. }) => (shard == 0).then_some(()),
        _ => None,
    })
    .await;
    server.terminate();
    let again = cli_json(&config, &["recover", "orders", "--primary-is-dead", "--json"]);
    assert_eq!(again["store"]["recovered"], second.0, "once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_ships_only_to_its_stores_and_only_what_can_be_true() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), STORE);
    let server = Process::start(&config);
    let refusal = async |host: &str, store: &str, shards: &[&str]| {
        Host::hello(server.address, host, store, shards).await.refusal().await
    };
    let (kind, reason) = refusal("host-a", "parts", &["s0"]).await;
    assert!(kind == RefusalKind::Forbidden && reason.contains("[[store]]"), "{reason}");
    let (kind, reason) = refusal("host-c", "orders", &["s0"]).await;
    assert!(kind == RefusalKind::Forbidden && reason.contains("hosts"), "{reason}");
    let mut host = Host::connected(server.address, &["s0"]).await;
    let far = Hlc(stamp(0).0 + (1 << 50));
    host.ship(0, 0, vec![entry(100, far)]).await;
    assert_eq!(host.refusal().await.0, RefusalKind::Implausible);
    assert_eq!(host.next().await, None);
    assert_eq!(refusal("host-b", "orders", &["s1"]).await.0, RefusalKind::Mismatch);
    // A beat comes back, and the store is as it was.
    let mut host = Host::connected(server.address, &["s0"]).await;
    host.send(0, &StoreMessage::Beat { sent_at: MonoNanos(5) }).await;
    let beaten = StoreMessage::Beaten { sent_at: MonoNanos(5) };
    host.until(|_, message| (message == beaten).then_some(())).await;
    host.ship(0, 0, vec![entry(100, stamp(0))]).await;
    host.durable(0, 100).await;
    server.terminate();
    assert_eq!(host.refusal().await.0, RefusalKind::Stopping);
}
