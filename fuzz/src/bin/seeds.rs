//! Writes the seeds of the corpus: `cargo run -p tidelock-fuzz --bin seeds`.
//!
//! They are made with the product's own encoders, so they are to be made again when a format
//! changes. Each begins with the bytes that its target takes off the front. Those of `clock_answers` are not made here:
//! real servers of time have sent them.

use bytes::{BufMut, Bytes, BytesMut};
use std::path::Path;
use std::{fs, io};
use tidelock_protocol::frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, GroupId, Incarnation, MonoNanos, Nonce, RunId, Seq, WriterId,
};
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::machine::{
    Bus, Card, Chipset, Firmware, Machine, MachineDisk, MachineNetwork,
};
use tidelock_protocol::message::{
    Attach, Attached, Basis, CleanEnd, CopyState, DiskSpec, Form, LastRun, LogAge, Message, Mode,
    Progress, RefusalKind, Role, StreamState, Tagging, Writing,
};
use tidelock_protocol::part::{self, PartialRecord};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::tag::{self, Codec, IPV4_OPTION, Stamp};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::memory::Memory;
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::journal::{BLOCK_BYTES, Compress, EpochStart, Journal, Note, Options, State};

fn main() -> io::Result<()> {
    write("nbd_session", nbd_session())?;
    write("frame_decoder", frame_decoder())?;
    write("journal_open", journal_open())?;
    write("index_decode", indexes())?;
    write("map_decode", maps())?;
    write("cold_decode", cold())?;
    write("lying_host", lying_host())?;
    write("lying_backup", lying_backup())?;
    write("tag", tags())?;
    write("wal_reader", logs())?;
    write("replication", streams())
}

type Seeds = Vec<(&'static str, Vec<u8>)>;

fn write(target: &str, seeds: Seeds) -> io::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&directory)?;
    for (name, bytes) in seeds {
        fs::write(directory.join(name), bytes)?;
    }
    Ok(())
}

/// Programs as [`tidelock_fuzz::nbd::conversation`] reads them, and what the first one makes.
fn nbd_session() -> Seeds {
    const FIXED: u8 = 3;
    const STRUCTURED: u8 = 8;
    const SELECT: [u8; 4] = [0x80 | 9, 0, 1, 0];
    const GO: [u8; 7] = [11, 0, 4, 0, 1, 2, 3];
    // Flags, offset and length, as (byte, shift) each.
    let request = |command: u8, flags: u8| vec![command, flags, 1, 12, 1, 9];
    let open = |name: u8| {
        let mut program = vec![FIXED, STRUCTURED];
        program.extend(SELECT);
        program[3] = name;
        program.extend(GO);
        program[7] = name;
        program
    };
    let every_command = |flags: [u8; 8]| -> Vec<u8> {
        [0, 1, 3, 4, 5, 6, 7, 2]
            .iter()
            .flat_map(|&command| match command {
                3 => vec![3, flags[3], 0, 0, 0, 0],
                _ => request(command, flags[usize::from(command)]),
            })
            .collect()
    };
    let piecewise = |mode: u8, program: &[&[u8]]| [&[mode, 7, 40], &program.concat()[..]].concat();
    let all = [&open(0)[..], &every_command([4, 1, 0, 1, 1, 0, 0x13, 8])];
    vec![
        ("all-commands", piecewise(0, &all)),
        (
            "all-commands-as-bytes",
            piecewise(1, &[&tidelock_fuzz::nbd::conversation(&all.concat())]),
        ),
        ("sectors", piecewise(0, &[&open(1), &every_command([0; 8])])),
        ("read-only", piecewise(0, &[&open(2), &every_command([0; 8])])),
        ("export-name", piecewise(0, &[&[0, 12, 0], &request(0, 0)])),
        (
            "haggling",
            piecewise(
                0,
                &[&[1, 13, 10, 1, 2, 3, 1, 9, 2, 2, 0, 1, 14, 5, 0, 14, 99, 3, 1, 2, 3, 14, 2, 0]],
            ),
        ),
        (
            "beyond-the-end",
            piecewise(0, &[&open(0), &[1, 0, 1, 20, 1, 9, 0, 0, 1, 63, 1, 63, 0, 0, 1, 20, 0, 0]]),
        ),
    ]
}

