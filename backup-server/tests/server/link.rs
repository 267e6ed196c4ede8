//! The link of a running server: TLS, identities, versions, and everything malformed.

use crate::common::{CHANNEL, Host, attach, but, copy_done, encode, record, stream};
use bytes::{BufMut, BytesMut};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};
use tidelock_backup_server::server::config::Config;
use tidelock_backup_server::server::{Role, Server};
use tidelock_protocol::frame;
use tidelock_protocol::ids::{Channel, Epoch, MonoNanos, Seq};
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, CopyState, LastRun, Message, PROTOCOL, RefusalKind};
use tidelock_protocol::part::{self, PartialRecord};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_tls::Files;
use tidelock_tls::pki::Authority;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const YEAR: Duration = Duration::from_secs(365 * 86_400);

fn write_private(path: &Path, text: &str) {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::File::options();
    let mut file = file.create(true).write(true).truncate(true).mode(0o600).open(path).unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
}

/// An authority with a certificate for the backup and one for host-a.
fn pki(dir: &Path) -> (Files, Files) {
    std::fs::create_dir_all(dir).unwrap();
    let now = SystemTime::now();
    let root = Authority::create("test", now, YEAR).unwrap();
    write_private(&dir.join("ca.pem"), &root.certificate_pem);
    let authority = Authority::from_pem(&root.certificate_pem, &root.key_pem).unwrap();
    let files = |role, name: &str| {
        let issued = authority.issue(role, &[name.to_owned()], now, YEAR).unwrap();
        let files = Files {
            ca: dir.join("ca.pem"),
            certificate: dir.join(format!("{name}.pem")),
            key: dir.join(format!("{name}.key")),
        };
        write_private(&files.certificate, &issued.certificate_pem);
        write_private(&files.key, &issued.key_pem);
        files
    };
    (files(tidelock_tls::Role::Backup, "backup"), files(tidelock_tls::Role::Host, "host-a"))
}

