//! Files that are open by name, within what the process may have open.
//!
//! A journal keeps two or three files for each of its segments, and reads most of them once in months. So a file that was not
//! used for long is closed when there are too many, and opened again by its name when it is used. Closed is only what has
//! nothing unsynced: the kernel tells an error of a write to those who have the file open. A file keeps being the same one
//! when its name changes or goes: names change through this table alone, and what loses its name stays open.
//!
//! More than the limit are open only while so many have unsynced writes, or no name.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};

/// Half of what the process may have open; connections, sockets and exports have the rest.
const SHARE: u64 = 2;
/// Below this nothing is closed: each use would open a file.
const LEAST: usize = 64;

/// All files that are open by name. Locked before any one of them.
#[derive(Debug, Default)]
pub struct OpenFiles {
    names: Mutex<Names>,
    open: AtomicUsize,
    uses: AtomicU64,
    /// `None`: what the process may have.
    limit: Option<usize>,
}

#[derive(Debug, Default)]
struct Names {
    handles: HashMap<PathBuf, Vec<Weak<Handle>>>,
    /// So many names are there when those that nobody has open are left out again.
    sweep_at: usize,
}

/// One file, open or not.
#[derive(Debug)]
pub struct Handle {
    all: Arc<OpenFiles>,
    /// Device and inode.
    identity: (u64, u64),
    last_use: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: Option<Arc<File>>,
    /// `None`: it has none any more, and stays open. Without either it was removed by somebody else.
    name: Option<PathBuf>,
    has_unsynced: bool,
}

impl OpenFiles {
    /// Those of this process.
    #[must_use]
    pub fn of_process() -> Arc<Self> {
        static ALL: LazyLock<Arc<OpenFiles>> = LazyLock::new(Arc::default);
        Arc::clone(&ALL)
    }

    /// A table of its own, with so many open at once.
    #[cfg(test)]
    fn with_limit(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: Some(limit), ..Self::default() })
    }

    /// Opens a file for reading and writing; `create`: it must not exist.
    pub fn open(self: &Arc<Self>, name: PathBuf, create: bool) -> io::Result<Arc<Handle>> {
        let mut names = self.lock();
        let file = self.open_file(&mut names, &name, create)?;
        let handle = Arc::new(Handle {
            all: Arc::clone(self),
            identity: identity(&file)?,
            last_use: AtomicU64::new(self.tick()),
            state: Mutex::new(State {
                file: Some(Arc::new(file)),
                name: Some(name.clone()),
                has_unsynced: create,
            }),
        });
        names.add(name, &handle);
        Ok(handle)
    }

    /// Removes a name. Who has the file open keeps it.
    pub fn remove(&self, name: &Path) -> io::Result<()> {
        let mut names = self.lock();
        self.keep_nameless(&mut names, name)?;
        let removed = std::fs::remove_file(name);
        match removed {
            Ok(()) => drop(names.handles.remove(name)),
            Err(_) => names.call(name, name),
        }
        removed
    }

    /// Gives a file another name, replacing what has it.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut names = self.lock();
        self.keep_nameless(&mut names, to)?;
        let renamed = std::fs::rename(from, to);
        match renamed {
            Ok(()) => {
                names.call(from, to);
                names.handles.remove(to);
                if let Some(moved) = names.handles.remove(from) {
                    names.handles.insert(to.to_owned(), moved);
                }
            }
            Err(_) => names.call(to, to),
        }
        renamed
    }

    /// Opens each handle of this name if it is closed, and takes its name away, so that its file stays open.
    fn keep_nameless(&self, names: &mut Names, name: &Path) -> io::Result<()> {
        for handle in names.of(name) {
            match handle.reopen(names) {
                Err(error) if is_too_many(&error) => return Err(error),
                // It is not there, or is another file: there is nothing to keep.
                _ => handle.lock().name = None,
            }
        }
        Ok(())
    }

    fn open_file(&self, names: &mut Names, name: &Path, create: bool) -> io::Result<File> {
        if self.open.load(Relaxed) >= self.limit() {
            names.close_oldest();
        }
        let mut options = OpenOptions::new();
        // The files hold guests' data: owner only.
        options.read(true).write(true).create_new(create).mode(0o600);
        let file = match options.open(name) {
            Err(error) if is_too_many(&error) => {
                names.close_oldest();
                options.open(name)?
            }
            opened => opened?,
        };
        self.open.fetch_add(1, Relaxed);
        Ok(file)
    }

    fn limit(&self) -> usize {
        let of_process = || {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            limit.map_or(usize::MAX, |limit| usize::try_from(limit / SHARE).unwrap_or(usize::MAX))
        };
        self.limit.unwrap_or_else(|| of_process().max(LEAST))
    }

    fn tick(&self) -> u64 {
        self.uses.fetch_add(1, Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        self.names.lock().expect("no panic while held")
    }
}

impl Names {
    fn add(&mut self, name: PathBuf, handle: &Arc<Handle>) {
        self.handles.entry(name).or_default().push(Arc::downgrade(handle));
        if self.handles.len() > self.sweep_at {
            self.handles.retain(|_, of_name| {
                of_name.retain(|handle| handle.strong_count() > 0);
                !of_name.is_empty()
            });
            self.sweep_at = 2 * self.handles.len() + LEAST;
        }
    }

