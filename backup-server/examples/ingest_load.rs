//! A load on a backup server: 4 KiB records as fast as they are acknowledged within a window.
//!
//! `ingest_load ADDRESS SECONDS [DISK_MIB]` attaches group `load` over plaintext and prints records
//! per second. The server's own processor time is to be read from outside (`/proc/PID/stat`).

use bytes::BytesMut;
use std::time::{Duration, Instant};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, Nonce, Seq, WriterId};
use tidelock_protocol::message::{
    Attach, Attached, DiskSpec, LastRun, Message, Mode, Role, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const BLOCK: u64 = 4096;
/// Records that may wait for their acknowledgement: a fast link's worth.
const WINDOW: u64 = 8192;
const BURST: u64 = 64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, address, seconds, rest @ ..] = &args[..] else {
        return Err("usage: ingest_load ADDRESS SECONDS [DISK_MIB]".into());
    };
    let disk_bytes = rest.first().map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
    let length = Duration::from_secs(seconds.parse()?);
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.into_split();
    let mut out = BytesMut::new();
    let hello = Message::Hello {
        oldest: 1,
        newest: 1,
        host: "load".into(),
        software: "ingest_load".into(),
    };
    frame::encode_control(Channel(0), &hello, &mut out);
    let attach = Attach {
        group: "load".into(),
        group_id: None,
        member: "vm".into(),
        writers: vec!["vm".into()],
        epoch: Epoch(0),
        lease_ms: 1000,
        grace_ms: 2000,
        machine: None,
        tagging: None,
        role: Role::Writer(Writing {
            writer: WriterId(0),
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: disk_bytes }],
            incarnation: Incarnation(std::process::id().into()),
            nonce: Nonce(0, 0),
            before: None,
            marks: Vec::new(),
            last_run: LastRun::Unknown,
            mode: Mode::Async,
        }),
    };
    frame::encode_control(Channel(1), &Message::Attach(Box::new(attach)), &mut out);
    writer.write_all(&out).await?;

    let (acked, mut durable) = tokio::sync::watch::channel(None);
    tokio::spawn(async move {
        let mut input = BytesMut::new();
        while reader.read_buf(&mut input).await.is_ok_and(|n| n > 0) {
            while let Ok(Some(Frame::Control(_, message))) = frame::decode(&mut input) {
                match message {
                    Message::Attached(Attached { progress, .. }) | Message::Progress(progress) => {
                        acked.send_replace(Some(progress.durable.0));
                    }
                    Message::Refused { reason, .. } => {
                        eprintln!("refused: {reason}");
                        return;
                    }
                    other => eprintln!("{other:?}"),
                }
            }
        }
    });
    let first = durable.wait_for(Option::is_some).await?.unwrap_or(0) + 1;
    let (mut seq, start) = (first, Instant::now());
    let payload = Payload::new(vec![0xa5; BLOCK as usize].into());
    while start.elapsed() < length {
        out.clear();
        for _ in 0..BURST {
            let mix = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
            let record = Record {
                writer: WriterId(0),
                seq: Seq(seq),
                epoch: Epoch(1),
                hlc: Hlc(seq),
                deps: CountVector::new(),
                body: DiskChange {
                    disk: DiskId(0),
                    offset: mix % (disk_bytes / BLOCK) * BLOCK,
                    copy: false,
                    flushed: false,
                    effect: Effect::Write(payload.clone()),
                },
            };
            frame::encode_record_head(Channel(1), &record, &mut out);
            out.extend_from_slice(payload.data());
            seq += 1;
        }
        writer.write_all(&out).await?;
        durable.wait_for(|acked| acked.unwrap_or(0) + WINDOW >= seq).await?;
    }
    durable.wait_for(|acked| acked.unwrap_or(0) + 1 >= seq).await?;
    let per_second = (seq - first) as f64 / start.elapsed().as_secs_f64();
    println!("{per_second:.0} records/s, {:.0} MiB/s", per_second * BLOCK as f64 / 1048576.0);
    Ok(())
}
