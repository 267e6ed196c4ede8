//! Questions to `ptp4l` over its Unix datagram socket.
//!
//! `ptp4l` answers to the address of whoever asks, so this end has one, in a directory of its own that only its user
//! can enter: nobody else can answer. The directory goes when the source is dropped. `ptp4l` must be able to enter it,
//! too: it runs as root, or as the same user.
//!
//! `ptp4l` waits in its one thread until its answer fits into our queue. After a failed look the socket is therefore
//! closed, not left with answers that nobody reads, and the next look binds another one.

use super::{Deadline, Source, SourceError};
use crate::ptp::{Asker, Look, PortIdentity, Progress, RESPONSE_BYTES_MAX};
use crate::sample::Answer;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// `ptp4l` on this host.
#[derive(Debug)]
pub struct Ptp4l {
    server: PathBuf,
    directory: TempDir,
    socket: Option<UnixDatagram>,
    /// Number of sockets that were bound.
    bound: u64,
    asker: Asker,
    sequence: u16,
}

impl Ptp4l {
    /// A source that asks the `ptp4l` with this `uds_address`, from a socket in a new directory in `runtime`.
    ///
    /// # Errors
    /// The directory cannot be made. That `ptp4l` does not run is no error here.
    pub fn new(server: &Path, runtime: &Path, domain: u8, specific: u8) -> io::Result<Self> {
        let mut directory = tempfile::Builder::new();
        let directory = directory.prefix("clock-").permissions(Permissions::from_mode(0o700));
        let directory = directory.tempdir_in(runtime)?;
        // An identity that no clock has, as `pmc` makes one.
        let [high, next, port @ ..] = std::process::id().to_be_bytes();
        let clock = [0, 0, 0, 0, 0, 0, high, next];
        let source = PortIdentity { clock, port: u16::from_be_bytes(port) };
        Ok(Self {
            server: server.to_owned(),
            directory,
            socket: None,
            bound: 0,
            asker: Asker { source, domain, transport_specific: specific & 0xf },
            sequence: 0,
        })
    }

    fn bind(&mut self) -> Result<UnixDatagram, SourceError> {
        self.bound += 1;
        let path = self.directory.path().join(self.bound.to_string());
        UnixDatagram::bind(&path).map_err(|error| SourceError::Io {
            what: "bind",
            whom: path.display().to_string(),
            error,
        })
    }

    fn look(&mut self, socket: &UnixDatagram, deadline: Deadline) -> Result<Answer, SourceError> {
        let whom = self.server.display().to_string();
        let mut look = Look::new(self.asker, self.sequence);
        self.sequence = self.sequence.wrapping_add(Look::SEQUENCES);
        for request in look.requests() {
            // A `ptp4l` that stands still does not empty its queue.
            let sent = deadline.left(&whom).and_then(|left| {
                let sent = socket.set_write_timeout(Some(left));
                let sent = sent.and_then(|()| socket.send_to(&request, &self.server));
                sent.map_err(|error| deadline.error("ask", &whom, error))
            });
            sent?;
        }
        let mut buffer = [0; RESPONSE_BYTES_MAX];
        loop {
            let left = deadline.left(&whom)?;
            let received =
                socket.set_read_timeout(Some(left)).and_then(|()| socket.recv(&mut buffer));
            let bytes = match received {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(deadline.error("hear", &whom, error)),
            };
            if let Progress::Done(answer) = look.take(&buffer[..bytes])? {
                return Ok(answer);
            }
        }
    }
}

impl Source for Ptp4l {
    fn ask(&mut self, timeout: Duration) -> Result<Answer, SourceError> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => self.bind()?,
        };
        let answer = self.look(&socket, Deadline::new(timeout));
        if answer.is_ok() {
            self.socket = Some(socket);
        } else {
            let path = self.directory.path().join(self.bound.to_string());
            // Files that are left go with the directory.
            let _ = std::fs::remove_file(path);
        }
        answer
    }
}
