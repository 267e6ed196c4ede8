//! Bounds on what a peer can make this side keep.

/// Longest message of a server that is read, with its head. A walsender puts at most 128 KiB of the log into one.
pub const SERVER_MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Longest message of a client that is read, with its head. A standby's commands have a few hundred bytes.
pub const CLIENT_MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Longest part of the log that is put into one message, PostgreSQL's own bound.
pub const WAL_MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Output of the sender that waits for its socket, from which on no more log is wanted and no more commands are read.
pub const OUTPUT_BYTES_HIGH: usize = 1 << 20;
/// Output of the receiver that waits for its socket, from which on a status update is put off until there is room.
pub const STATUS_BACKLOG_BYTES: usize = 4 << 10;
/// Most bytes of a peer's text that an error carries.
pub const TEXT_BYTES_MAX: usize = 400;
/// Most rows of an answer to a query.
pub const ANSWER_ROWS_MAX: usize = 1000;
/// Most columns of a row that are looked at. No answer that is asked for has more than four.
pub(crate) const COLUMNS_MAX: usize = 16;
/// Most requests for encryption before the start-up message: one for each of the two kinds.
pub(crate) const ENCRYPTION_REQUESTS_MAX: u8 = 2;

const _: () = assert!(WAL_MESSAGE_BYTES_MAX < SERVER_MESSAGE_BYTES_MAX);
const _: () = assert!(STATUS_BACKLOG_BYTES < OUTPUT_BYTES_HIGH);