/// Programs as [`tidelock_fuzz::replication`] reads them: streams of a server, and of a client.
fn streams() -> Seeds {
    let of = |mode: u8, steps: &[&[u8]]| [&[mode, 7, 40][..], &steps.concat()].concat();
    const SERVER: u8 = 0;
    const CLIENT: u8 = 1;
    // Second bit of the login: no slot.
    const NO_SLOT: u8 = 2 << 2;
    let log: [&[u8]; 3] = [&[8, 10, 0, 0, 0], &[9, 1], &[8, 200, 0, 0, 0]];
    let slot: &[u8] = &[5, 3, 10, 5, 1];
    let status = [6, 32, 8, 32, 8, 32, 8, 1];
    let commands: Vec<u8> =
        (0..12).filter(|&at| !(6..9).contains(&at)).flat_map(|at| [3, at]).collect();
    vec![
        ("server-log", of(SERVER | NO_SLOT, &[&[0, 1, 7], log[0], log[1], log[2]])),
        ("server-slot", of(SERVER, &[&[0, 1], slot, &[7], log[0], &[6, 4, 2, b'n', b'o']])),
        (
            "server-makes-slot",
            of(SERVER, &[&[0, 1], &[5, 3, 0, 0, 0], &[5, 4, 15, 6, 0, 0], slot, &[7], log[0]]),
        ),
        (
            "server-switch",
            of(SERVER | NO_SLOT, &[&[0, 1, 7], log[0], &[11, 2], &[12], &[7], log[0]]),
        ),
        (
            "server-history",
            of(SERVER | NO_SLOT, &[&[0, 2], &[12], &[7], log[0], &[10], &[3], &[2]]),
        ),
        ("server-password", of(SERVER, &[&[1, 3, 0], &[0, 1]])),
        ("server-md5", of(SERVER, &[&[1, 5, 4, 1, 2, 3, 4], &[0, 1]])),
        ("server-scram", of(SERVER, &[&[1, 10, 15], b"SCRAM-SHA-256\0\0", &[1, 11, 3], b"r=x"])),
        ("client-commands", of(CLIENT, &[&[2, 1, 0], &commands])),
        (
            "client-stream",
            of(CLIENT, &[&[0, 3, 8], &status, &status, &[8], &status, &[7], &[3, 7]]),
        ),
        (
            "client-switch",
            of(CLIENT, &[&[0, 3, 6], &status.repeat(12), &[7], &[3, 3, 3, 7], &status]),
        ),
        ("client-password", of(CLIENT | 1 << 2, &[&[0, 4], &[3, 0]])),
        ("client-scram", of(CLIENT | 2 << 2, &[&[0], &[5, 3, b'a', b'b', b'c'], &[4]])),
        (
            "client-as-bytes",
            [&[CLIENT | 2, 7, 40][..], &tidelock_fuzz::replication::client(&[0, 3, 8, 7])].concat(),
        ),
    ]
}

