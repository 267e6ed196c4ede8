//! `tidelock-backup serve`.

use crate::server::config::{Config, Security};
use crate::server::{Role, Server};
use anyhow::Result;

pub(super) async fn run(config: Config) -> Result<()> {
    if config.security == Security::Plaintext {
        tracing::warn!(
            "plaintext = true: anyone on the way can read and change every disk; only for tests"
        );
    }
    let (name, data_dir) = (config.name.clone(), config.data_dir.display().to_string());
    let server = Server::start(config, Role::Serve).await?;
    let address = server.address().map(|a| a.to_string());
    tracing::info!(name, data_dir, address, "ready");
    let signal = super::asked_to_end().await?;
    tracing::info!(signal, "stopping: what was received is made durable first");
    server.stop().await;
    tracing::info!("stopped");
    Ok(())
}
