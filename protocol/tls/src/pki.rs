//! An authority of one's own and the certificates that it issues.
//!
//! A certificate is for one role: a stolen host key cannot pose as the backup.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use time::OffsetDateTime;
use x509_parser::parse_x509_certificate;
use x509_parser::pem::parse_x509_pem;

use crate::Role;
use crate::error::TlsError;

/// Certificates begin to be valid a little earlier: the sites' clocks are not the same.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// A certificate and its private key, both PEM.
pub struct Issued {
    /// The certificate.
    pub certificate_pem: String,
    /// The private key, PKCS #8. To be kept with mode 0600.
    pub key_pem: String,
}

/// What signs the certificates of both sites.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new authority: its certificate, and the key that never leaves the operator's hands.
    pub fn create(name: &str, now: SystemTime, valid_for: Duration) -> Result<Issued, TlsError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = called(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = span(now, valid_for);
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }

    /// An authority that was created earlier.
    pub fn from_pem(certificate_pem: &str, key_pem: &str) -> Result<Self, TlsError> {
        let key = KeyPair::from_pem(key_pem)?;
        let malformed = || TlsError::Issue(rcgen::Error::CouldNotParseCertificate);
        let (_, pem) = parse_x509_pem(certificate_pem.as_bytes()).map_err(|_| malformed())?;
        let (_, parsed) = parse_x509_certificate(&pem.contents).map_err(|_| malformed())?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(TlsError::KeyMismatch {
                certificate: "of the authority".into(),
                key: "of the authority".into(),
            });
        }
        Ok(Self { issuer: Issuer::from_ca_cert_pem(certificate_pem, key)? })
    }

    /// A certificate for a host or a backup server. `names` are DNS names or addresses; the first
    /// is what the peer knows it by.
    pub fn issue(
        &self,
        role: Role,
        names: &[String],
        now: SystemTime,
        valid_for: Duration,
    ) -> Result<Issued, TlsError> {
        let first = names.first().ok_or(TlsError::NoName { path: None })?;
        let mut params = CertificateParams::default();
        params.distinguished_name = called(first);
        params.subject_alt_names =
            names.iter().map(|name| alternative(name)).collect::<Result<_, _>>()?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match role {
            Role::Host => ExtendedKeyUsagePurpose::ClientAuth,
            Role::Backup => ExtendedKeyUsagePurpose::ServerAuth,
        }];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = span(now, valid_for);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }
}

fn alternative(name: &str) -> Result<SanType, TlsError> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    // The same check as the peer makes when it looks for the name.
    crate::peer::server_name(name)?;
    Ok(SanType::DnsName(name.to_owned().try_into()?))
}

fn called(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn span(now: SystemTime, valid_for: Duration) -> (OffsetDateTime, OffsetDateTime) {
    let now = OffsetDateTime::from(now);
    (now - CLOCK_SKEW, now + valid_for)
}