/// Programs as [`tidelock_fuzz::wal::log`] reads them, and the first page of what one makes.
fn logs() -> Seeds {
    let program = |start: u16, steps: &[&[u8]]| {
        [&[0, 7, 40][..], &start.to_le_bytes(), &steps.concat()].concat()
    };
    let commit = [1, 0, 0, 1, 0, 40, 0];
    let every_part = [1, 2, 0xff, 3, 0, 1, 0, 2, 0, 4, 0, 1, 0, 40, 0];
    let every_record: [&[u8]; 8] = [
        &[0, 100, 0],
        &commit,
        &every_part,
        &[2, 5, 1, 0, 40, 0, 100],
        &[3, 2, 0, 3, 1, 2, 3],
        &[4, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        &[8, 1],
        &[0, 0x00, 0x40],
    ];
    let many = [0, 0x00, 0x4e].repeat(3);
    let page = tidelock_fuzz::wal::log(&program(4 * 1024, &every_record)[3..]).bytes;
    vec![
        ("every-record", program(0, &every_record)),
        ("into-the-next-segment", program(2 * 1024, &[&many, &commit])),
        ("in-the-middle-of-a-page", program(100, &[&commit, &many])),
        ("switch", program(3 * 1024 + 900, &[&commit, &[5], &commit])),
        ("switch-over-a-page", program(0, &[&[7, 2], &[5], &commit])),
        ("given-up", program(0, &[&commit, &[6, 0], &commit, &[6, 3], &commit])),
        ("another-timeline", program(0, &[&commit, &[8, 2]])),
        ("damaged-record", program(0, &[&commit, &commit, &[9, 0, 0, 100, 0, 1]])),
        ("damaged-page", program(0, &[&many, &commit, &[9, 3, 0, 16, 0, 1]])),
        ("page-as-it-is", [&[97, 7, 40], &page[..page.len().min(2000)]].concat()),
    ]
}

fn record(effect: Effect, copy: bool, deps: &[(u16, u64)]) -> Record {
    Record {
        writer: WriterId(1),
        seq: Seq(7),
        epoch: Epoch(2),
        hlc: Hlc(3 << 16),
        deps: deps.iter().map(|&(writer, seq)| (WriterId(writer), Seq(seq))).collect(),
        body: DiskChange { disk: DiskId(0), offset: 4096, copy, flushed: false, effect },
    }
}

fn records() -> Vec<Record> {
    let data = |bytes: &'static [u8]| Effect::Write(Payload::new(Bytes::from_static(bytes)));
    let zero = |no_hole| Effect::Zero { len_bytes: 65536, no_hole };
    vec![
        record(data(b"a short write"), false, &[]),
        record(data(&[0xa5; 512]), true, &[(0, 5), (3, 9)]),
        record(zero(false), false, &[(2, 1)]),
        record(zero(true), true, &[]),
        record(Effect::CopyDone, false, &[]),
    ]
}

fn attach(role: Role) -> Attach {
    let peers = vec!["web=10.0.0.1".into(), "db=10.0.0.2".into()];
    Attach {
        group: "group".into(),
        group_id: None,
        member: "db".into(),
        writers: vec!["web".into(), "db".into()],
        epoch: Epoch(1),
        lease_ms: 10_000,
        grace_ms: 15_000,
        machine: Some(machine()),
        tagging: Some(Tagging { form: Form::Vector, peers }),
        role,
    }
}

fn messages() -> Vec<Message> {
    let committed: CountVector =
        [(WriterId(0), Seq(300)), (WriterId(2), Seq(1))].into_iter().collect();
    let (watermark, frontier) = (Hlc(1 << 20), Hlc(1 << 21));
    let progress = Progress { durable: Seq(300), committed, watermark, frontier };
    vec![
        Message::Hello { oldest: 1, newest: 1, host: "host".into(), software: "tidelock".into() },
        Message::Welcome { protocol: 1, server: "backup".into(), software: "tidelock".into() },
        Message::Attach(Box::new(attach(Role::Writer(Writing {
            writer: WriterId(1),
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: 1 << 30 }],
            incarnation: Incarnation(5),
            nonce: Nonce(1, u64::MAX),
            before: Some(RunId { number: Incarnation(2), nonce: Nonce(3, 4) }),
            marks: vec!["root image inode=12".into()],
            last_run: LastRun::Clean { seq: Seq(9), served: false },
            mode: Mode::Pipelined,
        })))),
        Message::Attach(Box::new(attach(Role::Follower))),
        Message::Attached(Attached {
            group_id: GroupId([7; 16]),
            epoch: Epoch(2),
            progress: progress.clone(),
            stream: Some(StreamState {
                last_hlc: Hlc(1 << 20),
                copy: CopyState::Whole,
                begun: Some(PartialRecord { seq: Seq(10), bytes: 65536 }),
                basis: Basis::Everything { why: "a disk was restored".into() },
            }),
        }),
        Message::Refused { kind: RefusalKind::Fenced, reason: "epoch 3".into() },
        Message::Progress(progress),
        Message::Progress(Progress {
            durable: Seq(1),
            committed: (0..WRITERS_MAX).map(|writer| (WriterId(writer), Seq(1))).collect(),
            ..Progress::default()
        }),
        Message::Beacon { sent_at: MonoNanos(1 << 40) },
        Message::Lease { sent_at: MonoNanos(1 << 40) },
        Message::DigestCheck { disk: DiskId(0), offset: 0, len_bytes: 4096, digest: [7; 32] },
        Message::ZeroCheck { disk: DiskId(0), offset: 0, len_bytes: 1 << 44 },
        Message::DigestResult { disk: DiskId(0), offset: 0, equal: true },
        Message::ModeChanged { mode: Mode::Sync },
        Message::Stalled { reason: Some("disk full".into()) },
        Message::Arriving,
        Message::Detach { end: Some(CleanEnd { seq: Seq(9), marks: vec!["root image".into()] }) },
        Message::Begun,
        Message::Logged(LogAge { file: 1, number: 300 }),
    ]
}

