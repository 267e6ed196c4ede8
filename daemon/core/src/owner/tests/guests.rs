//! Guests' requests on a disk whose operations end as the test says.

use super::*;
use crate::owner::disk::Disk;
use crate::owner::driver::{GuestIo, GuestOp};
use crate::sequencer::{EIO, EOPNOTSUPP, Extent, Look};
use tidelock_buffers::{Extent as Piece, ExtentKind};
use tidelock_protocol::ids::{Epoch, Seq};
use tidelock_protocol::record::Payload;

/// P as it was published.
#[derive(Default)]
pub(super) struct Published(Mutex<Vec<u64>>);

impl PublishPending for Published {
    fn publish(&self, seq: Seq, _: Hlc) {
        self.0.lock().unwrap().push(seq.0);
    }
}

/// A member whose writes have records.
fn started() -> Owner<Recorder> {
    let mut of = owner(Arc::<Published>::default(), None);
    of.sequencer.start(Epoch(1), Seq(0), Hlc(0), of.now, of.wall_ms);
    of
}

pub(super) fn ask(of: &mut Owner<Recorder>, id: u64, offset: u64, len_bytes: u64, op: GuestOp) {
    let extent = Extent { disk: DiskId(0), offset, len_bytes };
    of.ask(GuestIo { id: RequestId(id), extent, op });
    of.turn().unwrap();
}

pub(super) fn write(len: usize, fua: bool) -> GuestOp {
    GuestOp::Write { data: Payload::new(vec![9; len].into()), fua }
}

fn zero(no_hole: bool, only_if_fast: bool, fua: bool) -> GuestOp {
    GuestOp::Zero { no_hole, only_if_fast, fua }
}

pub(super) fn next(of: &mut Owner<Recorder>) -> (DiskOp, Asked) {
    of.driver.asked.pop_front().expect("an operation on the disk")
}

pub(super) fn ends(of: &mut Owner<Recorder>, op: DiskOp, result: io::Result<u32>) {
    of.completed(op, result, None);
    of.turn().unwrap();
}

/// The read at hand brings so many bytes of this value.
pub(super) fn brings(of: &mut Owner<Recorder>, count: usize, byte: u8) -> (Range<usize>, u64) {
    let (op, Asked::Read { mut buf, range, at }) = next(of) else { panic!("no read") };
    buf.set_len(range.start);
    buf.extend_from_slice(&vec![byte; count]);
    of.completed(op, Ok(count as u32), Some(buf));
    of.turn().unwrap();
    (range, at)
}

pub(super) fn answers(of: &mut Owner<Recorder>) -> Vec<(u64, Result<Vec<u8>, i32>)> {
    let answer = |(id, answer): (RequestId, Result<Bytes, DiskError>)| {
        (id.0, answer.map(|data| data.to_vec()).map_err(|error| error.0))
    };
    std::mem::take(&mut of.driver.answers).into_iter().map(answer).collect()
}

pub(super) const DONE: Result<Vec<u8>, i32> = Ok(Vec::new());

#[test]
fn a_read_is_of_whole_blocks_and_goes_on_until_it_has_all() {
    let mut of = started();
    ask(&mut of, 1, 700, 100, GuestOp::Read);
    assert_eq!(brings(&mut of, 100, 1), (0..512, 512));
    assert!(answers(&mut of).is_empty());
    assert_eq!(brings(&mut of, 412, 2), (100..512, 612));
    assert_eq!(answers(&mut of), [(1, Ok(vec![2; 100]))]);
    ask(&mut of, 2, 1000, 100, GuestOp::Read);
    assert_eq!(brings(&mut of, 1024, 3), (0..1024, 512), "over two blocks");
    assert_eq!(answers(&mut of), [(2, Ok(vec![3; 100]))]);
    assert_eq!((of.stats.reads.load(Relaxed), of.stats.read_bytes.load(Relaxed)), (2, 200));
    // The file has ended, or the disk has failed.
    ask(&mut of, 3, 0, 512, GuestOp::Read);
    brings(&mut of, 100, 0);
    brings(&mut of, 0, 0);
    assert_eq!(answers(&mut of), [(3, Err(EIO))]);
    ask(&mut of, 4, 0, 512, GuestOp::Read);
    let (op, _) = next(&mut of);
    ends(&mut of, op, Err(io::Error::from_raw_os_error(61)));
    assert_eq!(answers(&mut of), [(4, Err(61))]);
    assert_eq!(of.stats.disk_errors.load(Relaxed), 2);
    assert_eq!(of.open_requests, 0);
}

