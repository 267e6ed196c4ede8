//! The agent against a PostgreSQL that is played by hand, byte by byte, and a backup in memory.

mod faults;
#[path = "../../../../protocol/pgstream/tests/common/mod.rs"]
mod messages;
mod shipping;
mod stamps;
mod world;
#[path = "../../../../protocol/wal/tests/log/writer.rs"]
#[allow(dead_code)]
mod writer;
