//! The ring against real files and sockets.

mod buffers;
mod common;
mod disks;
mod dropping;
mod files;
mod oracle;
mod sockets;