#[test]
fn a_write_that_does_not_end_at_blocks_keeps_what_is_around_it() {
    let mut of = started();
    ask(&mut of, 1, 700, 1000, write(1000, true));
    assert_eq!(brings(&mut of, 1536, 4), (0..1536, 512));
    let (op, Asked::Write { data, at, how }) = next(&mut of) else { panic!() };
    let expected = [vec![4; 188], vec![9; 1000], vec![4; 348]].concat();
    assert_eq!((&data[..], at, how), (&expected[..], 512, Durability::Durable));
    // A write that comes short goes on where it ended.
    ends(&mut of, op, Ok(512));
    assert!(answers(&mut of).is_empty());
    let (op, Asked::Write { data, at, how }) = next(&mut of) else { panic!() };
    assert_eq!((&data[..], at, how), (&expected[512..], 1024, Durability::Durable));
    ends(&mut of, op, Ok(1024));
    assert_eq!(answers(&mut of), [(1, DONE)]);
    assert_eq!(of.sequencer.last_seq(), Seq(1));
    assert_eq!((of.stats.writes.load(Relaxed), of.stats.written_bytes.load(Relaxed)), (1, 1000));
    let records = of.driver.told.iter().filter_map(|told| match told {
        ToLink::Records { records, .. } => Some(records.len()),
        _ => None,
    });
    assert_eq!(records.sum::<usize>(), 1, "the link has its record");
}

#[test]
fn a_write_that_the_disk_does_not_do_fails_and_the_backup_gets_what_is_there() {
    let cases: [fn(&mut Owner<Recorder>); 4] = [
        |of| {
            let (op, _) = next(of);
            ends(of, op, Ok(0));
        },
        |of| {
            let (op, _) = next(of);
            ends(of, op, Err(io::ErrorKind::Other.into()));
        },
        // The rest could not be written directly.
        |of| {
            let (op, _) = next(of);
            ends(of, op, Ok(100));
        },
        |of| {
            let (op, _) = next(of);
            ends(of, op, Ok(512));
            let (op, _) = next(of);
            ends(of, op, Ok(0));
        },
    ];
    for (case, is_readable) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        let mut of = started();
        ask(&mut of, 1, 512, 1024, write(1024, false));
        case(&mut of);
        assert!(answers(&mut of).is_empty(), "the disk is read first");
        if is_readable {
            assert_eq!(brings(&mut of, 1024, 6), (0..1024, 512));
        } else {
            let (op, Asked::Read { .. }) = next(&mut of) else { panic!() };
            ends(&mut of, op, Err(io::ErrorKind::Other.into()));
        }
        assert_eq!(answers(&mut of), [(1, Err(EIO))]);
        assert_eq!(of.stats.disk_errors.load(Relaxed), 1);
        // The backup has what the disk has, or the sites may differ there.
        assert_eq!(of.sequencer.last_seq(), Seq(if is_readable { 2 } else { 1 }));
        assert_eq!(of.view.suspect_bytes(), if is_readable { 0 } else { 1024 });
    }
}

#[test]
fn zeroes_are_asked_of_the_file_system_and_written_where_it_cannot() {
    use FallocateMode::{PunchHole, ZeroRange};
    for (no_hole, punches, zeroes, mode) in [
        (false, true, true, Some(PunchHole)),
        (true, true, true, Some(ZeroRange)),
        (false, false, true, Some(ZeroRange)),
        (false, true, false, Some(PunchHole)),
        (true, true, false, None),
        (false, false, false, None),
    ] {
        let file = NoFile {
            cannot_punch_hole: AtomicBool::new(!punches),
            cannot_zero_range: AtomicBool::new(!zeroes),
            ..NoFile::default()
        };
        let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes: DISK_BYTES };
        assert_eq!(Disk::new((spec, file)).fallocate_mode(no_hole), mode);
    }
    for (fua, fails) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut of = started();
        let len = (1 << 20) - 512;
        ask(&mut of, 1, 512, len, zero(false, false, fua));
        let (op, Asked::Zero { mode: PunchHole, range }) = next(&mut of) else { panic!() };
        assert_eq!(range, 512..1 << 20);
        let unsupported = || Err(io::Error::from_raw_os_error(EOPNOTSUPP));
        ends(&mut of, op, if fails { unsupported() } else { Ok(0) });
        if fails {
            let (op, Asked::Write { data, at: 512, .. }) = next(&mut of) else { panic!() };
            assert!(data.len() as u64 == len && data.iter().all(|byte| *byte == 0));
            ends(&mut of, op, Ok(1024));
            let (op, Asked::Write { data, at: 1536, .. }) = next(&mut of) else { panic!() };
            assert_eq!(data.len() as u64, len - 1024);
            ends(&mut of, op, Ok(data.len() as u32));
        }
        if fua {
            assert!(answers(&mut of).is_empty(), "not on stable storage");
            let (op, Asked::Sync) = next(&mut of) else { panic!() };
            ends(&mut of, op, Ok(0));
        }
        assert_eq!(answers(&mut of), [(1, DONE)]);
        assert!(of.driver.asked.is_empty());
    }
}