fn frame_decoder() -> Seeds {
    let head = [0, 9, 30];
    let mut controls = BytesMut::from(&head[..]);
    for message in messages() {
        frame::encode_control(Channel(1), &message, &mut controls);
    }
    let mut contents = BytesMut::from(&head[..]);
    for record in records() {
        frame::encode_record_head(Channel(1), &record, &mut contents);
        contents.put_slice(record.payload().map_or(&[], |payload| payload.data()));
    }
    let payload = Payload::new(vec![7; 300_000].into());
    let large = Record {
        body: DiskChange { effect: Effect::Write(payload), ..records()[0].clone().body },
        ..records()[0].clone()
    };
    let mut parts = BytesMut::from(&head[..]);
    for at in [0, 65536, 262_144] {
        let mut part = part::part_of(&large, at);
        // The seed need not be large to be whole.
        part.data.truncate(100);
        frame::encode_part(Channel(1), &part, &mut parts);
    }
    let with_mode = |mode: u8, bytes: &[u8]| [&[mode], &bytes[1..]].concat();
    vec![
        ("control", with_mode(3, &controls)),
        ("control-as-it-is", with_mode(0, &controls)),
        ("records", with_mode(3, &contents)),
        ("records-with-their-lengths", with_mode(1, &contents)),
        ("parts", with_mode(3, &parts)),
        ("records-as-they-are", with_mode(0, &contents)),
    ]
}

fn journal(writers: usize, fill: impl FnOnce(&mut Journal<Memory>)) -> Vec<u8> {
    let mut state = State::new(writers);
    state.epoch = Epoch(2);
    let options = Options::default();
    let mut journal =
        Journal::create(Memory::new(), "journal", state, options).expect("memory does not fail");
    fill(&mut journal);
    let segment = journal.segments().last().expect("a journal has a segment");
    let mut content = vec![0; segment.len_bytes as usize];
    segment.file.read_at(&mut content, 0).expect("memory does not fail");
    content
}

fn commit(journal: &mut Journal<Memory>) {
    journal.write(|_| {}).expect("memory does not fail");
    journal.sync().expect("memory does not fail");
}

/// The first batch of records, each following the one before.
fn stage_records(journal: &mut Journal<Memory>) {
    for (at, record) in records().into_iter().enumerate() {
        let seq = Seq(at as u64 + 1);
        journal.stage_record(Record { seq, ..record }).expect("in order");
    }
}

/// A journal of two segments, the first of which has the records.
fn of_two_segments(disk: &Memory) -> Journal<Memory> {
    let mut state = State::new(4);
    state.epoch = Epoch(2);
    let options = Options { segment_bytes: 1 };
    let mut journal =
        Journal::create(disk.clone(), "journal", state, options).expect("memory does not fail");
    stage_records(&mut journal);
    commit(&mut journal);
    journal.stage_note(&Note::CleanEnd).expect("always allowed");
    commit(&mut journal);
    journal
}

/// The largest of the journal's files whose names end like this.
fn largest_file(disk: &Memory, ending: &str) -> Vec<u8> {
    let names = disk.list("journal").expect("memory does not fail");
    let content = |name: &String| {
        let file = disk.open(&format!("journal/{name}")).expect("it is there");
        let mut content = vec![0; file.size_bytes().expect("it is there") as usize];
        file.read_at(&mut content, 0).expect("it is there");
        content
    };
    let files = names.iter().filter(|name| name.ends_with(ending)).map(content);
    files.max_by_key(Vec::len).expect("a segment was sealed")
}

