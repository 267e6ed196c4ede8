//! Both configurations against each other, over memory.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use tidelock_tls::pki::{Authority, Issued};
use tidelock_tls::{
    ALPN, Credentials, Files, PeerIdentity, Pem, Role, TlsError, explain, server_name,
};

const DAY: Duration = Duration::from_secs(86_400);

fn now() -> SystemTime {
    SystemTime::now()
}

struct Site {
    ca: Issued,
    authority: Authority,
}

fn site() -> Site {
    let ca = Authority::create("tidelock test", now(), 30 * DAY).unwrap();
    let authority = Authority::from_pem(&ca.certificate_pem, &ca.key_pem).unwrap();
    Site { ca, authority }
}

impl Site {
    fn issue(&self, role: Role, name: &str) -> Issued {
        self.authority.issue(role, &[name.to_owned()], now(), DAY).unwrap()
    }

    fn credentials(&self, issued: &Issued) -> Credentials {
        credentials(&self.ca.certificate_pem, &issued.certificate_pem, &issued.key_pem).unwrap()
    }
}

fn credentials(ca: &str, certificate: &str, key: &str) -> Result<Credentials, TlsError> {
    fn pem<'a>(path: &'a str, text: &'a str) -> Pem<'a> {
        Pem { path: Path::new(path), text: text.as_bytes() }
    }
    Credentials::from_pem(pem("ca.pem", ca), pem("own.pem", certificate), pem("own.key", key))
}

/// Runs a handshake to its end; the error is of whichever side failed first, named.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: &str,
) -> Result<(ClientConnection, ServerConnection), (&'static str, io::Error)> {
    let mut client = ClientConnection::new(client, server_name(name).unwrap()).unwrap();
    let mut server = ServerConnection::new(server).unwrap();
    let failed = |side| move |error: rustls::Error| (side, io::Error::other(error));
    while client.is_handshaking() || server.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets().map_err(failed("backup"))?;
        let mut wire = Vec::new();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets().map_err(failed("host"))?;
    }
    Ok((client, server))
}

