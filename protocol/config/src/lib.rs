//! Configuration files of both Tidelock sites: TOML in, typed values or diagnostics out.
//!
//! A file is checked as a whole before anything starts. Every error is found in one pass, and each
//! says where (file, line, column), what is wrong and what to write instead. A key that nobody
//! asks for is an error: a misspelt `graec` must not silently mean the default.
//!
//! Sans-I/O: the text is an argument. Checks that need the machine (does the file exist, is the
//! disk as large as it says) are made by the caller later with the [`Place`] that each [`Located`]
//! value keeps, and so point at the same line.
//!
//! ```
//! use std::time::Duration;
//! let text = "[host]\nname = \"a\"\nlease = \"10s\"\nlaese = \"9s\"\n";
//! let outcome = tidelock_config::read("host.toml", text, |root| {
//!     root.table("host", |host| {
//!         let name = host.required::<String>("name", "name = \"host-a\"");
//!         let lease = host.or("lease", Duration::from_secs(10));
//!         Some((name?, lease))
//!     })
//! });
//! let diagnostics = outcome.unwrap_err();
//! assert_eq!(
//!     diagnostics.to_string(),
//!     "host.toml:4:1: unknown key `laese` in [host]\n    \
//!          laese = \"9s\"\n    \
//!          ^^^^^\n  \
//!        write instead: lease\n"
//! );
//! ```
#![forbid(unsafe_code)]

mod diagnostic;
mod document;
pub mod output;
mod panic;
mod section;
mod types;
mod units;
mod value;

pub use diagnostic::{Diagnostic, Diagnostics, Located, Place};
pub use document::read;
pub use panic::abort_on_panic;
pub use section::Section;
pub use types::{HostPort, Name};
pub use units::{Rate, Size, duration_argument, format_duration, rate_argument};
pub use value::{FromToml, Value, Wrong};
