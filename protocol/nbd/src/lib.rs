//! NBD server protocol without I/O: bytes in, events and reply bytes out.
//!
//! One [`Session`] is one client connection. The caller owns the socket and the buffers:
//!
//! 1. it sends what [`Session::output`] holds (the greeting is there from the start);
//! 2. it gives received bytes to [`Session::next`] and acts on the [`Event`] that comes back;
//! 3. after a WRITE it takes the payload from the stream itself, straight into its own buffer,
//!    and reports it with [`Session::payload_taken`];
//! 4. it answers requests in any order with the [`ReplyEncoder`], whose headers it sends
//!    together with its own data (`writev`), so that no data is copied here.
//!
//! Invariant: a request that reaches the caller lies inside the export, is allowed on it and
//! carries only flags that were negotiated. Everything else is answered here, or ends the
//! connection. Every buffer is bounded ([`limits`]).
//!
//! Source: the NBD protocol document (`doc/proto.md` of the NetworkBlockDevice project), fixed
//! newstyle negotiation, structured replies, `base:allocation`. TLS and oldstyle are not spoken.

#![forbid(unsafe_code)]

mod errno;
mod error;
mod export;
mod extents;
pub mod limits;
mod negotiation;
mod reply;
mod request;
mod session;
mod users;
pub mod wire;

pub use errno::Errno;
pub use error::{ExportError, ProtocolError};
pub use export::{BlockSize, Export, ExportTable, Features};
pub use extents::{Extent, ExtentState};
pub use reply::{ChunkPosition, ReplyEncoder, ReplyHeader};
pub use request::{Command, Cookie, Request, RequestFlags};
pub use session::{Event, Session, Step};
pub use users::{Place, Users};
