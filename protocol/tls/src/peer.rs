//! Who is at the other end: the names in a certificate that TLS has verified.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rustls_pki_types::{CertificateDer, ServerName};
use time::OffsetDateTime;
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

use crate::error::TlsError;

/// The names that a certificate speaks for. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    names: Vec<String>,
}

impl PeerIdentity {
    /// From the chain that the TLS library has verified (`peer_certificates()`): its first
    /// certificate's DNS names and addresses, or its common name if it has neither.
    pub fn of(chain: &[CertificateDer<'_>]) -> Result<Self, TlsError> {
        let certificate = chain.first().ok_or(TlsError::NoPeerCertificate)?;
        let (_, parsed) = parse_x509_certificate(certificate)
            .map_err(|_| TlsError::Malformed { path: "of the peer".into() })?;
        let alternative = parsed.subject_alternative_name().ok().flatten();
        let mut names: Vec<String> = alternative
            .iter()
            .flat_map(|extension| &extension.value.general_names)
            .filter_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                GeneralName::IPAddress(bytes) => address(bytes).map(|ip| ip.to_string()),
                _ => None,
            })
            .collect();
        if names.is_empty() {
            let common = parsed.subject().iter_common_name().next();
            names.extend(common.and_then(|name| name.as_str().ok()).map(str::to_owned));
        }
        names.retain(|name| !name.is_empty());
        if names.is_empty() { Err(TlsError::NoName { path: None }) } else { Ok(Self { names }) }
    }

    /// The name to log and to know the peer by: the first.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// All names.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether the certificate speaks for this host. Exact but for case: a wildcard is no host.
    #[must_use]
    pub fn speaks_for(&self, host: &str) -> bool {
        self.names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    pub(crate) fn server_name(&self) -> Result<ServerName<'static>, TlsError> {
        server_name(self.name())
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from).ok();
    v4.or_else(|| <[u8; 16]>::try_from(bytes).map(IpAddr::from).ok())
}

/// The name that the backup's certificate must have, in the form that a connector takes.
pub fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::BadName { name: name.to_owned() })
}

/// From when until when a certificate is valid.
pub(crate) fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = parse_x509_certificate(certificate).ok()?;
    let time = |seconds: i64| {
        let seconds = u64::try_from(seconds).unwrap_or(0);
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    };
    let validity = parsed.validity();
    Some((time(validity.not_before.timestamp())?, time(validity.not_after.timestamp())?))
}

/// `2026-11-21`, in UTC.
pub(crate) fn day(time: SystemTime) -> String {
    OffsetDateTime::from(time).date().to_string()
}
