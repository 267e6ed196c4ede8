//! Errors of a server, sorted by their SQLSTATE and by the point at which they come.

use crate::failure::{Failure, Phase, ServerError};
use crate::frame::shown;
use crate::terms::{Position, SlotName};
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::ErrorResponseBody;

/// Reads the fields of an error. `None` if it does not have the form of one.
pub(crate) fn read(body: &ErrorResponseBody) -> Option<ServerError> {
    let (mut sqlstate, mut message, mut detail) = (None, None, None);
    let mut fields = body.fields();
    while let Some(field) = fields.next().ok()? {
        let of = match field.type_() {
            b'C' => &mut sqlstate,
            b'M' => &mut message,
            b'D' => &mut detail,
            _ => continue,
        };
        *of = Some(shown(field.value_bytes()));
    }
    let sqlstate = sqlstate?.chars().take(5).collect();
    let detail = detail.map_or_else(String::new, |detail| format!(": {detail}"));
    Some(ServerError { sqlstate, text: message? + &detail })
}

/// Context in which an error came.
pub(crate) struct Context<'a> {
    pub phase: Phase,
    pub slot: Option<&'a SlotName>,
    /// Next position of the log that is wanted.
    pub from: Option<Position>,
    /// True if the server keeps no log for the slot.
    pub slot_keeps_nothing: bool,
}

/// Gives an error its name. Only the SQLSTATE counts: messages are in the server's language.
pub(crate) fn classify(context: &Context<'_>, error: ServerError) -> Failure {
    use Phase::{CreateSlot, Login, ReadSlot, Start, Stream};
    let phase = context.phase;
    let sqlstate = error.sqlstate.clone();
    match (phase, sqlstate.as_str(), context.slot, context.from) {
        (Login, "28P01", ..) => Failure::PasswordWrong(error),
        (Login, "28000" | "42501", ..) => Failure::NotAllowed(error),
        (_, "53300", ..) => Failure::NoPlace(error),
        (_, "57P03", ..) => Failure::NotReady(error),
        (_, "57P01" | "57P02", ..) => Failure::ServerEnded,
        (CreateSlot, "53400", ..) => Failure::SlotsFull(error),
        (Start | CreateSlot | ReadSlot, "55006", Some(slot), _) => {
            Failure::SlotInUse { slot: slot.clone(), error }
        }
        (Start, "42704", Some(slot), _) => Failure::SlotMissing { slot: slot.clone() },
        (Start, "55000", Some(slot), _) => {
            Failure::SlotLost { slot: slot.clone(), error: Some(error) }
        }
        (Start | Stream, "58P01", Some(slot), _) if context.slot_keeps_nothing => {
            Failure::SlotLost { slot: slot.clone(), error: Some(error) }
        }
        (Start | Stream, "58P01", _, Some(from)) => Failure::WalRemoved { from, error },
        _ => Failure::Server { phase, error },
    }
}