/// The index of the first segment of a journal of two, as it is and to be sealed.
fn indexes() -> Seeds {
    let mut journal = of_two_segments(&Memory::new());
    let mut made = Vec::new();
    while let Some(job) = journal.index_job(0, |_| Some((Hlc(9), CountVector::new()))) {
        made.extend(job.content());
    }
    let largest = made.into_iter().max_by_key(Vec::len).expect("a segment was sealed");
    // Of its only block what the target takes.
    let (block, behind) = largest.split_at(BLOCK_BYTES);
    let with = |mode: u8| [&[mode, 1][..], &block[..368], behind].concat();
    vec![("one-block", with(1)), ("one-block-as-it-is", with(0))]
}

/// The map of the first segment of a journal of two, as it is and to be sealed.
fn maps() -> Seeds {
    let disk = Memory::new();
    let mut journal = of_two_segments(&disk);
    while let Some(job) = journal.index_job(0, |_| None).or_else(|| journal.map_job(0)) {
        journal.made(job.run().expect("memory does not fail"));
    }
    let largest = largest_file(&disk, ".map");
    // Of its leaf and its fence what the target takes.
    let (blocks, behind) = largest.split_at(2 * BLOCK_BYTES);
    let (leaf, fence) = blocks.split_at(BLOCK_BYTES);
    let with = |mode: u8| [&[mode, 2][..], &leaf[..368], &fence[..368], behind].concat();
    vec![("leaf-and-fence", with(1)), ("leaf-and-fence-as-they-are", with(0))]
}

/// The first segment of a journal of two, compressed, as it is and to be sealed.
fn cold() -> Seeds {
    let disk = Memory::new();
    let journal = of_two_segments(&disk);
    let how = Compress { block_bytes: 512, percent_max: 1000, ..Compress::default() };
    for segment in 1.. {
        let Some(job) = journal.compress_job(segment, how) else { break };
        job.run().expect("memory does not fail");
    }
    let largest = largest_file(&disk, ".zst");
    let with = |mode: u8| [&[mode][..], &largest].concat();
    vec![("segment", with(1)), ("segment-as-it-is", with(0))]
}

fn journal_open() -> Seeds {
    let empty = journal(1, |_| {});
    let filled = journal(4, |journal| {
        stage_records(journal);
        commit(journal);
        journal
            .stage_note(&Note::Copy { writer: WriterId(1), copy: CopyState::Resyncing })
            .expect("a known writer");
        journal.stage_note(&Note::CleanEnd).expect("always allowed");
        commit(journal);
    });
    let recovered = journal(4, |journal| {
        stage_records(journal);
        commit(journal);
        let state = journal.state();
        let start = EpochStart {
            epoch: Epoch(3),
            cut: state.committed(),
            journaled: state.journaled(),
            resyncing: vec![],
            at_unix_ms: 0,
            primary_declared_dead: true,
            exposed: vec![],
        };
        journal.stage_note(&Note::EpochStart(start)).expect("a later epoch");
        commit(journal);
    });
    let with_mode = |mode: u8, bytes: &[u8]| [&[mode], bytes].concat();
    vec![
        ("empty", with_mode(3, &empty)),
        ("filled", with_mode(3, &filled)),
        ("filled-without-help", with_mode(0, &filled)),
        ("recovered", with_mode(1, &recovered)),
        ("torn", with_mode(0, &filled[..filled.len() - 20])),
        // The first batch is damaged, and the second one knows it as durable.
        ("corrupt-middle", {
            let mut bytes = with_mode(0, &filled);
            bytes[400] ^= 1;
            bytes
        }),
    ]
}

/// Steps of these kinds, each with numbers of one kind (`tidelock_fuzz::extremes`).
fn program(options: u8, steps: std::ops::Range<u8>, number: u8) -> Vec<u8> {
    let step = |kind: u8| [[kind, 0, kind].as_slice(), &[number; 5]].concat();
    [vec![options], steps.flat_map(step).collect()].concat()
}

/// One message of each kind that an attached host sends.
fn messages_of_host(options: u8, number: u8) -> Vec<u8> {
    let step = |kind: u8| [[19, 0, kind].as_slice(), &[number; 5]].concat();
    [vec![options], (0..18).flat_map(step).collect()].concat()
}

/// A time eight hours ahead of the wall clock.
const FAR: [u8; 2] = [2, 0x1e];