async fn server(dir: &Path, security: &str) -> (Server, SocketAddr) {
    let text = format!(
        "{security}\n[server]\nname = \"backup\"\nlisten = \"127.0.0.1:0\"\ndata_dir = \"{}\"\n",
        dir.join("data").display()
    );
    let text = if security.starts_with("[tls]") {
        let (tls, server) = text.split_once("\n[server]").unwrap();
        format!("[server]{server}{tls}\n")
    } else {
        text
    };
    let config = Config::parse("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
    let server = Server::start(config, Role::Serve).await.unwrap();
    let address = server.address().unwrap();
    (server, address)
}

fn tls_section(files: &Files) -> String {
    format!(
        "[tls]\nca = \"{}\"\ncertificate = \"{}\"\nkey = \"{}\"",
        files.ca.display(),
        files.certificate.display(),
        files.key.display()
    )
}

async fn connect(address: SocketAddr, files: &Files) -> std::io::Result<TlsStream<TcpStream>> {
    let config = files.load().unwrap().host_config(SystemTime::now()).unwrap();
    let name = tidelock_tls::server_name("backup").unwrap();
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(config).connect(name, stream).await
}

fn kind(message: &Option<Message>) -> Option<RefusalKind> {
    match message {
        Some(Message::Refused { kind, .. }) => Some(*kind),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_decide_who_may_say_what() {
    let dir = tempfile::tempdir().unwrap();
    let (backup, host_a) = pki(&dir.path().join("pki"));
    let (_, stranger) = pki(&dir.path().join("other-pki"));
    let (server, address) = server(dir.path(), &tls_section(&backup)).await;

    let mut good = Host::new(connect(address, &host_a).await.unwrap());
    good.hello("host-a").await;
    let attached = good.attach(attach(1, LastRun::Unknown)).await.unwrap();
    assert_eq!((stream(&attached).copy, attached.epoch), (CopyState::Empty, Epoch(1)));
    good.record(&copy_done(1)).await.unwrap();
    assert_eq!(good.durable(1).await, 1);

    let mut liar = Host::new(connect(address, &host_a).await.unwrap());
    let hello =
        Message::Hello { oldest: 1, newest: 1, host: "host-b".into(), software: "x".into() };
    liar.send(Channel(0), &hello).await;
    assert_eq!(kind(&liar.refused().await), Some(RefusalKind::Forbidden));

    // Of another authority, which does not trust this backup either.
    assert!(connect(address, &stranger).await.is_err());
    let mut plain = Host::plain(address).await;
    plain.stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    assert!(!matches!(plain.next_raw().await, Some(b'T')), "no frame for a plaintext peer");

    // The good one was not disturbed by any of them.
    good.record(&record(2)).await.unwrap();
    assert_eq!(good.durable(2).await, 2);
    server.stop().await;
    assert_eq!(kind(&good.refused().await), Some(RefusalKind::Stopping));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_frames_end_their_connection_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (backup, host_a) = pki(&dir.path().join("pki"));
    let (server, address) = server(dir.path(), &tls_section(&backup)).await;
    let mut bystander = Host::new(connect(address, &host_a).await.unwrap());
    bystander.hello("host-a").await;
    let other = Attach { group: "other".into(), ..attach(1, LastRun::Unknown) };
    bystander.attach(other).await.unwrap();
    bystander.record(&copy_done(1)).await.unwrap();
    bystander.durable(1).await;

    let damaged = |at: usize| {
        let mut bytes = BytesMut::new();
        encode(&record(3), &mut bytes);
        bytes[at] ^= 1;
        bytes
    };
    let control = |channel: u16, message: &Message| {
        let mut bytes = BytesMut::new();
        frame::encode_control(Channel(channel), message, &mut bytes);
        bytes
    };
    let sequence = |seq: u64| {
        let mut bytes = BytesMut::new();
        encode(&record(seq), &mut bytes);
        bytes
    };
    let check = |offset: u64, len_bytes: u32| Message::DigestCheck {
        disk: record(1).body.disk,
        offset,
        len_bytes,
        digest: [0; 32],
    };
    let huge = {
        let mut bytes = BytesMut::from(&b"TLK1\x01\x02\x01\x00"[..]);
        bytes.put_u32_le(u32::MAX);
        bytes.put_u32_le(0);
        bytes
    };
    let cases: Vec<(&str, BytesMut)> = vec![
        ("frame header", damaged(5)),
        ("record header", damaged(16 + 9)),
        ("payload", damaged(16 + 56 + 3)),
        ("another protocol", BytesMut::from(&b"SSH-2.0"[..])),
        ("a frame of 4 GiB", huge),
        ("a gap", sequence(7)),
        ("an unattached channel", control(9, &Message::Detach { end: None })),
        ("a message of the backup", control(1, &Message::Stalled { reason: None })),
        ("a second hello", control(0, &Message::Detach { end: None })),
        ("a digest check of nothing", control(1, &check(0, 0))),
        ("a digest check outside", control(1, &check(u64::MAX, 4096))),
        (
            "attach on channel 0",
            control(0, &Message::Attach(Box::new(attach(9, LastRun::Unknown)))),
        ),
    ];
    let mut durable = 0;
    for (name, bytes) in cases {
        let mut host = Host::new(connect(address, &host_a).await.unwrap());
        host.hello("host-a").await;
        let run = LastRun::Continues { from: Seq(durable + 1) };
        let attached = host.attach(attach(10, run)).await.unwrap();
        assert_eq!(attached.progress.durable.0, durable, "{name}");
        if durable == 0 {
            host.record(&copy_done(1)).await.unwrap();
            host.record(&record(2)).await.unwrap();
            durable = 2;
            host.durable(durable).await;
        }
        host.stream.write_all(&bytes).await.unwrap();
        let refused = loop {
            match host.next().await {
                Some((_, message @ Message::Refused { .. })) => break Some(message),
                Some(_) => {}
                None => break None,
            }
        };
        assert!(kind(&refused).is_some(), "{name}: no reason was given");
    }
    bystander.record(&record(2)).await.unwrap();
    assert_eq!(bystander.durable(2).await, 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_and_first_messages_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let (server, address) = server(dir.path(), "plaintext = true").await;
    let hello = |oldest, newest, host: &str| Message::Hello {
        oldest,
        newest,
        host: host.into(),
        software: "x".into(),
    };
    let cases = [
        (hello(PROTOCOL.1 + 1, PROTOCOL.1 + 9, "a"), RefusalKind::Version),
        (hello(0, 0, "a"), RefusalKind::Version),
        (hello(1, 1, "../a"), RefusalKind::Invalid),
        (Message::Detach { end: None }, RefusalKind::Invalid),
        (Message::Attach(Box::new(attach(1, LastRun::Unknown))), RefusalKind::Invalid),
    ];
    for (message, expected) in cases {
        let mut host = Host::plain(address).await;
        host.send(Channel(0), &message).await;
        assert_eq!(kind(&host.refused().await), Some(expected), "{message:?}");
    }
    assert!(!dir.path().join("data/groups/shop").exists(), "nothing was made of it");
    server.stop().await;
}

/// A run that goes on with what the one before it has left on disk.
fn next_run(incarnation: u64, goes_on: LastRun) -> Attach {
    let before = attach(incarnation - 1, goes_on).writing().unwrap().before;
    but(attach(incarnation, goes_on), |of| of.before = before)
}

#[tokio::test(flavor = "multi_thread")]
async fn beacons_are_answered_and_a_new_run_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let (server, address) = server(dir.path(), "plaintext = true").await;
    let (mut old, _) = Host::attached(address, 1, LastRun::Unknown).await;
    old.record(&copy_done(1)).await.unwrap();
    old.durable(1).await;
    old.send(CHANNEL, &Message::Beacon { sent_at: MonoNanos(77) }).await;
    assert_eq!(old.next().await, Some((CHANNEL, Message::Lease { sent_at: MonoNanos(77) })));
    let mut new = Host::plain(address).await;
    new.hello("host-a").await;
    let goes_on = LastRun::Continues { from: Seq(2) };
    let attached = new.attach(next_run(2, goes_on)).await.unwrap();
    assert_eq!(stream(&attached).copy, CopyState::Whole);
    let told = loop {
        match old.next().await {
            // A flush of the journal during the attachment sends the committed vector.
            Some((_, Message::Progress(_))) => {}
            told => break told.map(|(_, message)| message),
        }
    };
    assert_eq!(kind(&told), Some(RefusalKind::Superseded));
    old.send(CHANNEL, &Message::Beacon { sent_at: MonoNanos(78) }).await;
    new.record(&record(2)).await.unwrap();
    assert_eq!(new.durable(2).await, 2, "and no lease for the old one in between");
    // Many frames in one write, of two channels, in any pieces.
    let mut bytes = BytesMut::new();
    (3..=400).for_each(|seq| encode(&record(seq), &mut bytes));
    for part in bytes.chunks(1009) {
        new.stream.write_all(part).await.unwrap();
    }
    assert_eq!(new.durable(400).await, 400);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_vanishes_in_the_middle_of_a_record_leaves_what_was_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (server, address) = server(dir.path(), "plaintext = true").await;
    let (mut host, _) = Host::attached(address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    host.record(&record(2)).await.unwrap();
    let mut bytes = BytesMut::new();
    encode(&record(3), &mut bytes);
    host.stream.write_all(&bytes[..bytes.len() - 1]).await.unwrap();
    host.durable(2).await;
    drop(host);
    let (mut host, attached) =
        Host::attached(address, 1, LastRun::Continues { from: Seq(1) }).await;
    assert_eq!(attached.progress.durable, Seq(2));
    host.record(&record(3)).await.unwrap();
    assert_eq!(host.durable(3).await, 3);
    server.stop().await;
}

/// A beacon between two parts is answered before the record is whole, and the next connection of the run goes on inside
/// the record.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_record_lets_beacons_pass_and_outlives_its_connection() {
    let dir = tempfile::tempdir().unwrap();
    let (server, address) = server(dir.path(), "plaintext = true").await;
    let data: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 97) as u8).collect();
    let large = Record {
        body: DiskChange {
            effect: Effect::Write(Payload::new(data.into())),
            offset: 0,
            ..record(2).body
        },
        ..record(2)
    };
    assert!(part::is_cut(&large));
    let (mut host, attached) = Host::attached(address, 1, LastRun::Unknown).await;
    assert_eq!(stream(&attached).begun, None);
    host.record(&copy_done(1)).await.unwrap();
    host.durable(1).await;
    let send = async |host: &mut Host<TcpStream>, from: u32, parts: u32| {
        let mut at = from;
        for nth in 0..parts {
            let part = part::part_of(&large, at);
            at += part.data.len() as u32;
            let mut bytes = BytesMut::new();
            frame::encode_part(Channel(1), &part, &mut bytes);
            host.stream.write_all(&bytes).await.unwrap();
            let sent_at = MonoNanos(1 + u64::from(nth));
            host.send(Channel(1), &Message::Beacon { sent_at }).await;
            loop {
                match host.next().await {
                    Some((_, Message::Lease { sent_at: of })) if of == sent_at => break,
                    Some((_, Message::Lease { .. } | Message::Arriving)) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        at
    };
    let at = send(&mut host, 0, 20).await;
    drop(host);
    let run = LastRun::Continues { from: Seq(2) };
    let (mut host, attached) = Host::attached(address, 1, run).await;
    assert_eq!(stream(&attached).begun, Some(PartialRecord { seq: Seq(2), bytes: at }));
    let rest = (large.encoded_len() as u32 - at).div_ceil(limits::PART_MAX_BYTES);
    send(&mut host, at, rest - 1).await;
    drop(host);
    // Another run has another record of this number.
    let mut host = Host::plain(address).await;
    host.hello("host-a").await;
    assert_eq!(stream(&host.attach(next_run(2, run)).await.unwrap()).begun, None);
    drop(host);
    let (mut host, _) = Host::attached(address, 2, run).await;
    assert_eq!(send(&mut host, 0, 1).await, limits::PART_MAX_BYTES);
    let part = part::part_of(&large, 2 * limits::PART_MAX_BYTES);
    let mut bytes = BytesMut::new();
    frame::encode_part(Channel(1), &part, &mut bytes);
    host.stream.write_all(&bytes).await.unwrap();
    assert_eq!(kind(&host.next().await.map(|(_, message)| message)), Some(RefusalKind::Invalid));
    let (mut host, attached) = Host::attached(address, 2, run).await;
    assert_eq!(stream(&attached).begun, None, "nothing is kept of parts out of order");
    let mut at = 0;
    while (at as usize) < large.encoded_len() {
        let part = part::part_of(&large, at);
        at += part.data.len() as u32;
        let mut bytes = BytesMut::new();
        frame::encode_part(Channel(1), &part, &mut bytes);
        host.stream.write_all(&bytes).await.unwrap();
    }
    host.durable(2).await;
    server.stop().await;
}

/// A frame that trickles in keeps the connection alive at the host.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_hears_that_its_bytes_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let (server, address) = server(dir.path(), "plaintext = true").await;
    let (host, _) = Host::attached(address, 1, LastRun::Unknown).await;
    let (mut reader, mut writer) = host.stream.into_split();
    let mut input = BytesMut::new();
    let mut bytes = BytesMut::new();
    encode(&record(1), &mut bytes);
    bytes.truncate(bytes.len() - 1);
    let trickle = tokio::spawn(async move {
        for byte in bytes {
            writer.write_all(&[byte]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let heard = async {
        loop {
            if let Some(frame) = frame::decode(&mut input).unwrap() {
                return frame;
            }
            assert!(reader.read_buf(&mut input).await.unwrap() > 0);
        }
    };
    let heard = tokio::time::timeout(Duration::from_secs(60), heard).await.unwrap();
    assert_eq!(heard, frame::Frame::Control(Channel(0), Message::Arriving));
    trickle.abort();
    server.stop().await;
}
