//! The data sets of PTP that tell of the clock's error.

use super::PortIdentity;
use crate::bytes::Bytes;

/// Nanoseconds times 2^16, as PTP writes intervals.
fn interval_ns(scaled: i64) -> i64 {
    scaled >> 16
}

/// State of a port (`portState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// `UNCALIBRATED`: a master was chosen, the servo is not locked.
    Uncalibrated,
    /// `SLAVE`: the servo is locked.
    Slave,
    /// Any other: the clock does not follow this port.
    Other(u8),
}

impl From<u8> for PortState {
    fn from(code: u8) -> PortState {
        match code {
            8 => PortState::Uncalibrated,
            9 => PortState::Slave,
            other => PortState::Other(other),
        }
    }
}

/// `PORT_DATA_SET`, 26 bytes: port identity (10), state (1), log interval of delay requests (1), mean delay to the
/// peer (8, scaled), log interval of announcements (1), announcements that may be missing (1), log interval of syncs
/// (1), delay mechanism (1), log interval of peer delay requests (1), version (1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortDataSet {
    /// The port.
    pub port: PortIdentity,
    /// The port's state.
    pub state: PortState,
    /// Delay to the neighbour, where the delay is measured from peer to peer.
    pub peer_delay_ns: i64,
    /// True if the delay is measured from peer to peer, and not to the master.
    pub is_peer_to_peer: bool,
}

const PEER_TO_PEER: u8 = 2;

impl PortDataSet {
    pub(super) fn read(bytes: &mut Bytes<'_>) -> Option<PortDataSet> {
        let port = PortIdentity::read(bytes)?;
        let state = PortState::from(bytes.u8()?);
        bytes.skip(1)?;
        let peer_delay_ns = interval_ns(bytes.i64()?);
        bytes.skip(3)?;
        let is_peer_to_peer = bytes.u8()? == PEER_TO_PEER;
        bytes.skip(2)?;
        Some(PortDataSet { port, state, peer_delay_ns, is_peer_to_peer })
    }
}

/// `CURRENT_DATA_SET`, 18 bytes: steps to the grandmaster (2), offset from the master (8, scaled), mean delay of the
/// path (8, scaled).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentDataSet {
    /// Boundary clocks on the way to the grandmaster, and one.
    pub steps_removed: u16,
    /// Clock less master.
    pub offset_ns: i64,
    /// Half of the round trip to the master; 0 before it was measured, and where it is measured from peer to peer.
    pub path_delay_ns: i64,
}

impl CurrentDataSet {
    pub(super) fn read(bytes: &mut Bytes<'_>) -> Option<CurrentDataSet> {
        Some(CurrentDataSet {
            steps_removed: bytes.u16()?,
            offset_ns: interval_ns(bytes.i64()?),
            path_delay_ns: interval_ns(bytes.i64()?),
        })
    }
}

/// `PARENT_DATA_SET`, 32 bytes: port identity of the master (10), statistics (1), reserved (1), observed variance (2),
/// observed phase change rate (4); of the grandmaster: priority 1 (1), class (1), accuracy (1), variance (2), priority
/// 2 (1), identity (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentDataSet {
    /// The master's port.
    pub parent: PortIdentity,
    /// `clockClass` of the grandmaster: 6 has a reference, 7 had one, 248 never has.
    pub master_class: u8,
    /// `clockAccuracy` of the grandmaster.
    pub master_accuracy: u8,
    /// Identity of the grandmaster.
    pub master: [u8; 8],
}

impl ParentDataSet {
    pub(super) fn read(bytes: &mut Bytes<'_>) -> Option<ParentDataSet> {
        let parent = PortIdentity::read(bytes)?;
        bytes.skip(1 + 1 + 2 + 4 + 1)?;
        let (master_class, master_accuracy) = (bytes.u8()?, bytes.u8()?);
        bytes.skip(2 + 1)?;
        Some(ParentDataSet { parent, master_class, master_accuracy, master: bytes.take()? })
    }
}

/// Error that a `clockAccuracy` stands for (IEEE 1588-2019, table 5), rounded up. `None`: the grandmaster does not
/// know, as `ptp4l` says unless it is configured otherwise, or the value is reserved. "Worse than 10 s" has no bound.
#[must_use]
pub fn accuracy_ns(code: u8) -> Option<u64> {
    // 1, 2.5, 10, 25, 100 and 250 ps, ns, us and ms, and then 1 s.
    const TENTHS_OF_PS: [u64; 6] = [10, 25, 100, 250, 1_000, 2_500];
    let nth = code.checked_sub(0x17)?;
    match nth {
        0..25 => {
            let unit = 1_000u64.pow(u32::from(nth / 6));
            Some((TENTHS_OF_PS[usize::from(nth % 6)] * unit).div_ceil(10_000))
        }
        25 => Some(10_000_000_000),
        26 => Some(u64::MAX),
        _ => None,
    }
}

/// `TIME_STATUS_NP`, 50 bytes: offset from the master (8, nanoseconds), when the last sync came in (8, nanoseconds of
/// the clock that `ptp4l` steers), cumulative rate offset (4), last phase change of the grandmaster (4), indicator of
/// its time base (2), last phase change (12), whether there is a grandmaster other than this clock (4), identity of
/// the grandmaster (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeStatus {
    /// Clock less master, as of the last sync.
    pub offset_ns: i64,
    /// Time that the clock showed at the last sync; 0 after it was stepped, and before the first sync of a new master.
    pub ingress_ns: i64,
    /// True if another clock is the grandmaster.
    pub has_master: bool,
    /// Identity of the grandmaster.
    pub master: [u8; 8],
}

impl TimeStatus {
    pub(super) fn read(bytes: &mut Bytes<'_>) -> Option<TimeStatus> {
        let (offset_ns, ingress_ns) = (bytes.i64()?, bytes.i64()?);
        bytes.skip(4 + 4 + 2 + 12)?;
        let has_master = bytes.u32()? != 0;
        Some(TimeStatus { offset_ns, ingress_ns, has_master, master: bytes.take()? })
    }
}

/// `PORT_PROPERTIES_NP`: port identity (10), state (1), kind of timestamps (1), name of the interface (its length in 1,
/// and so many), and a zero if that makes the length even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortProperties {
    /// True if the clock of the network card makes the timestamps: that clock is measured and steered, not the wall
    /// clock.
    pub is_card_clock: bool,
}

/// Kinds of timestamps by which `ptp4l` steers the wall clock: by software, and by hardware in the wall clock's time.
const OF_THE_WALL_CLOCK: [u8; 2] = [0, 2];

impl PortProperties {
    pub(super) fn read(bytes: &mut Bytes<'_>) -> Option<PortProperties> {
        PortIdentity::read(bytes)?;
        bytes.skip(1)?;
        let (kind, length) = (bytes.u8()?, bytes.u8()?);
        bytes.skip(usize::from(length) + usize::from(length.is_multiple_of(2)))?;
        Some(PortProperties { is_card_clock: !OF_THE_WALL_CLOCK.contains(&kind) })
    }
}
