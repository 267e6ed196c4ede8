//! Calls of the programs. The only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::{Maps, Planted};
use tidelock_tagging::{CommittedCells, Config, CrossingCells, Direction, PendingCells};

/// Bytes in front of a frame that the programs may write to. `HEADROOM_BYTES` of the shim.
const HEADROOM: usize = 320;

/// Value of an address in the map of peers: `struct address_value`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressValue {
    pub address: [u64; 2],
    pub value: u32,
}

/// Value of a way: `struct way_value`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct WayValue {
    pub source: [u64; 2],
    pub destination: [u64; 2],
    pub value: u32,
}

#[repr(C)]
struct AddressPending {
    address: [u64; 2],
    pending: *const PendingCells,
}

/// `struct call` of `shim/native.c`.
#[repr(C)]
pub(crate) struct Call {
    config: *const Config,
    pending: *const PendingCells,
    committed: *const CommittedCells,
    crossing: *const CrossingCells,
    cpu: *mut u64,
    peers: *const AddressValue,
    ways: *const WayValue,
    neighbours: *const AddressPending,
    interfaces: *const u32,
    peers_count: u64,
    ways_count: u64,
    neighbours_count: u64,
    interfaces_count: u64,
    boot_ns: u64,
    frame: *mut u8,
    frame_bytes: u32,
    interface: u32,
    mark: u32,
    has_judge: u32,
    to_guest: u32,
}

type Run = unsafe extern "C" fn(*mut Call) -> i32;

macro_rules! copies {
    ($($fault:pat => $run:ident,)*) => {
        unsafe extern "C" {
            $(fn $run(call: *mut Call) -> i32;)*
        }

        /// The programs, or the copy with this fault.
        fn run_of(planted: Option<Planted>) -> Run {
            match planted {
                $($fault => $run,)*
            }
        }
    };
}

copies! {
    None => tidelock_run_programs,
    Some(Planted::MergeForgotten) => tidelock_run_merge_forgotten,
    Some(Planted::HandingOverForgotten) => tidelock_run_handing_over_forgotten,
    Some(Planted::StripBeforeMerge) => tidelock_run_strip_before_merge,
    Some(Planted::LastEntryForgotten) => tidelock_run_last_entry_forgotten,
    Some(Planted::OutsiderMerged) => tidelock_run_outsider_merged,
    Some(Planted::RebuiltNextToPending) => tidelock_run_rebuilt_next_to_pending,
    Some(Planted::WrapForgotten) => tidelock_run_wrap_forgotten,
}

unsafe extern "C" {
    fn tidelock_cpu_bytes_programs() -> u64;
}

/// Words of memory that the programs keep for a CPU.
pub(crate) fn cpu_words() -> usize {
    // SAFETY: the function has no arguments and returns a constant.
    let bytes = unsafe { tidelock_cpu_bytes_programs() };
    usize::try_from(bytes).expect("a few kilobytes").div_ceil(8)
}

/// A member's part of a call.
pub(crate) struct Of<'a> {
    pub planted: Option<Planted>,
    pub config: &'a Config,
    pub peers: &'a [AddressValue],
    pub ways: &'a [WayValue],
    pub cpu: &'a mut [u64],
}

/// Returns the verdict, the mark and the frame as the program has left it.
pub(crate) fn run(
    of: Of<'_>,
    maps: &Maps<'_>,
    direction: Direction,
    interface: u32,
    frame: &[u8],
) -> (i32, u32, Vec<u8>) {
    assert!(of.cpu.len() >= cpu_words(), "the programs write to all of it");
    assert!(frame.len() >= crate::ETHERNET_BYTES, "a frame has an Ethernet header");
    let neighbours: Vec<_> = maps
        .neighbours
        .iter()
        .map(|(address, pending)| AddressPending {
            address: crate::words_of(*address),
            pending: *pending,
        })
        .collect();
    let mut buffer = vec![0; HEADROOM];
    buffer.extend_from_slice(frame);
    let range = buffer.as_mut_ptr_range();
    let mut call = Call {
        config: of.config,
        pending: maps.pending,
        committed: maps.committed,
        crossing: maps.crossing,
        cpu: of.cpu.as_mut_ptr(),
        peers: of.peers.as_ptr(),
        ways: of.ways.as_ptr(),
        neighbours: neighbours.as_ptr(),
        interfaces: maps.interfaces.as_ptr(),
        peers_count: of.peers.len() as u64,
        ways_count: of.ways.len() as u64,
        neighbours_count: neighbours.len() as u64,
        interfaces_count: maps.interfaces.len() as u64,
        boot_ns: maps.now.0,
        // SAFETY: the buffer is at least as long.
        frame: unsafe { range.start.add(HEADROOM) },
        frame_bytes: u32::try_from(frame.len()).expect("a frame is short"),
        interface,
        mark: 0,
        has_judge: maps.has_judge.into(),
        to_guest: (direction == Direction::ToGuest).into(),
    };
    // SAFETY: all that the call points to is borrowed until it returns, has the layout that C knows (repr(C), and the
    // types of tidelock-tagging, which the kernel's copy of the programs is given as well), and as many elements as
    // the counts say. The cells are atomics: the programs change P and the crossing by atomic instructions, and only
    // read C. The CPU's memory and the buffer are borrowed mutably, and are as large as C takes them to be: the
    // programs reach a frame by its length alone, and make it longer only into the headroom, by one tag, which
    // `Programs::new` bounds. Nothing of it is kept: `current` is of this thread, and reset.
    let verdict = unsafe { run_of(of.planted)(&raw mut call) };
    let start = call.frame.addr() - range.start.addr();
    let frame = &buffer[start..start + call.frame_bytes as usize];
    (verdict, call.mark, frame.to_vec())
}
