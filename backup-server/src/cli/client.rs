//! Talking to the running server, or to one that is started for this command alone.

use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::{Role, Server, StartError};
use anyhow::{Context, Result, bail};
use std::io;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// A way to the groups.
pub(super) struct Client {
    config: Config,
    alone: Option<Server>,
}

/// One request under way.
pub(super) struct Call {
    replies: BufReader<OwnedReadHalf>,
    /// Open as long as the server is to keep what it gave.
    _writer: OwnedWriteHalf,
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
        Ok(Call { replies: BufReader::new(reader), _writer: writer })
    }

    /// Asks for something that has one answer.
    pub(super) async fn ask(&self, request: &Request) -> Result<Reply> {
        self.call(request).await?.next().await
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

    /// What comes after a reply that says so, to the end of the connection.
    pub(super) fn rest(&mut self) -> &mut (impl AsyncRead + Unpin) {
        &mut self.replies
    }
}
