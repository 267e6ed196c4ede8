//! PTP's management messages (IEEE 1588, clause 15), as `ptp4l` of linuxptp speaks them over its Unix datagram socket.
//!
//! A datagram is a message, big-endian:
//!
//! | offset | bytes | field | here |
//! |---|---|---|---|
//! | 0 | 1 | transport-specific, message type | configured, `0xd` |
//! | 1 | 1 | minor version, version | 2; a minor version is not looked at |
//! | 2 | 2 | length of the message | of the datagram, exactly |
//! | 4 | 1 | domain | configured |
//! | 5 | 1 | reserved | |
//! | 6 | 2 | flags | 0 |
//! | 8 | 8 | correction | 0 |
//! | 16 | 4 | reserved | |
//! | 20 | 10 | source: clock identity (8), port (2) | who asks |
//! | 30 | 2 | sequence | echoed by the response |
//! | 32 | 1 | control | 4 in requests; not looked at |
//! | 33 | 1 | interval | `0x7f` |
//! | 34 | 10 | target: clock identity, port | all ones: every port of whoever reads this |
//! | 44 | 2 | hops: at the start, left | 0: not forwarded to the network |
//! | 46 | 1 | reserved, action | GET 0, RESPONSE 2 |
//! | 47 | 1 | reserved | |
//! | 48 | 2 | TLV: type | 1 MANAGEMENT, 2 MANAGEMENT_ERROR_STATUS |
//! | 50 | 2 | TLV: length of what follows | 2 + data; in a GET: 2 |
//! | 52 | 2 | managementId, or in an error its cause | |
//! | 54 | | data, or in an error the managementId (2) and reserved (4) | |
//!
//! The data of a response has the length of its data set, exactly.
//!
//! `GRANDMASTER_SETTINGS_NP` is not asked: these are the settings of the clock at hand for the case that it becomes
//! grandmaster itself. The accuracy of the grandmaster that is followed is in `PARENT_DATA_SET`.
//!
//! | module | what it is for |
//! |---|---|
//! | [`data`] | the data sets |
//! | [`look`] | the requests of one look, and one answer out of their responses |

pub mod data;
pub mod look;

use crate::bytes::Bytes;
use data::{CurrentDataSet, ParentDataSet, PortDataSet, PortProperties, TimeStatus};

pub use look::{Look, Progress};

const MESSAGE_TYPE: u8 = 0xd;
const VERSION: u8 = 2;
const CONTROL_MANAGEMENT: u8 = 4;
const NO_INTERVAL: u8 = 0x7f;
const GET: u8 = 0;
const RESPONSE: u8 = 2;
const TLV_MANAGEMENT: u16 = 1;
const TLV_ERROR: u16 = 2;
const TLV_AT: usize = 48;
/// Bytes of a TLV that its length does not count.
const TLV_HEADER: usize = 4;
/// Bytes of a request.
pub const REQUEST_BYTES: usize = TLV_AT + TLV_HEADER + 2;
/// Bytes that a response may have at most: what linuxptp has room for.
pub const RESPONSE_BYTES_MAX: usize = 1500;

/// Data sets that are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Id {
    /// State of a port; one response for each.
    PortDataSet,
    /// Offset from the master, delay of the path.
    CurrentDataSet,
    /// Identities of master and grandmaster, and the quality of the grandmaster.
    ParentDataSet,
    /// Offset of the last sample, and when it was taken (linuxptp's own).
    TimeStatusNp,
    /// Kind of a port's timestamps; one response for each (linuxptp's own; `uds_ro_address` does not tell).
    PortPropertiesNp,
}

impl Id {
    /// The number on the wire.
    #[must_use]
    pub fn code(self) -> u16 {
        match self {
            Id::CurrentDataSet => 0x2001,
            Id::ParentDataSet => 0x2002,
            Id::PortDataSet => 0x2004,
            Id::TimeStatusNp => 0xc000,
            Id::PortPropertiesNp => 0xc004,
        }
    }

    fn of(code: u16) -> Option<Id> {
        const ALL: [Id; 5] = [
            Id::PortDataSet,
            Id::CurrentDataSet,
            Id::ParentDataSet,
            Id::TimeStatusNp,
            Id::PortPropertiesNp,
        ];
        ALL.into_iter().find(|id| id.code() == code)
    }
}

/// A clock's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortIdentity {
    /// Identity of the clock.
    pub clock: [u8; 8],
    /// Number of the port, from 1; 0 is the clock itself.
    pub port: u16,
}

impl PortIdentity {
    fn read(bytes: &mut Bytes<'_>) -> Option<PortIdentity> {
        Some(PortIdentity { clock: bytes.take()?, port: bytes.u16()? })
    }
}

/// Sender and addressee of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The asker itself. `ptp4l` ignores messages of its own identity.
    pub source: PortIdentity,
    /// `domainNumber` of `ptp4l`, which ignores messages of other domains.
    pub domain: u8,
    /// `transportSpecific` of `ptp4l`, 0 to 15: 1 for 802.1AS.
    pub transport_specific: u8,
}

/// The bytes of a GET.
#[must_use]
pub fn request(asker: &Asker, sequence: u16, id: Id) -> [u8; REQUEST_BYTES] {
    let mut message = [0; REQUEST_BYTES];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[(asker.transport_specific << 4) | MESSAGE_TYPE, VERSION]);
    put(2, &(REQUEST_BYTES as u16).to_be_bytes());
    put(4, &[asker.domain]);
    put(20, &asker.source.clock);
    put(28, &asker.source.port.to_be_bytes());
    put(30, &sequence.to_be_bytes());
    put(32, &[CONTROL_MANAGEMENT, NO_INTERVAL]);
    put(34, &[0xff; 10]);
    put(46, &[GET]);
    put(48, &TLV_MANAGEMENT.to_be_bytes());
    put(50, &2u16.to_be_bytes());
    put(52, &id.code().to_be_bytes());
    message
}

