//! A look at `ptp4l`: five requests, and one [`Answer`] out of their responses.
//!
//! The state of the servo has no data set of its own. `ptp4l` puts the port that it follows into SLAVE when the servo
//! locks, and back into UNCALIBRATED when the servo loses its lock or steps the clock; without announcements the port
//! leaves both states. In `free_running` mode the port stays UNCALIBRATED, rightly: nobody steers the clock.

use super::data::{CurrentDataSet, ParentDataSet, PortState, TimeStatus, accuracy_ns};
use super::{Asker, Body, Id, PtpError, REQUEST_BYTES, decode, request};
use crate::sample::{Answer, MasterId, NoSample, Sample, Servo, Taken};

/// Requests of a look, in their order. `ptp4l` answers in the same order, and for the first two once for each port: all
/// of these responses come before the last one.
const ASKED: [Id; 5] = [
    Id::PortDataSet,
    Id::PortPropertiesNp,
    Id::CurrentDataSet,
    Id::ParentDataSet,
    Id::TimeStatusNp,
];
/// Datagrams of one look, at most. A switch with `ptp4l` has a port for each of its sockets.
const DATAGRAMS_MAX: u32 = 512;

/// Result of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More responses are to come.
    Waiting,
    /// Every response has come.
    Done(Answer),
}

/// Reason why a look brings nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookError {
    /// A datagram that is no response.
    #[error("ptp4l sent garbage: {0}")]
    Garbage(#[from] PtpError),
    /// `ptp4l` does not answer this request.
    #[error("ptp4l refuses managementId {id:#06x} with error {error:#06x}")]
    Refused {
        /// managementId that was asked for.
        id: u16,
        /// The cause.
        error: u16,
    },
    /// A response to another request than its sequence says.
    #[error("ptp4l answered another question than was asked")]
    WrongAnswer,
    /// No end of responses.
    #[error("ptp4l sent more than {DATAGRAMS_MAX} datagrams for one look")]
    TooMany,
}

/// A look that has begun.
#[derive(Clone, Debug)]
pub struct Look {
    asker: Asker,
    first: u16,
    datagrams: u32,
    servo: Option<Servo>,
    /// True if a port has the timestamps of a network card. Where `ptp4l` refuses to say, the guard compares the times.
    is_card_clock: Option<bool>,
    /// Delay to the neighbour of the port that is followed, where the delay is measured so.
    peer_delay_ns: Option<i64>,
    current: Option<CurrentDataSet>,
    parent: Option<ParentDataSet>,
}

impl Look {
    /// Number of sequences that a look takes: the next one begins after these.
    pub const SEQUENCES: u16 = ASKED.len() as u16;

    /// A look whose requests have these sequences, from `first` on.
    #[must_use]
    pub fn new(asker: Asker, first: u16) -> Self {
        Self {
            asker,
            first,
            datagrams: 0,
            servo: None,
            is_card_clock: None,
            peer_delay_ns: None,
            current: None,
            parent: None,
        }
    }

    /// Datagrams to send, in this order.
    #[must_use]
    pub fn requests(&self) -> [[u8; REQUEST_BYTES]; ASKED.len()] {
        let mut sequence = self.first.wrapping_sub(1);
        ASKED.map(|id| {
            sequence = sequence.wrapping_add(1);
            request(&self.asker, sequence, id)
        })
    }

    /// Takes a datagram. Responses to earlier looks are passed over.
    ///
    /// # Errors
    /// The look is over, without an answer.
    pub fn take(&mut self, datagram: &[u8]) -> Result<Progress, LookError> {
        self.datagrams += 1;
        if self.datagrams > DATAGRAMS_MAX {
            return Err(LookError::TooMany);
        }
        let response = decode(datagram)?;
        let nth = usize::from(response.sequence.wrapping_sub(self.first));
        let Some(asked) = ASKED.get(nth) else { return Ok(Progress::Waiting) };
        match (asked, response.body) {
            (Id::PortDataSet, Body::Port(port)) => {
                let servo = match port.state {
                    PortState::Slave => Servo::Locked,
                    PortState::Uncalibrated => Servo::Locking,
                    PortState::Other(_) => Servo::NoMaster,
                };
                if servo == Servo::Locked && port.is_peer_to_peer {
                    let so_far = self.peer_delay_ns.unwrap_or(port.peer_delay_ns);
                    self.peer_delay_ns = Some(so_far.max(port.peer_delay_ns));
                }
                self.servo = Some(best(self.servo.unwrap_or(servo), servo));
            }
            (Id::PortPropertiesNp, Body::PortProperties(port)) => {
                self.is_card_clock = Some(self.is_card_clock.unwrap_or(false) | port.is_card_clock);
            }
            (Id::PortPropertiesNp, Body::Refused { .. }) => self.is_card_clock = Some(false),
            (Id::CurrentDataSet, Body::Current(current)) => self.current = Some(current),
            (Id::ParentDataSet, Body::Parent(parent)) => self.parent = Some(parent),
            (Id::TimeStatusNp, Body::TimeStatus(status)) => return self.answer(&status),
            (_, Body::Refused { id, error }) => return Err(LookError::Refused { id, error }),
            _ => return Err(LookError::WrongAnswer),
        }
        Ok(Progress::Waiting)
    }

    fn answer(&self, status: &TimeStatus) -> Result<Progress, LookError> {
        let (Some(servo), Some(is_card), Some(current), Some(parent)) =
            (self.servo, self.is_card_clock, self.current, self.parent)
        else {
            return Err(LookError::WrongAnswer);
        };
        let at = if is_card { Taken::OnCard } else { Taken::At };
        let servo = if status.has_master { servo } else { Servo::NoMaster };
        Ok(Progress::Done(Answer { servo, sample: self.sample(&current, &parent, status, at) }))
    }

    fn sample(
        &self,
        current: &CurrentDataSet,
        parent: &ParentDataSet,
        status: &TimeStatus,
        at: fn(i64) -> Taken,
    ) -> Result<Sample, NoSample> {
        if parent.master != status.master {
            return Err(NoSample::MasterChanged);
        }
        if status.ingress_ns == 0 || !status.has_master {
            return Err(NoSample::NotMeasured);
        }
        let delay_ns = self.peer_delay_ns.unwrap_or(current.path_delay_ns);
        if delay_ns == 0 {
            return Err(NoSample::DelayUnknown);
        }
        Ok(Sample {
            taken: at(status.ingress_ns),
            offset_ns: status.offset_ns,
            // A negative delay shows corrections of timestamps that are too large: an error of that size.
            delay_ns: delay_ns.unsigned_abs(),
            dispersion_ns: 0,
            master_error_ns: accuracy_ns(parent.master_accuracy),
            master: Some(MasterId(status.master)),
        })
    }
}

/// The state of the clock, of two ports' states: one port is enough.
fn best(a: Servo, b: Servo) -> Servo {
    let rank = |servo| match servo {
        Servo::Locked => 2,
        Servo::Locking => 1,
        _ => 0,
    };
    if rank(b) > rank(a) { b } else { a }
}
