//! PEM texts to checked rustls configurations.
//!
//! Each configuration is tried at load with the very verifier that the other side will use, so
//! that a certificate that the peer would refuse is an error here, where it can be put right,
//! and not an alert in the peer's log.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::Resumption;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::error::TlsError;
use crate::peer::{PeerIdentity, validity};
use crate::{ALPN, Role};

/// Where the three files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// This side's certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Files {
    /// Reads and decodes the files. To be called before each connection, so that renewed
    /// certificates are taken up without a restart.
    pub fn load(&self) -> Result<Credentials, TlsError> {
        use std::os::unix::fs::PermissionsExt;
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
        };
        let (ca, certificate, key) = (read(&self.ca)?, read(&self.certificate)?, read(&self.key)?);
        let metadata = std::fs::metadata(&self.key)
            .map_err(|source| TlsError::Read { path: self.key.clone(), source })?;
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & 0o007 != 0 {
            return Err(TlsError::KeyExposed { path: self.key.clone(), mode });
        }
        Credentials::from_pem(
            Pem { path: &self.ca, text: &ca },
            Pem { path: &self.certificate, text: &certificate },
            Pem { path: &self.key, text: &key },
        )
    }
}

/// A PEM text, and the path that errors call it by.
#[derive(Clone, Copy, Debug)]
pub struct Pem<'a> {
    /// Where it comes from.
    pub path: &'a Path,
    /// Its contents.
    pub text: &'a [u8],
}

/// One side's certificate and key, and the authority that both sides trust.
#[derive(Debug)]
pub struct Credentials {
    files: Files,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
    identity: PeerIdentity,
}

impl Credentials {
    /// Decodes PEM texts. What they are good for is checked when a configuration is made.
    pub fn from_pem(ca: Pem<'_>, certificate: Pem<'_>, key: Pem<'_>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            let malformed = |_| TlsError::Malformed { path: ca.path.to_owned() };
            roots.add(root).map_err(malformed)?;
        }
        let chain = certificates(certificate)?;
        let identity = PeerIdentity::of(&chain).map_err(|error| match error {
            TlsError::NoName { .. } => TlsError::NoName { path: Some(certificate.path.to_owned()) },
            _ => TlsError::Malformed { path: certificate.path.to_owned() },
        })?;
        let no_key = |_| TlsError::NoKey { path: key.path.to_owned() };
        Ok(Self {
            files: Files {
                ca: ca.path.to_owned(),
                certificate: certificate.path.to_owned(),
                key: key.path.to_owned(),
            },
            roots: Arc::new(roots),
            chain,
            key: PrivateKeyDer::from_pem_slice(key.text).map_err(no_key)?,
            provider: Arc::new(rustls::crypto::ring::default_provider()),
            identity,
        })
    }

    /// Whom the own certificate names.
    #[must_use]
    pub fn identity(&self) -> &PeerIdentity {
        &self.identity
    }

    /// How long the own certificate is still valid; zero if it is not.
    #[must_use]
    pub fn valid_for(&self, now: SystemTime) -> Duration {
        let end = validity(&self.chain[0]).map(|(_, end)| end);
        end.and_then(|end| end.duration_since(now).ok()).unwrap_or_default()
    }

    /// The configuration of a host that connects to the backup.
    pub fn host_config(&self, now: SystemTime) -> Result<Arc<ClientConfig>, TlsError> {
        let verifier = self.client_verifier()?;
        verifier
            .verify_client_cert(&self.chain[0], &self.chain[1..], unix(now))
            .map_err(|error| self.own_certificate(error, Role::Host))?;
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|source| self.refused(source))?
            .with_root_certificates(Arc::clone(&self.roots))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.own_certificate(error, Role::Host))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would not verify certificates again.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The configuration of a backup server that hosts connect to.
    pub fn backup_config(&self, now: SystemTime) -> Result<Arc<ServerConfig>, TlsError> {
        let verifier = WebPkiServerVerifier::builder_with_provider(
            Arc::clone(&self.roots),
            Arc::clone(&self.provider),
        )
        .build()
        .map_err(|error| self.refused(rustls::Error::General(error.to_string())))?;
        let name = self.identity.server_name()?;
        self.verify_as_host_would(verifier.as_ref(), &name, now)?;
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|source| self.refused(source))?
            .with_client_cert_verifier(self.client_verifier()?)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| self.own_certificate(error, Role::Backup))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    fn verify_as_host_would(
        &self,
        verifier: &dyn ServerCertVerifier,
        name: &ServerName<'_>,
        now: SystemTime,
    ) -> Result<(), TlsError> {
        verifier
            .verify_server_cert(&self.chain[0], &self.chain[1..], name, &[], unix(now))
            .map(drop)
            .map_err(|error| self.own_certificate(error, Role::Backup))
    }

    fn client_verifier(
        &self,
    ) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, TlsError> {
        WebPkiClientVerifier::builder_with_provider(
            Arc::clone(&self.roots),
            Arc::clone(&self.provider),
        )
        .build()
        .map_err(|error| self.refused(rustls::Error::General(error.to_string())))
    }

    fn refused(&self, source: rustls::Error) -> TlsError {
        TlsError::Refused { path: self.files.certificate.clone(), source }
    }

    /// What is wrong with the own certificate, by what the verifier says.
    fn own_certificate(&self, error: rustls::Error, wanted: Role) -> TlsError {
        let path = self.files.certificate.clone();
        let (from, until) = validity(&self.chain[0]).unzip();
        let day = |time: Option<SystemTime>| time.map(crate::peer::day).unwrap_or_default();
        match error {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::KeyMismatch { certificate: path, key: self.files.key.clone() }
            }
            rustls::Error::InvalidCertificate(reason) => match reason {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    TlsError::Expired { path, on: day(until) }
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    TlsError::NotYetValid { path, from: day(from) }
                }
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    TlsError::WrongAuthority { certificate: path, ca: self.files.ca.clone() }
                }
                CertificateError::InvalidPurpose
                | CertificateError::InvalidPurposeContext { .. } => {
                    TlsError::WrongRole { path, wanted }
                }
                other => {
                    TlsError::Refused { path, source: rustls::Error::InvalidCertificate(other) }
                }
            },
            source => TlsError::Refused { path, source },
        }
    }
}

fn unix(now: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

fn certificates(pem: Pem<'_>) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let path = || pem.path.to_owned();
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.text).collect();
    let all = all.map_err(|_| TlsError::Malformed { path: path() })?;
    if all.is_empty() { Err(TlsError::NoCertificate { path: path() }) } else { Ok(all) }
}