    fn of(&self, name: &Path) -> Vec<Arc<Handle>> {
        self.handles.get(name).into_iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// Sets the name of every handle listed below `name` to `new`.
    fn call(&self, name: &Path, new: &Path) {
        self.of(name).iter().for_each(|handle| handle.lock().name = Some(new.to_owned()));
    }

    /// Closes a quarter of what can be closed, that which was not used for longest.
    fn close_oldest(&mut self) {
        let all = self.handles.values().flatten().filter_map(Weak::upgrade);
        let mut closable: Vec<_> = all.filter(|handle| handle.lock().may_close()).collect();
        closable.sort_by_key(|handle| handle.last_use.load(Relaxed));
        for handle in &closable[..closable.len().div_ceil(4)] {
            let mut state = handle.lock();
            if state.may_close() {
                state.file = None;
                handle.all.open.fetch_sub(1, Relaxed);
            }
        }
    }
}

impl State {
    fn may_close(&self) -> bool {
        self.file.is_some() && self.name.is_some() && !self.has_unsynced
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.lock().file.is_some() {
            self.all.open.fetch_sub(1, Relaxed);
        }
    }
}

impl Handle {
    /// The file, to read.
    pub fn file(self: &Arc<Self>) -> io::Result<Arc<File>> {
        self.used(false)
    }

    /// The file, to change: it stays open until it is synced.
    pub fn file_to_change(self: &Arc<Self>) -> io::Result<Arc<File>> {
        self.used(true)
    }

    /// Makes everything written durable.
    pub fn sync(self: &Arc<Self>) -> io::Result<()> {
        let file = self.used(true)?;
        // The mark is cleared before the sync: a write during the sync sets it again.
        self.lock().has_unsynced = false;
        let synced = file.sync_data();
        if synced.is_err() {
            self.lock().has_unsynced = true;
        }
        synced
    }

    fn used(self: &Arc<Self>, changes: bool) -> io::Result<Arc<File>> {
        self.last_use.store(self.all.tick(), Relaxed);
        {
            let mut state = self.lock();
            if let Some(file) = &state.file {
                let file = Arc::clone(file);
                state.has_unsynced |= changes;
                return Ok(file);
            }
        }
        let mut names = self.all.lock();
        let file = self.reopen(&mut names)?;
        self.lock().has_unsynced |= changes;
        Ok(file)
    }

    fn reopen(&self, names: &mut Names) -> io::Result<Arc<File>> {
        let name = {
            let state = self.lock();
            if let Some(file) = &state.file {
                return Ok(Arc::clone(file));
            }
            state.name.clone().ok_or(io::ErrorKind::NotFound)?
        };
        let file = self.all.open_file(names, &name, false)?;
        if identity(&file)? != self.identity {
            self.all.open.fetch_sub(1, Relaxed);
            let what = format!("{} was replaced while it was closed", name.display());
            return Err(io::Error::other(what));
        }
        let file = Arc::new(file);
        self.lock().file = Some(Arc::clone(&file));
        Ok(file)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

fn is_too_many(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn content(handle: &Arc<Handle>) -> String {
        let mut bytes = vec![0; 16];
        let len = handle.file().unwrap().read_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    }

    fn made(all: &Arc<OpenFiles>, dir: &Path, nth: usize) -> Arc<Handle> {
        let handle = all.open(dir.join(nth.to_string()), true).unwrap();
        handle.file_to_change().unwrap().write_all_at(nth.to_string().as_bytes(), 0).unwrap();
        handle
    }

    #[test]
    fn more_files_than_may_be_open_are_the_same_files() {
        let dir = tempfile::tempdir().unwrap();
        let at = |nth: usize| dir.path().join(nth.to_string());
        let all = OpenFiles::with_limit(10);
        let files: Vec<_> = (0..100).map(|nth| made(&all, dir.path(), nth)).collect();
        assert_eq!(all.open.load(Relaxed), 100, "nothing is closed that has unsynced writes");
        files.iter().for_each(|file| file.sync().unwrap());
        let last = made(&all, dir.path(), 100);
        (0..20).for_each(|_| all.lock().close_oldest());
        assert_eq!(all.open.load(Relaxed), 1, "all but the one that was written");
        for (nth, file) in files.iter().enumerate() {
            assert_eq!(content(file), nth.to_string());
            assert!(all.open.load(Relaxed) <= 10);
        }
        // Names change and go while the files are closed.
        (0..20).for_each(|_| all.lock().close_oldest());
        all.rename(&at(1), &at(2)).unwrap();
        all.remove(&at(3)).unwrap();
        (0..20).for_each(|_| all.lock().close_oldest());
        assert_eq!([1, 2, 3, 4].map(|nth| content(&files[nth])), ["1", "2", "3", "4"]);
        assert_eq!(content(&all.open(at(2), false).unwrap()), "1");
        assert!(!at(1).exists() && !at(3).exists());
        let missing = all.remove(&at(3)).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        drop((files, last));
        assert_eq!(all.open.load(Relaxed), 0);
    }

    #[test]
    fn a_file_that_somebody_has_replaced_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let all = OpenFiles::with_limit(10);
        let file = made(&all, dir.path(), 1);
        file.sync().unwrap();
        all.lock().close_oldest();
        let at = dir.path().join("1");
        std::fs::rename(&at, dir.path().join("other")).unwrap();
        assert_eq!(file.file().unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&at, "2").unwrap();
        assert!(file.file().unwrap_err().to_string().contains("was replaced"));
        // It can be put out of the way, and the name be given anew.
        all.remove(&at).unwrap();
        assert_eq!(content(&made(&all, dir.path(), 1)), "1");
    }
}
