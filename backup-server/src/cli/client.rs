//! Talking to the running server, or to one that is started for this command alone.

use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::{Role, Server, StartError};
use anyhow::{Context, Result, bail};
use std::io;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

/// A server that works answers by then, also of groups whose disks hang.
const SOON: Duration = Duration::from_secs(20);

/// A way to the groups.
pub(super) struct Client {
    config: Config,
    alone: Option<Server>,
}

/// One request under way.
pub(super) struct Call {
    replies: BufReader<OwnedReadHalf>,
    /// Open as long as the server is to keep what it gave.
    writer: OwnedWriteHalf,
}

impl Client {
    /// Finds the server, or opens the data directory if there is none.
    pub(super) async fn connect(config: Config) -> Result<Self> {
        match UnixStream::connect(&config.control).await {
            Ok(_) => return Ok(Self { config, alone: None }),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) => {}
            Err(e) => {
                let control = config.control.display();
                return Err(e).with_context(|| format!("cannot talk to the server at {control}"));
            }
        }
        let alone = match Server::start(config.clone(), Role::Alone).await {
            Err(StartError::Registry(e)) => {
                let control = config.control.display();
                return Err(e).with_context(|| format!("no server answers at {control}"));
            }
            started => started?,
        };
        Ok(Self { config, alone: Some(alone) })
    }

    /// Whether this process serves the groups itself.
    pub(super) fn is_alone(&self) -> bool {
        self.alone.is_some()
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// Asks for something.
    pub(super) async fn call(&self, request: &Request) -> Result<Call> {
        let stream = UnixStream::connect(&self.config.control).await?;
        let (reader, mut writer) = stream.into_split();
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        writer.write_all(&line).await?;
        Ok(Call { replies: BufReader::new(reader), writer })
    }

    /// Asks for something that has one answer.
    pub(super) async fn ask(&self, request: &Request) -> Result<Reply> {
        self.call(request).await?.next().await
    }

    /// Asks for something that is answered at once, unless the server hangs.
    pub(super) async fn ask_soon(&self, request: &Request) -> Result<Reply> {
        let control = self.config.control.display();
        timeout(SOON, self.ask(request)).await.with_context(|| {
            format!(
                "the server at {control} does not answer within {} s: is its disk well? Its log says more",
                SOON.as_secs()
            )
        })?
    }

    /// Ends the server that was started for this command.
    pub(super) async fn end(self) {
        if let Some(server) = self.alone {
            server.stop().await;
        }
    }
}

impl Call {
    /// The next reply; an error that the server tells is an error.
    pub(super) async fn next(&mut self) -> Result<Reply> {
        let mut line = String::new();
        if self.replies.read_line(&mut line).await? == 0 {
            bail!("the server has closed the connection; its log says why");
        }
        match serde_json::from_str(&line)? {
            Reply::Error { reason } => bail!("{reason}"),
            reply => Ok(reply),
        }
    }

    /// Tells the server that it need not wait any more.
    pub(super) async fn go_on(&mut self) -> Result<()> {
        Ok(self.writer.write_all(b"\n").await?)
    }

    /// What comes after a reply that says so, to the end of the connection.
    pub(super) fn rest(&mut self) -> &mut (impl AsyncRead + Unpin) {
        &mut self.replies
    }
}
