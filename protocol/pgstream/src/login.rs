//! The receiver's login.

use crate::failure::Failure;
use crate::frame::Fields;
use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use std::fmt;

/// Ways to prove a password, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PasswordMethod {
    /// The password itself: whoever listens or plays the server has it.
    Cleartext,
    /// A salted MD5 hash.
    Md5,
    /// SCRAM-SHA-256: the server proves that it knows the password, too.
    Scram,
}

/// User and password, and the name under which the server lists this connection.
#[derive(Clone)]
pub struct Login {
    /// Role with the attribute REPLICATION.
    pub user: String,
    /// Password, where the server wants one.
    pub password: Option<String>,
    /// `application_name`, by which `synchronous_standby_names` finds this side.
    pub application_name: String,
    /// Weakest method by which the password is given away. A server that is trusted to ask for none gets none.
    pub weakest: PasswordMethod,
}

/// A login that cannot be written into a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "user, password, database and application name cannot contain a zero byte, and a user has a name"
)]
pub struct LoginError;

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Login of {:?} as {:?}", self.user, self.application_name)
    }
}

impl Login {
    /// Writes the start-up message of a replication client.
    pub(crate) fn write_startup(&self, output: &mut BytesMut) -> Result<(), LoginError> {
        self.write_startup_of("replication", &[("replication", "true")], output)
    }

    /// Writes the start-up message of a client of a database, with settings of the session.
    pub(crate) fn write_startup_of(
        &self,
        database: &str,
        settings: &[(&str, &str)],
        output: &mut BytesMut,
    ) -> Result<(), LoginError> {
        let password = self.password.as_deref().unwrap_or("");
        if self.user.is_empty() || password.contains('\0') {
            return Err(LoginError);
        }
        let parameters = [
            ("user", self.user.as_str()),
            ("database", database),
            ("application_name", &self.application_name),
        ];
        let parameters = parameters.into_iter().chain(settings.iter().copied());
        frontend::startup_message(parameters, output).map_err(|_| LoginError)
    }
}

/// Steps of a login.
pub(crate) enum Authentication {
    /// The server has not said what it wants.
    First,
    /// Password or hash has been sent.
    Sent,
    ScramFirst(Box<ScramSha256>),
    ScramLast(Box<ScramSha256>),
    /// The server has proved itself.
    ScramDone,
    /// The server has let this side in.
    Done,
}

impl fmt::Debug for Authentication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authentication")
    }
}

/// A message of the login that is not answered.
pub(crate) enum Wrong {
    /// The message cannot come now.
    Unexpected,
    Malformed,
    Failed(Failure),
}

fn refused(method: &'static str, reason: &'static str) -> Wrong {
    Wrong::Failed(Failure::Authentication { method, reason })
}

impl Authentication {
    /// Answers a message about authentication.
    pub fn answer(
        &mut self,
        login: &Login,
        message: &Message,
        output: &mut BytesMut,
    ) -> Result<(), Wrong> {
        let now = std::mem::replace(self, Authentication::Done);
        *self = match (now, message) {
            (Self::First | Self::Sent | Self::ScramDone, Message::AuthenticationOk) => Self::Done,
            (Self::ScramFirst(_) | Self::ScramLast(_), Message::AuthenticationOk) => {
                return Err(Wrong::Failed(Failure::ServerNotProven));
            }
            (Self::First, Message::AuthenticationCleartextPassword) => {
                let password = password(login, PasswordMethod::Cleartext, "a cleartext password")?;
                send(password.as_bytes(), output)?;
                Self::Sent
            }
            (Self::First, Message::AuthenticationMd5Password(body)) => {
                let password = password(login, PasswordMethod::Md5, "an MD5 hash of a password")?;
                let hash = md5_hash(login.user.as_bytes(), password.as_bytes(), body.salt());
                send(hash.as_bytes(), output)?;
                Self::Sent
            }
            (Self::First, Message::AuthenticationSasl(body)) => {
                let password = password(login, PasswordMethod::Scram, "SCRAM")?;
                let mut has_scram = false;
                let mut mechanisms = body.mechanisms();
                while let Some(name) = mechanisms.next().map_err(|_| Wrong::Malformed)? {
                    has_scram |= name == SCRAM_SHA_256;
                }
                if !has_scram {
                    return Err(refused("a SASL mechanism other than SCRAM-SHA-256", NOT_SPOKEN));
                }
                let scram = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
                frontend::sasl_initial_response(SCRAM_SHA_256, scram.message(), output)
                    .map_err(|_| Wrong::Malformed)?;
                Self::ScramFirst(Box::new(scram))
            }
            (Self::ScramFirst(mut scram), Message::AuthenticationSaslContinue(body)) => {
                scram.update(body.data()).map_err(|_| Wrong::Malformed)?;
                frontend::sasl_response(scram.message(), output).map_err(|_| Wrong::Malformed)?;
                Self::ScramLast(scram)
            }
            (Self::ScramLast(mut scram), Message::AuthenticationSaslFinal(body)) => {
                scram.finish(body.data()).map_err(|_| Wrong::Failed(Failure::ServerNotProven))?;
                Self::ScramDone
            }
            (Self::First, Message::AuthenticationGss | Message::AuthenticationSspi) => {
                return Err(refused("GSSAPI", NOT_SPOKEN));
            }
            (Self::First, Message::AuthenticationKerberosV5) => {
                return Err(refused("Kerberos", NOT_SPOKEN));
            }
            _ => return Err(Wrong::Unexpected),
        };
        Ok(())
    }
}

const NOT_SPOKEN: &str = "is not spoken here; use scram-sha-256 in pg_hba.conf";

fn send(password: &[u8], output: &mut BytesMut) -> Result<(), Wrong> {
    // No zero byte: `write_startup` has looked.
    frontend::password_message(password, output).map_err(|_| Wrong::Malformed)
}

/// The password, if it may be proved in this way.
fn password<'a>(
    login: &'a Login,
    method: PasswordMethod,
    name: &'static str,
) -> Result<&'a str, Wrong> {
    if method < login.weakest {
        return Err(refused(name, "the configuration does not allow: it is too weak"));
    }
    login.password.as_deref().ok_or(refused(name, "needs a password, and none is configured"))
}

/// True of a message of authentication whose number has no meaning here: the decoder knows no such message, and a
/// server of a later version may have one.
pub(crate) fn is_unknown_method(body: &[u8]) -> bool {
    Fields(body).u32().is_some_and(|number| !matches!(number, 0 | 2 | 3 | 5..=12))
}
