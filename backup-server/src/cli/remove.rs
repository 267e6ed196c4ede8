//! `tidelock-backup remove`.

use super::args::Remove;
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};

pub(super) async fn run(config: Config, args: Remove) -> Result<()> {
    let client = Client::connect(config).await?;
    let Remove { group, member } = args;
    let request = Request::Remove { group: group.clone(), member: member.clone() };
    let reply = client.ask(&request).await;
    client.end().await;
    match reply? {
        Reply::Removed => {
            println!(
                "{member} is no longer part of group {group}. If it was a writer, write removed = \
                 true into its [[group.member]] on every host: its place in the order stays taken"
            );
            Ok(())
        }
        _ => bail!("the server answered something else"),
    }
}
