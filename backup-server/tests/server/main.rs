//! The real server, as a host, an operator and other people's tools meet it.

mod cold;
mod common;
mod exports;
mod full_disk;
mod hostile;
mod hosts;
mod indexes;
mod link;
mod machines;
mod process;
mod seed;
mod snapshots;
mod stores;
mod travel;
