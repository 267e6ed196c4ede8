//! What can be wrong with certificates and keys, each with what to do about it.

use std::io;
use std::path::PathBuf;

use crate::Role;

/// Why a TLS configuration or a certificate could not be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read.
    #[error(
        "cannot read {path}: {source}; `tidelock pki` makes the files, each site needs its copy"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The private key can be read by every user.
    #[error(
        "{path} holds a private key that every user can read (mode {mode:04o}); run: chmod 600 {path}"
    )]
    KeyExposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file has no certificate in it.
    #[error("{path} contains no certificate; it must be PEM text with BEGIN CERTIFICATE")]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// A file has no private key in it.
    #[error("{path} contains no private key; it must be PEM text with BEGIN PRIVATE KEY")]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// A certificate cannot be decoded.
    #[error("{path} contains a damaged certificate; copy it again or issue a new one")]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// The private key belongs to another certificate.
    #[error(
        "the key {key} does not belong to the certificate {certificate}; use the pair that was issued together"
    )]
    KeyMismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// The validity has ended.
    #[error("the certificate {path} expired on {on}; issue a new one with `tidelock pki issue`")]
    Expired {
        /// The file.
        path: PathBuf,
        /// When.
        on: String,
    },
    /// The validity has not begun.
    #[error("the certificate {path} is valid only from {from}; check this machine's clock")]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// When.
        from: String,
    },
    /// Another authority signed the certificate.
    #[error(
        "the certificate {certificate} was not signed by the authority {ca}; both sites need the same authority"
    )]
    WrongAuthority {
        /// The certificate's file.
        certificate: PathBuf,
        /// The authority's file.
        ca: PathBuf,
    },
    /// The certificate is for the other side.
    #[error(
        "the certificate {path} is not for a {wanted}; issue one with `tidelock pki issue --{wanted}`"
    )]
    WrongRole {
        /// The file.
        path: PathBuf,
        /// What is needed.
        wanted: Role,
    },
    /// A certificate names nobody.
    #[error("the certificate{} has no DNS name and no common name; issue a new one", .path.as_ref().map(|p| format!(" {}", p.display())).unwrap_or_default())]
    NoName {
        /// The file, if it comes from one.
        path: Option<PathBuf>,
    },
    /// A name that no certificate can be for.
    #[error("\"{name}\" is neither a DNS name nor an IP address")]
    BadName {
        /// The name.
        name: String,
    },
    /// The peer has shown no certificate.
    #[error("the peer has shown no certificate")]
    NoPeerCertificate,
    /// Making a certificate failed.
    #[error("cannot make the certificate: {0}")]
    Issue(#[from] rcgen::Error),
    /// Anything else that the TLS library refuses.
    #[error("{path} cannot be used for TLS: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}
