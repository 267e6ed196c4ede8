//! Questions to `chronyd` over UDP on this host.
//!
//! `chronyd` answers `tracking` to everybody on `127.0.0.1:323` and `[::1]:323`, unless `cmdport 0` is configured. Only
//! root can take this port when `chronyd` is away. Its Unix socket is not used: `chronyd` has dropped its privileges,
//! and could answer only into a directory that all may enter.

use super::{Deadline, Source, SourceError};
use crate::chrony::{MESSAGE_BYTES, decode, request};
use crate::sample::Answer;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

/// `chronyd` on this host.
#[derive(Debug)]
pub struct Chronyd {
    server: SocketAddr,
    sequence: u32,
}

impl Chronyd {
    /// Address at which `chronyd` answers unless it is configured otherwise.
    pub const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 323);

    /// A source that asks the `chronyd` at this address.
    #[must_use]
    pub fn new(server: SocketAddr) -> Self {
        Self { server, sequence: 0 }
    }

    fn look(&mut self, deadline: Deadline) -> Result<Answer, SourceError> {
        let whom = self.server.to_string();
        let any: SocketAddr = if self.server.is_ipv4() {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        };
        self.sequence = self.sequence.wrapping_add(1);
        let asked = UdpSocket::bind(any).and_then(|socket| {
            // Connected, the socket receives the server's datagrams alone, and its absence is an error.
            socket.connect(self.server)?;
            socket.send(&request(self.sequence))?;
            Ok(socket)
        });
        let socket = asked.map_err(|error| deadline.error("ask", &whom, error))?;
        // Room for more than the reply has, so that a longer one is refused, not cut.
        let mut buffer = [0; 2 * MESSAGE_BYTES];
        loop {
            let left = deadline.left(&whom)?;
            let received =
                socket.set_read_timeout(Some(left)).and_then(|()| socket.recv(&mut buffer));
            let bytes = match received {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(deadline.error("hear", &whom, error)),
            };
            let tracking = decode(&buffer[..bytes])?;
            if tracking.sequence == self.sequence {
                return Ok(tracking.answer());
            }
        }
    }
}

impl Source for Chronyd {
    fn ask(&mut self, timeout: Duration) -> Result<Answer, SourceError> {
        self.look(Deadline::new(timeout))
    }
}