#[test]
fn both_sides_know_each_other() {
    let site = site();
    let host = site.credentials(&site.issue(Role::Host, "host-a"));
    let backup = site.credentials(&site.issue(Role::Backup, "backup.example"));
    let (client, server) = handshake(
        host.host_config(now()).unwrap(),
        backup.backup_config(now()).unwrap(),
        "backup.example",
    )
    .unwrap();
    assert_eq!(client.alpn_protocol(), Some(ALPN));
    assert_eq!(server.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    let host = PeerIdentity::of(server.peer_certificates().unwrap()).unwrap();
    assert_eq!(host.name(), "host-a");
    assert!(host.speaks_for("HOST-A") && !host.speaks_for("host-b"));
    let backup = PeerIdentity::of(client.peer_certificates().unwrap()).unwrap();
    assert_eq!(backup.name(), "backup.example");
}

#[test]
fn an_address_can_be_the_name() {
    let site = site();
    let names = ["fd00::1".to_owned(), "192.0.2.1".to_owned()];
    let backup = site.authority.issue(Role::Backup, &names, now(), DAY).unwrap();
    let backup = site.credentials(&backup);
    assert_eq!(backup.identity().names(), names);
    let host = site.credentials(&site.issue(Role::Host, "h"));
    let client = host.host_config(now()).unwrap();
    handshake(client, backup.backup_config(now()).unwrap(), "192.0.2.1").unwrap();
}

#[test]
fn a_host_of_another_authority_is_refused_and_told() {
    let (ours, theirs) = (site(), site());
    let backup = ours.credentials(&ours.issue(Role::Backup, "b"));
    // It trusts our authority, so it goes as far as to show its own certificate.
    let host = theirs.issue(Role::Host, "h");
    let mixed = format!("{}{}", ours.ca.certificate_pem, theirs.ca.certificate_pem);
    let host = credentials(&mixed, &host.certificate_pem, &host.key_pem).unwrap();
    let client = host.host_config(now()).unwrap();
    let (side, error) = handshake(client, backup.backup_config(now()).unwrap(), "b").unwrap_err();
    assert_eq!(side, "backup");
    assert!(explain(&error, "the host").unwrap().contains("signed by another authority"));
}

#[test]
fn a_backup_of_another_authority_or_name_is_refused() {
    let (ours, theirs) = (site(), site());
    let host = ours.credentials(&ours.issue(Role::Host, "h"));
    let client = host.host_config(now()).unwrap();
    let backup = theirs.credentials(&theirs.issue(Role::Backup, "b"));
    let (side, error) =
        handshake(client.clone(), backup.backup_config(now()).unwrap(), "b").unwrap_err();
    assert_eq!(side, "host");
    assert!(explain(&error, "the backup").unwrap().contains("another authority than ours"));

    let backup = ours.credentials(&ours.issue(Role::Backup, "b.example"));
    let (side, error) =
        handshake(client, backup.backup_config(now()).unwrap(), "c.example").unwrap_err();
    assert_eq!(side, "host");
    let text = explain(&error, "the backup").unwrap();
    assert!(text.contains("b.example") && text.contains("not for c.example"), "{text}");
}

#[test]
fn a_client_without_certificate_or_with_another_protocol_is_refused() {
    let site = site();
    let backup = site.credentials(&site.issue(Role::Backup, "b")).backup_config(now()).unwrap();
    let host = site.credentials(&site.issue(Role::Host, "h")).host_config(now()).unwrap();
    let mut stranger = ClientConfig::clone(&host);
    stranger.alpn_protocols = vec![b"http/1.1".to_vec()];
    let (side, error) = handshake(Arc::new(stranger), backup.clone(), "b").unwrap_err();
    assert_eq!(side, "backup");
    assert!(explain(&error, "x").unwrap().contains("not this protocol"));

    let mut naked = ClientConfig::clone(&host);
    naked.client_auth_cert_resolver = Arc::new(NoCertificate);
    let (side, error) = handshake(Arc::new(naked), backup, "b").unwrap_err();
    assert_eq!(side, "backup");
    assert!(explain(&error, "the host").unwrap().contains("no certificate"));
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[test]
fn what_the_peer_would_refuse_is_an_error_at_load() {
    let (ours, theirs) = (site(), site());
    let host = ours.issue(Role::Host, "h");
    let other = ours.issue(Role::Host, "h");
    let ca = &ours.ca.certificate_pem;
    let load = |ca: &str, certificate: &str, key: &str| {
        credentials(ca, certificate, key)?.host_config(now()).map(drop)
    };
    let error = load(ca, &host.certificate_pem, &other.key_pem).unwrap_err();
    assert!(matches!(error, TlsError::KeyMismatch { .. }), "{error}");
    let error = load(&theirs.ca.certificate_pem, &host.certificate_pem, &host.key_pem).unwrap_err();
    assert!(matches!(error, TlsError::WrongAuthority { .. }), "{error}");
    let backup = ours.issue(Role::Backup, "b");
    let error = load(ca, &backup.certificate_pem, &backup.key_pem).unwrap_err();
    assert!(matches!(error, TlsError::WrongRole { wanted: Role::Host, .. }), "{error}");
    let error = ours.credentials(&host).backup_config(now()).unwrap_err();
    assert!(matches!(error, TlsError::WrongRole { wanted: Role::Backup, .. }), "{error}");
    let later = now() + 2 * DAY;
    let error = ours.credentials(&host).host_config(later).unwrap_err();
    assert!(matches!(error, TlsError::Expired { .. }), "{error}");
    assert_eq!(ours.credentials(&host).valid_for(later), Duration::ZERO);
    assert!(ours.credentials(&host).valid_for(now()) > DAY - Duration::from_secs(60));
    let error = ours.credentials(&host).host_config(now() - 2 * DAY).unwrap_err();
    assert!(matches!(error, TlsError::NotYetValid { .. }), "{error}");
    let error = load(ca, &host.key_pem, &host.key_pem).unwrap_err();
    assert!(matches!(error, TlsError::NoCertificate { .. }), "{error}");
    let error = load(ca, &host.certificate_pem, ca).unwrap_err();
    assert!(matches!(error, TlsError::NoKey { .. }), "{error}");
    let broken = host.certificate_pem.replacen("MII", "AAA", 1);
    let error = load(ca, &broken, &host.key_pem).unwrap_err();
    assert!(matches!(error, TlsError::Malformed { .. }), "{error}");
}

#[test]
fn an_authority_needs_its_own_key() {
    let (ours, theirs) = (site(), site());
    let wrong = Authority::from_pem(&ours.ca.certificate_pem, &theirs.ca.key_pem);
    assert!(matches!(wrong, Err(TlsError::KeyMismatch { .. })));
    let nobody = ours.authority.issue(Role::Host, &[], now(), DAY);
    assert!(matches!(nobody, Err(TlsError::NoName { .. })));
    let odd = ours.authority.issue(Role::Host, &["a b".into()], now(), DAY);
    assert!(matches!(odd, Err(TlsError::BadName { .. })));
}

#[test]
fn files_are_read_and_an_open_key_is_refused() {
    let site = site();
    let host = site.issue(Role::Host, "h");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let files = Files { ca: path("ca.pem"), certificate: path("h.pem"), key: path("h.key") };
    assert!(matches!(files.load().unwrap_err(), TlsError::Read { path, .. } if path == files.ca));
    std::fs::write(&files.ca, &site.ca.certificate_pem).unwrap();
    std::fs::write(&files.certificate, &host.certificate_pem).unwrap();
    std::fs::write(&files.key, &host.key_pem).unwrap();
    let mode = |bits| std::fs::set_permissions(&files.key, PermissionsExt::from_mode(bits));
    mode(0o644).unwrap();
    let error = files.load().unwrap_err();
    assert!(error.to_string().contains("chmod 600"), "{error}");
    mode(0o600).unwrap();
    assert_eq!(files.load().unwrap().identity().name(), "h");
}
