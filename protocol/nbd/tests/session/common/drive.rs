//! Runs a session over an input stream as a correct caller would, and checks what must hold
//! whatever the client sends. Used by the property tests and by the fuzz target.

use tidelock_nbd::limits::{MAX_PAYLOAD_BYTES, OUTPUT_HIGH_WATER_BYTES};
use tidelock_nbd::{Command, Errno, Event, ExportTable, ProtocolError, Request, Session};

/// What a session did with a stream.
#[derive(Debug, PartialEq, Eq)]
pub struct Trace {
    pub events: Vec<Event>,
    /// Everything the session sent by itself.
    pub output: Vec<u8>,
    /// Bytes of input that were used, payload included.
    pub consumed: usize,
    pub end: Result<(), ProtocolError>,
}

/// The most that one option or request can add to the output above its mark.
fn output_bound(exports: &ExportTable) -> usize {
    let list: usize = exports
        .as_slice()
        .iter()
        .map(|export| 24 + export.name.len() + export.description.len())
        .sum();
    OUTPUT_HIGH_WATER_BYTES + list + 10_000
}

/// Feed `input` in pieces of the given lengths, over and over.
///
/// # Panics
/// If the session breaks a promise that it makes to its caller.
pub fn drive(exports: &ExportTable, input: &[u8], pieces: &[usize]) -> Trace {
    let mut session = Session::new(exports.clone());
    let mut trace = Trace { events: vec![], output: vec![], consumed: 0, end: Ok(()) };
    let bound = output_bound(exports);
    let mut piece_lens = pieces.iter().copied().filter(|&len| len > 0).cycle();
    let mut rest = input;
    while !rest.is_empty() && trace.end.is_ok() {
        let len = piece_lens.next().unwrap_or(rest.len()).min(rest.len());
        let (mut piece, later) = rest.split_at(len);
        rest = later;
        while !piece.is_empty() {
            let owed = session.payload_owed();
            if owed > 0 {
                let taken = (owed as usize).min(piece.len());
                session.payload_taken(taken as u32);
                piece = &piece[taken..];
                trace.consumed += taken;
                continue;
            }
            let step = match session.next(piece) {
                Ok(step) => step,
                Err(error) => {
                    assert_eq!(session.next(piece), Err(error), "an error is final");
                    assert!(session.is_closed());
                    trace.end = Err(error);
                    break;
                }
            };
            assert!(step.consumed <= piece.len());
            assert!(session.output().len() <= bound, "the output is bounded");
            piece = &piece[step.consumed..];
            trace.consumed += step.consumed;
            match step.event {
                None => assert!(piece.is_empty(), "no event means that all was taken"),
                Some(Event::OutputFull) => {
                    assert!(session.output().len() >= OUTPUT_HIGH_WATER_BYTES);
                    trace.output.extend(session.output().split());
                }
                Some(event) => {
                    check(exports, &session, event);
                    trace.events.push(event);
                    if event == Event::Disconnected {
                        // Bytes after a goodbye are dropped; how many depends on the pieces.
                        trace.output.extend(session.output().split());
                        trace.consumed = 0;
                        return trace;
                    }
                }
            }
        }
    }
    if trace.end.is_err() {
        trace.consumed = 0;
    }
    trace.output.extend(session.output().split());
    trace
}

/// What the caller may rely on without looking.
fn check(exports: &ExportTable, session: &Session, event: Event) {
    match event {
        Event::Opened { export } => {
            assert!(export < exports.as_slice().len());
            assert_eq!(session.export(), Some(export));
            assert!(session.encoder().is_some());
        }
        Event::Request(request) => check_request(exports, session, &request),
        Event::Refused { export } => {
            assert!(export < exports.as_slice().len());
            assert_eq!(session.export(), None);
        }
        Event::OutputFull | Event::Disconnected => {}
    }
}

fn check_request(exports: &ExportTable, session: &Session, request: &Request) {
    let export = &exports.as_slice()[session.export().expect("an export is open")];
    let end = request.offset.checked_add(request.len.into()).expect("no overflow");
    assert!(end <= export.size_bytes && end == request.end());
    let min = export.block_size.min;
    assert!(request.offset.is_multiple_of(min.into()) && request.len.is_multiple_of(min));
    assert_eq!(request.len == 0, request.command == Command::Flush);
    assert!(!(export.read_only && request.command.is_write()));
    let flags = request.flags;
    assert!(!flags.fua() || request.command.is_write() && export.features.fua);
    assert!(!flags.no_hole() || request.command == Command::WriteZeroes);
    assert!(!flags.fast_zero() || request.command == Command::WriteZeroes);
    assert!(!flags.fast_zero() || export.features.fast_zero);
    assert!(!flags.df() || request.command == Command::Read);
    assert!(!flags.req_one() || request.command == Command::BlockStatus);
    match request.command {
        Command::Read | Command::Write => {
            assert!(request.len <= export.block_size.max.min(MAX_PAYLOAD_BYTES));
        }
        Command::Flush => assert!(export.features.flush && request.offset == 0),
        Command::Trim => assert!(export.features.trim),
        Command::WriteZeroes => assert!(export.features.write_zeroes),
        Command::Cache => assert!(export.features.cache),
        Command::BlockStatus => {}
    }
    let payload = if request.command == Command::Write { request.len } else { 0 };
    assert_eq!(session.payload_owed(), payload);
    answer(session, request);
}

/// Any request can be answered, with success and with an error.
fn answer(session: &Session, request: &Request) {
    let encoder = session.encoder().expect("an export is open");
    let mut out = bytes::BytesMut::new();
    encoder.error(request, Errno::Io, "disk failed", &mut out);
    assert!(out.len() >= 16);
    out.clear();
    match request.command {
        Command::Read => assert!(matches!(encoder.read(request).len(), 16 | 28)),
        Command::BlockStatus => {
            let half = tidelock_nbd::Extent {
                len: u64::from(request.len / 2),
                state: tidelock_nbd::ExtentState::HOLE_ZERO,
            };
            encoder.block_status(request, [half], &mut out);
            let descriptors = out[24..].chunks_exact(8);
            let covered: u64 =
                descriptors.map(|d| u64::from(u32::from_be_bytes([d[0], d[1], d[2], d[3]]))).sum();
            assert!(covered > 0 && covered <= request.len.into());
        }
        _ => assert_eq!(encoder.done(request).len(), 16),
    }
}