/// A response to a GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Sequence of the request.
    pub sequence: u16,
    /// Port, or clock, that answers.
    pub source: PortIdentity,
    /// Content.
    pub body: Body,
}

/// Content of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The state of one port.
    Port(PortDataSet),
    /// Offset and delay.
    Current(CurrentDataSet),
    /// Master and grandmaster.
    Parent(ParentDataSet),
    /// The last sample.
    TimeStatus(TimeStatus),
    /// Kind of timestamps of one port.
    PortProperties(PortProperties),
    /// The request was refused.
    Refused {
        /// managementId that was asked for.
        id: u16,
        /// The cause.
        error: u16,
    },
}

/// A datagram that is no response to a GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PtpError {
    /// The datagram ends within the header.
    #[error("the datagram has {0} bytes: too few for a management message")]
    Short(usize),
    /// A message of another type.
    #[error("message type {0:#x} is not management")]
    NotManagement(u8),
    /// Another major version of PTP.
    #[error("version {0} of PTP is not known")]
    Version(u8),
    /// The length in the header is not that of the datagram.
    #[error("the header says {said} bytes, the datagram has {got}")]
    Length {
        /// Bytes by the header.
        said: u16,
        /// Bytes of the datagram.
        got: usize,
    },
    /// A request, a command, or an acknowledgement.
    #[error("action {0} is not a response")]
    NotAResponse(u8),
    /// A TLV that is neither data nor an error.
    #[error("TLV type {0:#x} is neither MANAGEMENT nor MANAGEMENT_ERROR_STATUS")]
    TlvType(u16),
    /// The TLV does not fill the message, or is too short for its head.
    #[error("the TLV says {said} bytes, the message has {got} for it")]
    TlvLength {
        /// Bytes by the TLV.
        said: u16,
        /// Bytes that are left of the datagram.
        got: usize,
    },
    /// A data set that was not asked for.
    #[error("managementId {0:#06x} was not asked for")]
    UnknownId(u16),
    /// A data set of another length.
    #[error("the data of managementId {id:#06x} have {got} bytes")]
    DataLength {
        /// managementId of the data set.
        id: u16,
        /// Bytes of its data.
        got: usize,
    },
}

/// Decodes a datagram of `ptp4l`.
///
/// # Errors
/// Bytes that are not exactly a response to a GET of a known data set, or its refusal.
pub fn decode(datagram: &[u8]) -> Result<Response, PtpError> {
    let short = PtpError::Short(datagram.len());
    let mut header = Bytes(datagram);
    let kind = header.u8().ok_or(short)? & 0xf;
    if kind != MESSAGE_TYPE {
        return Err(PtpError::NotManagement(kind));
    }
    let version = header.u8().ok_or(short)? & 0xf;
    if version != VERSION {
        return Err(PtpError::Version(version));
    }
    let said = header.u16().ok_or(short)?;
    if usize::from(said) != datagram.len() {
        return Err(PtpError::Length { said, got: datagram.len() });
    }
    header.skip(20 - 4).ok_or(short)?;
    let source = PortIdentity::read(&mut header).ok_or(short)?;
    let sequence = header.u16().ok_or(short)?;
    header.skip(46 - 32).ok_or(short)?;
    let action = header.u8().ok_or(short)? & 0xf;
    if action != RESPONSE {
        return Err(PtpError::NotAResponse(action));
    }
    header.skip(1).ok_or(short)?;
    let body = decode_tlv(header).ok_or(short)??;
    Ok(Response { sequence, source, body })
}

/// Decodes the one TLV of a message. `None`: the message ends within its head.
fn decode_tlv(mut tlv: Bytes<'_>) -> Option<Result<Body, PtpError>> {
    let (kind, said) = (tlv.u16()?, tlv.u16()?);
    let got = tlv.0.len();
    let first = tlv.u16()?;
    if usize::from(said) != got {
        return Some(Err(PtpError::TlvLength { said, got }));
    }
    match kind {
        TLV_MANAGEMENT => Some(decode_data(first, tlv)),
        TLV_ERROR => {
            let id = tlv.u16();
            // A reserved field of four bytes, and a text that explains.
            let refused =
                id.filter(|_| tlv.0.len() >= 4).map(|id| Body::Refused { id, error: first });
            Some(refused.ok_or(PtpError::TlvLength { said, got }))
        }
        other => Some(Err(PtpError::TlvType(other))),
    }
}

fn decode_data(code: u16, data: Bytes<'_>) -> Result<Body, PtpError> {
    let id = Id::of(code).ok_or(PtpError::UnknownId(code))?;
    let mut rest = data;
    let body = match id {
        Id::PortDataSet => PortDataSet::read(&mut rest).map(Body::Port),
        Id::CurrentDataSet => CurrentDataSet::read(&mut rest).map(Body::Current),
        Id::ParentDataSet => ParentDataSet::read(&mut rest).map(Body::Parent),
        Id::TimeStatusNp => TimeStatus::read(&mut rest).map(Body::TimeStatus),
        Id::PortPropertiesNp => PortProperties::read(&mut rest).map(Body::PortProperties),
    };
    body.filter(|_| rest.0.is_empty()).ok_or(PtpError::DataLength { id: code, got: data.0.len() })
}

#[cfg(test)]
mod tests;
