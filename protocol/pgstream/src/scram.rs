//! SCRAM-SHA-256, the side of the server (RFC 5802, RFC 7677). The side of the client is `postgres-protocol`'s.
//!
//! | message | content |
//! |---|---|
//! | first of the client | `n,,n=USER,r=NONCE`: no channel binding; the user is the start-up message's |
//! | first of the server | `r=NONCE+MORE,s=SALT,i=ITERATIONS` |
//! | last of the client | `c=biws,r=NONCE+MORE,p=PROOF` |
//! | last of the server | `v=SIGNATURE` |
//!
//! PROOF is the client's key, combined by exclusive or with HMAC(stored key, messages). The stored key is the client
//! key's hash, so that whoever reads it cannot log in. The verifier is what `pg_authid` keeps:
//! `SCRAM-SHA-256$ITERATIONS:SALT$STORED_KEY:SERVER_KEY`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

const NAME: &str = "SCRAM-SHA-256";
const KEY_BYTES: usize = 32;
/// Greatest count that is believed of a verifier, so that a client is not made to compute for minutes.
const ITERATIONS_MAX: u32 = 100_000;

/// Facts by which a password is verified, without the password.
#[derive(Clone, PartialEq, Eq)]
pub struct ScramVerifier {
    iterations: u32,
    salt: Vec<u8>,
    stored_key: [u8; KEY_BYTES],
    server_key: [u8; KEY_BYTES],
}

/// A text that is no verifier. The text is a secret, and is not repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no verifier of a password: SCRAM-SHA-256$ITERATIONS:SALT$STORED_KEY:SERVER_KEY, as in pg_authid"
)]
pub struct ScramVerifierError;

impl ScramVerifier {
    /// A verifier with a fresh salt.
    ///
    /// # Errors
    /// None that can be: the text that is made here is read back.
    pub fn of_password(password: &str) -> Result<ScramVerifier, ScramVerifierError> {
        postgres_protocol::password::scram_sha_256(password.as_bytes()).parse()
    }
}

impl FromStr for ScramVerifier {
    type Err = ScramVerifierError;

    fn from_str(text: &str) -> Result<ScramVerifier, ScramVerifierError> {
        let parts = || {
            let (salted, keys) = text.strip_prefix(NAME)?.strip_prefix('$')?.split_once('$')?;
            let ((iterations, salt), (stored, server)) =
                (salted.split_once(':')?, keys.split_once(':')?);
            let key = |text: &str| STANDARD.decode(text).ok()?.try_into().ok();
            let iterations = iterations.parse().ok()?;
            let verifier = ScramVerifier {
                iterations,
                salt: STANDARD.decode(salt).ok()?,
                stored_key: key(stored)?,
                server_key: key(server)?,
            };
            (1..=ITERATIONS_MAX).contains(&iterations).then_some(verifier)
        };
        parts().ok_or(ScramVerifierError)
    }
}

impl fmt::Debug for ScramVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScramVerifier")
    }
}

/// The exchange with one client, after its first message.
#[derive(Debug)]
pub(crate) struct Exchange {
    verifier: ScramVerifier,
    /// The client's first message without its head, and the server's first message.
    first: String,
    server_first: String,
    nonce: String,
    /// Head of the client's first message, which the last one must repeat.
    channel: String,
}

impl Exchange {
    /// Begins with the client's first message. `more` is the server's part of the nonce, which nobody can foretell.
    /// `None` if the message has not the form of one.
    pub fn begin(
        verifier: &ScramVerifier,
        client_first: &[u8],
        more: &[u8; 18],
    ) -> Option<Exchange> {
        let text = str::from_utf8(client_first).ok()?;
        let head = ["n,,", "y,,"].into_iter().find(|head| text.starts_with(head))?;
        let first = &text[head.len()..];
        let nonce = first.strip_prefix("n=")?.split_once(",r=")?.1.split(',').next()?;
        if nonce.is_empty() || !nonce.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let nonce = format!("{nonce}{}", STANDARD.encode(more));
        let salt = STANDARD.encode(&verifier.salt);
        Some(Exchange {
            server_first: format!("r={nonce},s={salt},i={}", verifier.iterations),
            verifier: verifier.clone(),
            first: first.into(),
            nonce,
            channel: STANDARD.encode(head),
        })
    }

    /// The server's first message.
    pub fn server_first(&self) -> &[u8] {
        self.server_first.as_bytes()
    }