/// Records and messages with such a time.
fn far_times(options: u8) -> Vec<u8> {
    let record = [&[14, 0, 5, 0, 3][..], &FAR].concat();
    let waits_for = [&[19, 0, 9, 0, 0][..], &FAR].concat();
    let degraded = [19, 0, 13, 0, 0, 1, FAR[1]].to_vec();
    let attached = vec![0, 0];
    let steps = [&attached, &record, &attached, &waits_for, &attached, &degraded];
    [vec![options], steps.into_iter().flatten().copied().collect()].concat()
}

const GREATEST: u8 = 2;
const BESIDE_KNOWN: u8 = 9;
const AT_A_BOUND: u8 = 0x3b;

fn lying_host() -> Seeds {
    vec![
        ("greatest", program(8, 0..32, GREATEST)),
        ("beside-known", program(8, 0..32, BESIDE_KNOWN)),
        ("at-a-bound", program(8, 0..32, AT_A_BOUND)),
        ("times", program(9, 0..32, BESIDE_KNOWN)),
        ("listed-members", program(10, 0..32, AT_A_BOUND)),
        ("a-past-is-kept", program(12, 0..32, BESIDE_KNOWN)),
        ("not-attached", program(0, 0..32, GREATEST)),
        ("messages-greatest", messages_of_host(8, GREATEST)),
        ("messages-at-a-bound", messages_of_host(9, AT_A_BOUND)),
        ("far-times", far_times(8)),
        ("far-times-in-tags", far_times(9)),
        // The last step that there is, on a full disk, and then an activity log's age.
        ("full-batch", vec![0xf8, 31, 0, 1, 1, 19, 0, 7, BESIDE_KNOWN, 1, 0, 19, 0, 7, 0, 0, 0]),
    ]
}

fn lying_backup() -> Seeds {
    vec![
        ("greatest", program(8, 0..24, GREATEST)),
        ("beside-known", program(8, 0..24, BESIDE_KNOWN)),
        ("at-a-bound", program(10, 0..24, AT_A_BOUND)),
        ("times", program(14, 0..24, BESIDE_KNOWN)),
        ("follower", program(9, 0..24, BESIDE_KNOWN)),
        ("after-a-clean-end", program(0x10, 0..24, GREATEST)),
        ("after-an-unclean-end", program(0x32, 0..24, BESIDE_KNOWN)),
    ]
}

/// A tag of either form in either header, alone and among other options.
fn tags() -> Seeds {
    let base = 7u64 << 32;
    let vector = |writers| (0..writers).map(|w| (WriterId(w), Seq(base + u64::from(w)))).collect();
    let with = |shape: u8, options: Vec<u8>| [&[shape], &base.to_be_bytes()[..], &options].concat();
    let codec = |form| Codec::new(form, "fuzz", ["a", "b"]);
    let option = |form, stamp: &Stamp| {
        let mut out = vec![];
        codec(form).encode_ipv4(IPV4_OPTION, stamp, &mut out);
        out
    };
    let two = option(tag::Form::Vector { writers: 2 }, &Stamp::Vector(vector(2)));
    let mut many = vec![];
    let stamp = Stamp::Vector(vector(20));
    codec(tag::Form::Vector { writers: 20 }).encode_ipv6(6, &stamp, &mut many);
    vec![
        ("vector", with(2, two.clone())),
        ("vector-among-others", with(2, [&[1, 148, 4, 0, 0], &two[..], &[0, 0, 0]].concat())),
        ("vector-twice", with(2, [&two[..], &two].concat())),
        ("hlc", with(63, option(tag::Form::Hlc, &Stamp::Hlc(Hlc(base))))),
        ("ipv6", with(0x80 | 20, many[2..].to_vec())),
        ("body", with(0x40 | 2, two[2..].to_vec())),
    ]
}

fn machine() -> Machine {
    let disk = MachineDisk { name: "root".into(), bus: Bus::Sata, serial: Some("X1".into()) };
    let mac = Some("52:54:00:12:34:56".into());
    Machine {
        memory_mib: 2048,
        cpus: 2,
        chipset: Chipset::Pc,
        firmware: Firmware::Uefi,
        disks: vec![disk],
        networks: vec![MachineNetwork { name: Some("lan".into()), model: Card::E1000, mac }],
    }
}
