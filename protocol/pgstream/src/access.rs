//! The sender's login: who may come in, and by what proof.

use crate::encode;
use crate::frame::{Fields, shown};
use crate::limits::ENCRYPTION_REQUESTS_MAX;
use crate::scram::{Exchange, ScramVerifier};
use crate::sender::SenderEnd;
use bytes::{BufMut, BytesMut};
use std::fmt;

const VERSION_MAJOR: u32 = 3;
const CANCEL: u32 = 80_877_102;
const SSL: u32 = 80_877_103;
const GSS: u32 = 80_877_104;

/// Proofs that a standby is asked for.
#[derive(Clone)]
pub enum Proof {
    /// None: whoever reaches the socket is let in.
    Trust,
    /// The password itself, which travels as it is.
    Cleartext(String),
    /// SCRAM-SHA-256.
    Scram(ScramVerifier),
}

/// Rule for whom the sender lets in.
#[derive(Clone, Debug)]
pub struct Access {
    /// Role that the standby must name. `None`: any.
    pub user: Option<String>,
    /// Proof that it must give.
    pub proof: Proof,
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Proof::Trust => "Trust",
            Proof::Cleartext(_) => "Cleartext",
            Proof::Scram(_) => "Scram",
        })
    }
}

/// Facts that a client names at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Role.
    pub user: String,
    /// `application_name`, empty if it named none. A stock standby names its `cluster_name`, or "walreceiver".
    pub application_name: String,
}

/// Steps of a login.
#[derive(Debug)]
pub(crate) enum Gate {
    /// The start-up message is to come, behind so many requests for encryption.
    Startup {
        refused: u8,
    },
    Password(Client),
    ScramFirst(Client),
    ScramLast(Client, Exchange),
    Open(Client),
}

impl Gate {
    /// Acts on a message without a tag: start-up, or a request for encryption, which is not spoken here.
    pub fn startup(
        refused: u8,
        access: &Access,
        body: &[u8],
        output: &mut BytesMut,
    ) -> Result<Gate, SenderEnd> {
        let mut fields = Fields(body);
        let number = fields.u32().ok_or(SenderEnd::Malformed { tag: ' ' })?;
        match number {
            SSL | GSS if refused < ENCRYPTION_REQUESTS_MAX && fields.is_empty() => {
                output.put_u8(b'N');
                return Ok(Gate::Startup { refused: refused + 1 });
            }
            CANCEL => return Err(SenderEnd::Cancel),
            _ if number >> 16 != VERSION_MAJOR => {
                return Err(SenderEnd::Version { major: number >> 16, minor: number & 0xffff });
            }
            _ => {}
        }
        let (client, unknown) = parameters(&mut fields)?;
        if number & 0xffff > 0 || !unknown.is_empty() {
            encode::message(output, b'v', |output| {
                output.put_u32(VERSION_MAJOR << 16);
                output.put_u32(u32::try_from(unknown.len()).unwrap_or(0));
                unknown.iter().for_each(|name| encode::text(output, name));
            });
        }
        Ok(match &access.proof {
            Proof::Trust => {
                if access.user.as_ref().is_some_and(|user| *user != client.user) {
                    return Err(SenderEnd::WrongUser { user: shown(client.user.as_bytes()) });
                }
                Gate::Open(client)
            }
            Proof::Cleartext(_) => {
                encode::authentication(output, 3, &[]);
                Gate::Password(client)
            }
            Proof::Scram(_) => {
                encode::authentication(output, 10, b"SCRAM-SHA-256\0\0");
                Gate::ScramFirst(client)
            }
        })
    }

    /// Acts on a password message. `more` is the sender's part of the nonce.
    pub fn password(
        self,
        access: &Access,
        more: &[u8; 18],
        body: &[u8],
        output: &mut BytesMut,
    ) -> Result<Gate, SenderEnd> {
        let malformed = SenderEnd::Malformed { tag: 'p' };
        // A wrong user is told of as late as a wrong password, and in the same words.
        let is_user =
            |client: &Client| access.user.as_ref().is_none_or(|user| *user == client.user);
        let wrong =
            |client: &Client| SenderEnd::PasswordWrong { user: shown(client.user.as_bytes()) };
        match (self, &access.proof) {
            (Gate::Password(client), Proof::Cleartext(password)) => {
                let given = body.strip_suffix(b"\0").ok_or(malformed)?;
                if !is_equal(given, password.as_bytes()) || !is_user(&client) {
                    return Err(wrong(&client));
                }
                Ok(Gate::Open(client))
            }
            (Gate::ScramFirst(client), Proof::Scram(verifier)) => {
                let mut fields = Fields(body);
                let mechanism = fields.text().ok_or(malformed.clone())?;
                let length = fields.u32().ok_or(malformed.clone())?;
                if mechanism != "SCRAM-SHA-256" || fields.0.len() != length as usize {
                    return Err(malformed);
                }
                let exchange = Exchange::begin(verifier, fields.0, more).ok_or(malformed)?;
                encode::authentication(output, 11, exchange.server_first());
                Ok(Gate::ScramLast(client, exchange))
            }
            (Gate::ScramLast(client, exchange), Proof::Scram(_)) => {
                let last = exchange.finish(body).filter(|_| is_user(&client));
                let last = last.ok_or_else(|| wrong(&client))?;
                encode::authentication(output, 12, &last);
                Ok(Gate::Open(client))
            }
            _ => Err(SenderEnd::Unexpected { tag: 'p' }),
        }
    }
}

/// Compares without telling by the time how much is equal.
fn is_equal(given: &[u8], expected: &[u8]) -> bool {
    let differs = given.iter().zip(expected).fold(0, |all, (a, b)| all | (a ^ b));
    given.len() == expected.len() && differs == 0
}

/// Reads the parameters of the start-up message. Returns the client, and names of extensions of the protocol that it
/// asks for.
fn parameters<'a>(fields: &mut Fields<'a>) -> Result<(Client, Vec<&'a str>), SenderEnd> {
    let malformed = SenderEnd::Malformed { tag: ' ' };
    let mut client = Client::default();
    let (mut unknown, mut is_replication) = (vec![], false);
    loop {
        let name = fields.text().ok_or(malformed.clone())?;
        if name.is_empty() {
            break;
        }
        let value = fields.text().ok_or(malformed.clone())?;
        match name {
            "user" => client.user = value.into(),
            "application_name" => client.application_name = shown(value.as_bytes()),
            "replication" => is_replication = matches!(value, "true" | "on" | "yes" | "1"),
            _ if name.starts_with("_pq_.") => unknown.push(name),
            _ => {}
        }
    }
    if !fields.is_empty() || client.user.is_empty() {
        return Err(malformed);
    }
    if !is_replication {
        return Err(SenderEnd::NotReplication);
    }
    Ok((client, unknown))
}
