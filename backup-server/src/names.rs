//! Names that become names of files: hostile ones end here.

pub use tidelock_protocol::bounds::is_name as is_valid;