#[test]
fn a_hint_that_cannot_be_followed_is_a_success_and_fast_zeroes_that_are_slow_are_refused() {
    let mut of = started();
    ask(&mut of, 1, 0, 512, GuestOp::Discard { fua: false });
    let (op, Asked::Zero { .. }) = next(&mut of) else { panic!("it is followed") };
    ends(&mut of, op, Ok(0));
    of.disks[0].file().cannot_punch_hole.store(true, Relaxed);
    of.disks[0].file().cannot_zero_range.store(true, Relaxed);
    ask(&mut of, 2, 0, 512, GuestOp::Discard { fua: false });
    ask(&mut of, 3, 0, 512, zero(false, true, false));
    assert_eq!(answers(&mut of), [(1, DONE), (2, DONE), (3, Err(EOPNOTSUPP))]);
    assert!(of.driver.asked.is_empty());
    assert_eq!(of.sequencer.last_seq(), Seq(1), "nothing was done");
    ask(&mut of, 4, 0, 512, zero(false, false, false));
    assert_eq!(of.sequencer.last_seq(), Seq(2), "slow, and asked for all the same");
}

#[test]
fn a_disk_that_has_failed_a_flush_fails_all_that_follow_and_says_so() {
    let mut of = started();
    ask(&mut of, 1, 0, 0, GuestOp::Flush);
    let (op, Asked::Sync) = next(&mut of) else { panic!() };
    of.driver.oldest = Some((op, Duration::from_secs(9)));
    of.now = MonoNanos(20_000_000_000);
    of.turn().unwrap();
    let hangs =
        |of: &Owner<Recorder>| of.stats.disk_wait.longer_than(Duration::from_secs(8), of.now);
    let (_, disk) = hangs(&of).expect("it hangs");
    assert_eq!(disk, Some(0));
    of.driver.oldest = None;
    ends(&mut of, op, Ok(0));
    assert!(hangs(&of).is_none());
    assert_eq!(answers(&mut of), [(1, DONE)]);
    for nth in 0..2 {
        ask(&mut of, 2 + nth, 0, 0, GuestOp::Flush);
    }
    for _ in 0..2 {
        let (op, _) = next(&mut of);
        ends(&mut of, op, Err(io::ErrorKind::Other.into()));
    }
    assert_eq!(answers(&mut of), [(2, Err(EIO)), (3, Err(EIO))]);
    let failed = of.view.trouble().failed_disks;
    assert_eq!(failed.len(), 1, "it is said once: {failed:?}");
    assert_eq!(failed[0].0, "disk");
    ask(&mut of, 4, 0, 0, GuestOp::Flush);
    assert!(of.driver.asked.is_empty());
    assert_eq!(answers(&mut of), [(4, Err(EIO))]);
    assert_eq!((of.stats.flushes.load(Relaxed), of.stats.disk_errors.load(Relaxed)), (4, 2));
}

#[test]
fn a_look_at_a_disk_finds_where_it_has_storage() {
    let piece = |offset, len, kind| Piece { offset, len, kind };
    let (hole, data) = (ExtentKind::Hole, ExtentKind::Allocated);
    let mib = 1 << 20;
    let disk = |pieces: &[Piece]| {
        let size_bytes = pieces.iter().map(|piece| piece.len).sum();
        let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes };
        let file = NoFile { pieces: Mutex::new(pieces.to_vec()), ..NoFile::default() };
        Disk::new((spec, file))
    };
    let of = disk(&[
        piece(0, mib, data),
        piece(mib, 8 * mib, hole),
        piece(9 * mib, mib, data),
        piece(10 * mib, mib, hole),
    ]);
    let found: Vec<_> = of.allocated().unwrap().iter().map(|e| (e.offset, e.len_bytes)).collect();
    assert_eq!(found, [(0, mib), (9 * mib, mib)], "further than one answer goes");
    let look =
        |offset| of.look(Extent { disk: DiskId(0), offset, len_bytes: 11 * mib - offset }).unwrap();
    assert_eq!(look(0), Look::Data(mib), "up to the hole");
    assert_eq!(look(mib), Look::Hole(8 * mib));
    assert_eq!(look(9 * mib), Look::Data(2 * mib), "a small hole is read");
    for (offset, len, range) in
        [(0, 512, (0, 512)), (1, 1, (0, 512)), (511, 2, (0, 1024)), (512, 513, (512, 1024))]
    {
        assert_eq!(of.direct_range(offset, len), range);
    }
}
