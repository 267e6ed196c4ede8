//! Small files that are there after a power loss: replaced as a whole, or removed.
//!
//! Invariant: when a function here has returned, no crash and no power loss undoes what it did; until then a crash leaves
//! what was before or what comes after, never a mixture. `power_loss.rs` tries each point between two operations, with each
//! order in which a file system may have made what was not synced durable.
//!
//! They tell of guests' data, and a backlog is guests' data: files are for their owner alone, in directories that are.

#[cfg(test)]
mod power_loss;
#[cfg(test)]
mod recorded;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

/// Tells the test that records it, in tests, that an operation was done.
macro_rules! note {
    ($operation:ident($($argument:expr),*)) => {{
        #[cfg(test)]
        recorded::note(recorded::Operation::$operation($(($argument).to_owned().into()),*));
    }};
}

/// Replaces a file, whose directory is made if it is missing.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = parent(path)?;
    if !directory.exists() {
        make_directory(directory)?;
    }
    let aside = path.with_extension("new");
    // One that was left by a crash may have another mode.
    match fs::remove_file(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = private_file().write(true).create_new(true).open(&aside)?;
    file.write_all(bytes)?;
    note!(Write(&aside, bytes));
    file.sync_all()?;
    note!(SyncFile(&aside));
    fs::rename(&aside, path)?;
    note!(Rename(&aside, path));
    sync_directory(directory)
}

/// Writes a part of a file that is there. A crash before it has returned may leave any part of that.
pub fn write_at(path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    file.write_all_at(bytes, offset)?;
    note!(WriteAt(path, offset, bytes));
    file.sync_data()?;
    note!(SyncFile(path));
    Ok(())
}

/// Removes a file, if it is there.
pub fn remove(path: &Path) -> io::Result<()> {
    let directory = parent(path)?;
    match fs::remove_file(path) {
        Ok(()) => note!(Remove(path)),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        // Whoever has removed it may have been killed before that was durable.
        Err(_) if !directory.exists() => return Ok(()),
        Err(_) => {}
    }
    sync_directory(directory)
}

/// Makes a directory and those above it. Of one that is there the name is made durable: whoever has made it may have been
/// killed before.
pub fn make_directory(directory: &Path) -> io::Result<()> {
    let Ok(above) = parent(directory) else { return Ok(()) };
    if !directory.exists() {
        make_directory(above)?;
        match private_directory().create(directory) {
            Ok(()) => note!(MakeDirectory(directory)),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) => {}
        }
    }
    sync_directory(above)
}

/// A file that is created so is its owner's alone, with any umask.
pub(crate) fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// The same of a directory.
pub(crate) fn private_directory() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()?;
    note!(SyncDirectory(directory));
    Ok(())
}

fn parent(path: &Path) -> io::Result<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => Err(io::ErrorKind::InvalidInput.into()),
    }
}
