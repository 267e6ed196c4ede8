//! Answers of a source about the wall clock, in the same words for each kind of source.

use serde::Serialize;
use std::fmt;

/// State of whoever steers the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Servo {
    /// No source has answered yet.
    #[default]
    Unknown,
    /// The clock follows its master.
    Locked,
    /// A master is there, and the clock is being pulled to it.
    Locking,
    /// No master: the clock runs free, or is a master itself.
    NoMaster,
    /// The source did answer, and does not any more.
    Gone,
}

/// Identity of the clock at the top: the grandmaster of PTP. Hosts whose stamps are compared have the same one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(into = "String")]
pub struct MasterId(pub [u8; 8]);

impl fmt::Display for MasterId {
    /// Writes it as `pmc` does: `001122.fffe.334455`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g, h, i] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}.{d:02x}{e:02x}.{g:02x}{h:02x}{i:02x}")
    }
}

impl fmt::Debug for MasterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<MasterId> for String {
    fn from(id: MasterId) -> String {
        id.to_string()
    }
}

/// Time of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Once, when the measured clock showed this: nanoseconds since its epoch. The same sample is told again until
    /// there is a new one.
    At(i64),
    /// Time, like that of `At`, shown by the clock of a network card: `ptp4l` steers that clock, and something else
    /// copies it into the wall clock.
    OnCard(i64),
    /// Anew for each answer: the source extrapolates to the moment at which it is asked.
    WhenAsked,
}

/// A measurement of the clock's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Time at which it was taken.
    pub taken: Taken,
    /// Clock less master, as measured.
    pub offset_ns: i64,
    /// Half of the measured round trip. The offset is wrong by no more, whatever the asymmetry of the path.
    pub delay_ns: u64,
    /// Further error that the source itself admits.
    pub dispersion_ns: u64,
    /// Error of the grandmaster, where it says so.
    pub master_error_ns: Option<u64>,
    /// The grandmaster, where the source has one that all hosts share.
    pub master: Option<MasterId>,
}

/// Reason why an answer has no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoSample {
    /// No measurement since the source started, changed its master or stepped the clock.
    NotMeasured,
    /// The delay of the path was not measured yet.
    DelayUnknown,
    /// The source changed its master between two parts of its answer.
    MasterChanged,
}

/// Full answer of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// State of the servo.
    pub servo: Servo,
    /// The last measurement.
    pub sample: Result<Sample, NoSample>,
}
