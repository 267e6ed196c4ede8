//! A failed handshake in words that say what to do.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// Explains why a connection failed, if TLS was the reason.
///
/// `peer` names the other side, such as `the backup` or `the host at 192.0.2.7`.
#[must_use]
pub fn explain(error: &io::Error, peer: &str) -> Option<String> {
    // The library's own words end with the address of its manual.
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Some(format!(
            "{peer} ended the connection without a word: its process or machine was killed, or something on the way \
             ended it"
        ));
    }
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidCertificate(reason) => certificate(reason, peer),
        Error::AlertReceived(alert) => alerted(*alert, peer),
        Error::NoCertificatesPresented => {
            format!("{peer} has shown no certificate: is [tls] configured there?")
        }
        Error::NoApplicationProtocol => {
            format!("{peer} speaks TLS but not this protocol: is the address right?")
        }
        Error::InvalidMessage(_) => {
            format!("{peer} does not speak TLS: is the port right, or is it set to plaintext?")
        }
        Error::PeerIncompatible(_) => {
            format!("{peer} does not speak TLS 1.3: is the port right? ({error})")
        }
        other => format!("TLS with {peer} failed: {other}"),
    })
}

fn certificate(reason: &CertificateError, peer: &str) -> String {
    match reason {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("the certificate of {peer} has expired: issue a new one there")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("the certificate of {peer} is not valid yet: compare the clocks")
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("the certificate of {peer} was signed by another authority than ours")
        }
        CertificateError::NotValidForName => {
            format!("the certificate of {peer} is for another name: see server_name")
        }
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "the certificate of {peer} is for {}, not for {}: set server_name to a name it has",
            presented.join(", "),
            expected.to_str(),
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            format!("the certificate of {peer} is for the other role: issue the right one")
        }
        other => format!("the certificate of {peer} is refused: {other}"),
    }
}

fn alerted(alert: AlertDescription, peer: &str) -> String {
    match alert {
        AlertDescription::UnknownCA => {
            format!("{peer} does not know the authority that signed our certificate")
        }
        AlertDescription::CertificateExpired => {
            format!("{peer} says that our certificate is expired or not valid yet")
        }
        AlertDescription::CertificateRequired => format!("{peer} demands a certificate of us"),
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate => {
            format!("{peer} refuses our certificate: is it for the right role?")
        }
        AlertDescription::NoApplicationProtocol => {
            format!("{peer} speaks TLS but not this protocol: is the address right?")
        }
        other => format!("{peer} ended the TLS handshake: {other:?}"),
    }
}
