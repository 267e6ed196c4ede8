//! Printing that survives a reader who has gone. The standard macros panic when standard output is a closed pipe
//! (`tidelock-backup status | head -1`); these end the program without a word, as SIGPIPE would.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Exit status that a shell reports for a program ended by SIGPIPE: 128 plus the signal's number.
const EXIT_CLOSED_PIPE: i32 = 128 + 13;

/// For the macros: writes to standard output.
pub fn print(text: Arguments<'_>) {
    match io::stdout().lock().write_fmt(text) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            std::process::exit(EXIT_CLOSED_PIPE)
        }
        Err(error) => {
            eprint(format_args!("cannot write to standard output: {error}\n"));
            std::process::exit(1);
        }
    }
}

/// For the macros: writes to standard error. There is nobody to tell that it cannot.
pub fn eprint(text: Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

/// As the standard one; a closed pipe ends the program.
#[macro_export]
macro_rules! print {
    ($($arg:tt)*) => { $crate::output::print(::std::format_args!($($arg)*)) };
}

/// As the standard one; a closed pipe ends the program.
#[macro_export]
macro_rules! println {
    () => { $crate::output::print(::std::format_args!("\n")) };
    ($($arg:tt)*) => {
        $crate::output::print(::std::format_args!("{}\n", ::std::format_args!($($arg)*)))
    };
}

/// As the standard one; a closed pipe is no error.
#[macro_export]
macro_rules! eprint {
    ($($arg:tt)*) => { $crate::output::eprint(::std::format_args!($($arg)*)) };
}

/// As the standard one; a closed pipe is no error.
#[macro_export]
macro_rules! eprintln {
    () => { $crate::output::eprint(::std::format_args!("\n")) };
    ($($arg:tt)*) => {
        $crate::output::eprint(::std::format_args!("{}\n", ::std::format_args!($($arg)*)))
    };
}
