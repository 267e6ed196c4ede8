//! QEMU's monitor: a socket on which QEMU takes one JSON command after the other (QMP).

use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// QEMU answers one command by then, or hangs.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// A guest may have QEMU in its hands, and so what QEMU answers.
const ANSWERS_MAX_BYTES: u64 = 1 << 20;

/// Asks QEMU for one thing.
pub(super) async fn ask(socket: &Path, command: &str) -> io::Result<serde_json::Value> {
    let asked = async {
        let (reader, mut writer) = UnixStream::connect(socket).await?.into_split();
        let mut lines = BufReader::new(reader.take(ANSWERS_MAX_BYTES)).lines();
        for command in ["qmp_capabilities", command] {
            let line = serde_json::json!({ "execute": command }).to_string() + "\n";
            writer.write_all(line.as_bytes()).await?;
        }
        let mut answers = 0;
        while let Some(line) = lines.next_line().await? {
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(error["desc"].to_string()));
            }
            if let Some(value) = answer.get("return") {
                answers += 1;
                if answers == 2 {
                    return Ok(value.clone());
                }
            }
        }
        // QEMU may end before it has answered.
        if command == "quit" {
            return Ok(serde_json::Value::Null);
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    };
    match timeout(ANSWERS_WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(io::Error::other("QEMU does not answer on its monitor")),
    }
}
