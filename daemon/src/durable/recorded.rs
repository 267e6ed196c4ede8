//! What was done to the disk, operation by operation, and what of it a power loss may leave.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// One operation on the disk that has been done.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    MakeDirectory(PathBuf),
    /// A new file with this content, in the place of one that may be there.
    Write(PathBuf, Vec<u8>),
    WriteAt(PathBuf, u64, Vec<u8>),
    SyncFile(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncDirectory(PathBuf),
}

thread_local! {
    static RECORD: RefCell<Option<Vec<Operation>>> = const { RefCell::new(None) };
}

pub(super) fn note(operation: Operation) {
    RECORD.with_borrow_mut(|record| record.as_mut().map(|record| record.push(operation)));
}

/// Records what this thread does from now on.
pub(super) fn begin() {
    RECORD.set(Some(Vec::new()));
}

/// How many operations were done since.
pub(super) fn so_far() -> usize {
    RECORD.with_borrow(|record| record.as_ref().map_or(0, Vec::len))
}

pub(super) fn end() -> Vec<Operation> {
    RECORD.take().expect("begun")
}

/// A file apart from its name.
type Inode = usize;

#[derive(Clone, Debug)]
enum Target {
    Directory,
    File(Inode),
}

/// A change of names that is done as one: name, and what it is from then on.
type Names = Vec<(PathBuf, Option<Target>)>;

#[derive(Clone, Debug, Default)]
struct File {
    /// After its last sync.
    durable: Vec<u8>,
    /// Each may be on the disk, or not, or torn.
    unsynced: Vec<Change>,
}

#[derive(Clone, Debug)]
enum Change {
    All(Vec<u8>),
    Part(u64, Vec<u8>),
}

/// A disk with a volatile cache: what is durable, and what may become so in any order that does not pass a sync.
#[derive(Debug, Default)]
pub(super) struct Disk {
    files: Vec<File>,
    /// As the programs see them.
    live: BTreeMap<PathBuf, Target>,
    durable: BTreeMap<PathBuf, Target>,
    /// By directory, in order.
    unsynced: BTreeMap<PathBuf, Vec<Names>>,
}

impl Disk {
    /// After these operations, on a disk that had nothing but this directory.
    pub(super) fn after(operations: &[Operation]) -> Self {
        let mut disk = Self::default();
        for operation in operations {
            disk.done(operation);
        }
        disk
    }

    fn done(&mut self, operation: &Operation) {
        match operation {
            Operation::MakeDirectory(path) => {
                self.rename(path, vec![(path.clone(), Some(Target::Directory))]);
            }
            Operation::Write(path, bytes) => {
                let inode = match self.live.get(path) {
                    Some(Target::File(inode)) => *inode,
                    _ => {
                        self.files.push(File::default());
                        let inode = self.files.len() - 1;
                        self.rename(path, vec![(path.clone(), Some(Target::File(inode)))]);
                        inode
                    }
                };
                self.files[inode].unsynced.push(Change::All(bytes.clone()));
            }
            Operation::WriteAt(path, offset, bytes) => {
                let inode = self.inode(path);
                self.files[inode].unsynced.push(Change::Part(*offset, bytes.clone()));
            }
            Operation::SyncFile(path) => {
                let inode = self.inode(path);
                let file = &mut self.files[inode];
                for change in std::mem::take(&mut file.unsynced) {
                    apply(&mut file.durable, &change, usize::MAX);
                }
            }
            Operation::Rename(from, to) => {
                let target = Target::File(self.inode(from));
                self.rename(to, vec![(from.clone(), None), (to.clone(), Some(target))]);
            }
            Operation::Remove(path) => self.rename(path, vec![(path.clone(), None)]),
            Operation::SyncDirectory(path) => {
                for names in self.unsynced.remove(path).unwrap_or_default() {
                    change_names(&mut self.durable, &names);
                }
            }
        }
    }

    fn inode(&self, path: &Path) -> Inode {
        match self.live.get(path) {
            Some(Target::File(inode)) => *inode,
            other => panic!("{}: {other:?}", path.display()),
        }
    }

    fn rename(&mut self, within: &Path, names: Names) {
        change_names(&mut self.live, &names);
        let directory = within.parent().expect("all are within one").to_owned();
        self.unsynced.entry(directory).or_default().push(names);
    }

    /// Makes what a power loss leaves, in an empty directory that stands for `root`. `choose` is asked what of the
    /// unsynced there is: a number below the one that it is given.
    pub(super) fn lose_power(
        &self,
        root: &Path,
        into: &Path,
        choose: &mut impl FnMut(usize) -> usize,
    ) {
        let mut names = self.durable.clone();
        for change in self.unsynced.values().flatten() {
            if choose(2) == 1 {
                change_names(&mut names, change);
            }
        }
        let contents: Vec<Vec<u8>> = self.files.iter().map(|file| left_of(file, choose)).collect();
        // In order: a directory comes before what is in it. One that is lost takes that with it.
        for (path, target) in names {
            let place = into.join(path.strip_prefix(root).expect("within the root"));
            match target {
                Target::Directory if place.parent().is_some_and(Path::exists) => {
                    fs::create_dir(place).unwrap();
                }
                Target::File(inode) if place.parent().is_some_and(Path::exists) => {
                    fs::write(place, &contents[inode]).unwrap();
                }
                _ => {}
            }
        }
    }
}

fn change_names(names: &mut BTreeMap<PathBuf, Target>, change: &Names) {
    for (name, target) in change {
        match target {
            Some(target) => names.insert(name.clone(), target.clone()),
            None => names.remove(name),
        };
    }
}

/// Nothing of each unsynced change, all of it, or its first half.
fn left_of(file: &File, choose: &mut impl FnMut(usize) -> usize) -> Vec<u8> {
    let mut content = file.durable.clone();
    for change in &file.unsynced {
        let (Change::All(bytes) | Change::Part(_, bytes)) = change;
        match choose(3) {
            0 => {}
            1 => apply(&mut content, change, bytes.len() / 2),
            _ => apply(&mut content, change, usize::MAX),
        }
    }
    content
}

fn apply(content: &mut Vec<u8>, change: &Change, at_most: usize) {
    match change {
        Change::All(bytes) => *content = bytes[..bytes.len().min(at_most)].to_vec(),
        Change::Part(offset, bytes) => {
            let bytes = &bytes[..bytes.len().min(at_most)];
            let end = *offset as usize + bytes.len();
            content.resize(content.len().max(end), 0);
            content[*offset as usize..end].copy_from_slice(bytes);
        }
    }
}
