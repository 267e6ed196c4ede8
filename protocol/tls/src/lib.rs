//! TLS between the sites: version 1.3 only, certificates on both sides, one own authority, and
//! the making of those certificates so that a newcomer needs no openssl.
//!
//! Invariant: a connection that either configuration accepts is with a peer whose certificate was
//! signed by the one configured authority **for that peer's role**, and was valid when the
//! connection was made. Sessions are never resumed, so an expired certificate ends with the
//! connection that it opened. No public authority is ever trusted.
//!
//! Note for the server: a client hears that its certificate was refused only after its own connect
//! has succeeded (TLS 1.3). Nothing is believed before the application's hello.
//!
//! Sans-I/O but for [`Files::load`]: PEM texts and the time are arguments.
//!
//! | module | what it is for |
//! |---|---|
//! | [`credentials`] | PEM texts to checked rustls configurations |
//! | [`peer`] | who is at the other end: names of a certificate |
//! | [`explain`] | a failed handshake in words that say what to do |
//! | [`pki`] | an authority and the certificates that it issues |
#![forbid(unsafe_code)]

pub mod credentials;
pub mod error;
pub mod explain;
pub mod peer;
pub mod pki;

pub use credentials::{Credentials, Files, Pem};
pub use error::TlsError;
pub use explain::explain;
pub use peer::{PeerIdentity, server_name};

/// The application protocol that both sides must name (RFC 7301). Another version of the
/// replication protocol that cannot be negotiated inside it gets another name.
pub const ALPN: &[u8] = b"tidelock/1";

/// What a certificate is for. A host's certificate cannot pose as the backup, nor the other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A primary site's host: connects.
    Host,
    /// The backup server: listens.
    Backup,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Host => "host",
            Role::Backup => "backup",
        })
    }
}