    /// Verifies the client's last message. Returns the server's last one, or `None` if the client does not know the
    /// password.
    pub fn finish(&self, client_last: &[u8]) -> Option<Vec<u8>> {
        let (unproved, proof) = str::from_utf8(client_last).ok()?.rsplit_once(",p=")?;
        let mut parts = unproved.split(',');
        let is_channel = parts.next()?.strip_prefix("c=")? == self.channel;
        let is_nonce = parts.next()?.strip_prefix("r=")? == self.nonce;
        if !is_channel || !is_nonce {
            return None;
        }
        let proof: [u8; KEY_BYTES] = STANDARD.decode(proof).ok()?.try_into().ok()?;
        let messages = format!("{},{},{unproved}", self.first, self.server_first);
        let mut key = sign(&self.verifier.stored_key, messages.as_bytes());
        key.iter_mut().zip(proof).for_each(|(key, proof)| *key ^= proof);
        let hash: [u8; KEY_BYTES] = Sha256::digest(key).into();
        let differs =
            hash.iter().zip(self.verifier.stored_key).fold(0, |all, (a, b)| all | (a ^ b));
        let signature = sign(&self.verifier.server_key, messages.as_bytes());
        (differs == 0).then(|| format!("v={}", STANDARD.encode(signature)).into_bytes())
    }
}

fn sign(key: &[u8; KEY_BYTES], text: &[u8]) -> [u8; KEY_BYTES] {
    // A key of the length of the hash is always taken: an error cannot be.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return [0; KEY_BYTES] };
    mac.update(text);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};

    fn exchange(verifier: &ScramVerifier, password: &str) -> Option<bool> {
        let mut client = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        let server = Exchange::begin(verifier, client.message(), &[7; 18])?;
        client.update(server.server_first()).unwrap();
        let last = server.finish(client.message())?;
        Some(client.finish(&last).is_ok())
    }

    #[test]
    fn the_password_and_no_other_one_is_taken() {
        let verifier = ScramVerifier::of_password("s3cret ü").unwrap();
        assert_eq!(exchange(&verifier, "s3cret ü"), Some(true));
        assert_eq!(exchange(&verifier, "s3cret u"), None);
        assert_eq!(exchange(&verifier, ""), None);
    }

    #[test]
    fn a_server_that_does_not_know_the_verifier_is_found_out() {
        let mut impostor = ScramVerifier::of_password("secret").unwrap();
        impostor.server_key = [1; KEY_BYTES];
        assert_eq!(exchange(&impostor, "secret"), Some(false));
    }

    /// The exchange of `postgres-protocol`'s own test, recorded from psql.
    #[test]
    fn a_recorded_exchange_is_verified() {
        let first = b"n,,n=,r=9IZ2O01zb9IgiIZ1WJ/zgpJB";
        let last = "c=biws,r=9IZ2O01zb9IgiIZ1WJ/zgpJBjx/oIRLs02gGSHcw1KEty3eY,\
            p=AmNKosjJzS31NTlQYNs5BTeQjdHdk7lOflDo5re2an8=";
        let mut more = [0; 18];
        STANDARD.decode_slice("jx/oIRLs02gGSHcw1KEty3eY", &mut more).unwrap();
        let salt = STANDARD.decode("fs3IXBy7U7+IvVjZ").unwrap();
        // Keys of the password "foobar", by Python's hashlib.pbkdf2_hmac and hmac.
        let verifier: ScramVerifier =
            include_str!("../tests/foobar.verifier").trim().parse().unwrap();
        assert_eq!(verifier.salt, salt);
        let exchange = Exchange::begin(&verifier, first, &more).unwrap();
        let signature = exchange.finish(last.as_bytes()).unwrap();
        assert_eq!(signature, b"v=U+ppxD5XUKtradnv8e2MkeupiA8FU87Sg8CXzXHDAzw=");
        for wrong in [
            last.replace("c=biws", "c=eSws"),
            last.replace("eY,p=", "eZ,p="),
            last.replace("p=Am", "p=Bm"),
            last.replace("c=biws,", ""),
            String::new(),
        ] {
            assert_eq!(exchange.finish(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn first_messages_that_are_none_are_refused() {
        let verifier = ScramVerifier::of_password("x").unwrap();
        for text in [
            "",
            "n,,",
            "n,,n=a",
            "p=tls-unique,,n=,r=abc",
            "n,a=x,n=,r=abc",
            "n,,n=,r=",
            "n,,n=,r=a b",
        ] {
            assert!(Exchange::begin(&verifier, text.as_bytes(), &[0; 18]).is_none(), "{text}");
        }
    }

    #[test]
    fn verifiers_have_the_form_of_pg_authid() {
        let key = STANDARD.encode([1; 32]);
        let good = format!("SCRAM-SHA-256$4096:AAAA${key}:{key}");
        assert!(good.parse::<ScramVerifier>().is_ok());
        for bad in [
            good.replace("4096", "0"),
            good.replace("4096", "1000000"),
            good.replace("SHA-256", "SHA-1"),
            good.replace("AAAA", "A"),
            format!("SCRAM-SHA-256$4096:AAAA${key}:AAAA"),
            "md5abc".into(),
        ] {
            assert_eq!(bad.parse::<ScramVerifier>(), Err(ScramVerifierError));
        }
    }
}
