//! What is asked of QEMU, or of `qemu-storage-daemon`, by its monitor protocol: one JSON object a line. Events are not waited for:
//! what they tell is asked for.

use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// It opens a disk within that, or never.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// The longest line that is believed.
const LINE_MAX_BYTES: u64 = 16 << 20;

/// Why it did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens.
    #[error(
        "no QEMU answers on {path}: {source}; was it started with -qmp unix:{path},server=on,wait=off?"
    )]
    NotThere {
        /// The socket.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// It listens, and says nothing.
    #[error("QEMU does not greet: is another program connected to its QMP socket? ({0})")]
    Silent(io::Error),
    /// The connection broke.
    #[error("the connection to QEMU broke: {0}")]
    Broken(#[from] io::Error),
    /// What it says is not QMP.
    #[error("QEMU's answer cannot be read: {0}")]
    Strange(#[from] serde_json::Error),
    /// It says no.
    #[error("QEMU refuses {command}: {reason}")]
    Refused {
        /// What.
        command: &'static str,
        /// Why.
        reason: String,
    },
}

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// Connects.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(path)
            .map_err(|source| QmpError::NotThere { path: path.display().to_string(), source })?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        let mut qmp = Self(BufReader::new(stream));
        qmp.line().map_err(|error| match error {
            QmpError::Broken(error) => QmpError::Silent(error),
            other => other,
        })?;
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Asks for something, and returns the answer.
    pub fn ask(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.0.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut answer = self.line()?;
            if let Some(done) = answer.get_mut("return") {
                return Ok(done.take());
            }
            if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or("it does not say why").to_owned();
                return Err(QmpError::Refused { command, reason });
            }
        }
    }

    fn line(&mut self) -> Result<Value, QmpError> {
        let mut line = Vec::new();
        (&mut self.0).take(LINE_MAX_BYTES).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Err(QmpError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

/// A block node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name in QEMU.
    pub name: String,
    /// The name of the NBD export that it reads, if it reads one.
    pub export: Option<String>,
    /// Its size.
    pub size_bytes: u64,
}

/// A job of QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: String,
    /// `running`, `ready`, `concluded` and so on.
    pub status: String,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes that there are to do.
    pub total_bytes: u64,
    /// Why it has failed.
    pub error: Option<String>,
}

/// All block nodes.
pub fn nodes(qmp: &mut Qmp) -> Result<Vec<Node>, QmpError> {
    let answer = qmp.ask("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(answer.as_array().into_iter().flatten().filter_map(node).collect())
}

fn node(of: &Value) -> Option<Node> {
    let is_nbd = of["drv"] == "nbd";
    Some(Node {
        name: of["node-name"].as_str()?.to_owned(),
        export: of["file"].as_str().filter(|_| is_nbd).and_then(export_of),
        size_bytes: of["image"]["virtual-size"].as_u64()?,
    })
}

/// `nbd+unix:///EXPORT?socket=PATH`, with `%xx` in it where a name needs that.
fn export_of(uri: &str) -> Option<String> {
    let name = uri.strip_prefix("nbd+unix:///")?.split('?').next()?;
    let mut bytes = Vec::new();
    let mut rest = name.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            plain => plain,
        });
    }
    String::from_utf8(bytes).ok()
}

/// All jobs.
pub fn jobs(qmp: &mut Qmp) -> Result<Vec<Job>, QmpError> {
    let answer = qmp.ask("query-jobs", json!({}))?;
    Ok(answer.as_array().into_iter().flatten().filter_map(job).collect())
}

fn job(of: &Value) -> Option<Job> {
    Some(Job {
        id: of["id"].as_str()?.to_owned(),
        status: of["status"].as_str()?.to_owned(),
        done_bytes: of["current-progress"].as_u64()?,
        total_bytes: of["total-progress"].as_u64()?,
        error: of["error"].as_str().map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_known_by_the_export_that_it_reads() {
        let answer = json!({
            "drv": "nbd", "node-name": "disk0", "image": { "virtual-size": 16 },
            "file": "nbd+unix:///db.ro%2fot?socket=/run/x.sock",
        });
        let export = Some("db.ro/ot".to_owned());
        assert_eq!(node(&answer), Some(Node { name: "disk0".into(), export, size_bytes: 16 }));
        let mut file = answer.clone();
        file["drv"] = "file".into();
        assert_eq!(node(&file).unwrap().export, None);
        assert_eq!(export_of("nbd+unix:///db%"), None);
        assert_eq!(export_of("nbd://host/db"), None);
    }

    #[test]
    fn events_are_passed_over_and_a_refusal_has_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let asked = BufReader::new(stream.try_clone().unwrap()).lines();
            let answers = [
                "{\"event\": \"X\"}\n{\"return\": {}}\n",
                "{\"event\": \"Y\"}\n{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such job\"}}\n",
            ];
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            // In this order: after the last answer nothing more is waited for.
            let asked = answers.into_iter().zip(asked).map(|(answer, line)| {
                stream.write_all(answer.as_bytes()).unwrap();
                line.unwrap()
            });
            asked.collect::<Vec<_>>()
        });
        let mut qmp = Qmp::connect(&path).unwrap();
        let refused = qmp.ask("job-cancel", json!({ "id": "a" })).unwrap_err().to_string();
        assert_eq!(refused, "QEMU refuses job-cancel: no such job");
        let asked = qemu.join().unwrap();
        assert!(asked[1].contains(r#""id":"a""#), "{asked:?}");
        assert!(matches!(qmp.ask("query-jobs", json!({})), Err(QmpError::Broken(_))));
    }
}
