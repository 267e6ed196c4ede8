//! `tidelock-backup seed`: a group whose images begin as disks that are at this site already.
//!
//! ```text
//!  DATA_DIR/seeding/GROUP/images/*.unfinished ──whole──▶ images/* ──journal, group.json──▶ DATA_DIR/groups/GROUP
//! ```
//!
//! Invariant: `groups/GROUP` is there as a whole or not at all. A command that fails puts back what it has moved. One that
//! was killed leaves `seeding/GROUP`, and the same command goes on with what is whole there. It runs beside the server,
//! which is told at the end.

mod source;

use super::args::Seed;
use super::client::Client;
use super::export::progress;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde_json::json;
use source::{How, Source};
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::message::DiskSpec;
use tidelock_replica::group::{SEEDED, SeedError, SeededMember, seed, seeded_manifest};
use tidelock_replica::manifest::Manifest;
use tidelock_replica::text;
use tidelock_storage::files::Files;
use tidelock_store::image;

/// One disk, as it is named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeedDisk {
    member: String,
    disk: String,
    file: PathBuf,
}

impl FromStr for SeedDisk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (disk, file) = text.split_once('=')?;
            // Names may have dots in them, but no slashes.
            let (member, disk) = disk.split_once('/').or_else(|| disk.split_once('.'))?;
            let file = (!file.is_empty()).then(|| PathBuf::from(file))?;
            Some(Self { member: member.to_owned(), disk: disk.to_owned(), file })
        };
        parse().ok_or_else(|| "write MEMBER.DISK=FILE (or MEMBER/DISK=FILE)".to_owned())
    }
}

pub(super) async fn run(config: Config, args: Seed) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let work = Work { config: config.clone(), args: args.clone(), stop: Arc::clone(&stop) };
    let mut seeding = tokio::task::spawn_blocking(move || work.seed());
    let disks = tokio::select! {
        seeded = &mut seeding => seeded??,
        signal = super::asked_to_end() => {
            stop.store(true, Ordering::Release);
            let name = signal?;
            match seeding.await? {
                // It was done before it could be stopped.
                Ok(disks) => disks,
                Err(_) => bail!("{name}: group {} is not made", args.group),
            }
        }
    };
    // Without a server this opens the directory, as its next start does: what is wrong is told now.
    let client = Client::connect(config).await?;
    let runs = !client.is_alone();
    let adopted = client.ask(&Request::Adopt { group: args.group.clone() }).await;
    client.end().await;
    let Reply::Adopted = adopted? else { bail!("the server answered something else") };
    tell(&args, &disks, runs);
    Ok(())
}

fn tell(args: &Seed, disks: &[Seeded], server_runs: bool) {
    if args.json {
        let disks: Vec<_> = disks.iter().map(Seeded::to_json).collect();
        let pin = (!args.no_pin).then_some(SEEDED);
        let of =
            json!({ "group": args.group, "disks": disks, "pin": pin, "server_runs": server_runs });
        println!("{of}");
        return;
    }
    println!("group {} is seeded:", args.group);
    for of in disks {
        let size = text::bytes(of.size_bytes);
        println!("  {:<20} {size:>10}  {} {}", of.name, of.how.word(), of.file.display());
    }
    println!(
        "A host that attaches this group compares its disks with these, and sends what differs. Until that is done \
         its state cannot be recovered here"
    );
    if !args.no_pin {
        println!(
            "The disks as they are now stay, as pin {SEEDED}, and take room in the journal as soon as they are \
             written to. When nobody needs them any more: tidelock-backup pin {} {SEEDED} --remove",
            args.group
        );
    }
}

/// What became of one disk.
struct Seeded {
    name: String,
    file: PathBuf,
    size_bytes: u64,
    how: How,
}

impl Seeded {
    fn to_json(&self) -> serde_json::Value {
        json!({
            "name": self.name, "file": self.file, "size_bytes": self.size_bytes, "how": self.how.word(),
        })
    }
}

struct Work {
    config: Config,
    args: Seed,
    stop: Arc<AtomicBool>,
}

impl Work {
    fn seed(&self) -> Result<Vec<Seeded>> {
        let (seeding, groups) =
            (self.config.data_dir.join("seeding"), self.config.data_dir.join("groups"));
        let (dir, done) = (seeding.join(&self.args.group), groups.join(&self.args.group));
        // The names first: they become names of files.
        let names = seeded_manifest(&self.args.group, &self.members(|_| Ok(SIZE_UNKNOWN))?)?;
        ensure!(
            done.symlink_metadata().is_err(),
            "group {} exists: {} is there. To begin it anew, stop the server and move that away first",
            self.args.group,
            done.display()
        );
        let images = dir.join("images");
        for dir in [&groups, &images] {
            let made = fs::create_dir_all(dir);
            made.with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let lock = File::open(&dir)?;
        ensure!(
            flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok(),
            "another `seed` makes group {} right now",
            self.args.group
        );
        self.check_leftovers(&images, &names)?;
        let sources = self.sources(&images, &names)?;
        let mut taken = Taken::default();
        let made = self.make(&dir, &sources, &mut taken).and_then(|()| {
            // Not over a group that a host has made meanwhile.
            renameat_with(CWD, &dir, CWD, &done, RenameFlags::NOREPLACE)
                .with_context(|| format!("cannot make {}", done.display()))
        });
        if let Err(error) = made {
            taken.undo();
            drop(fs::remove_dir_all(dir.join("journal")));
            for (_, image) in image_names(&names) {
                drop(fs::remove_file(images.join(image::sums_path(&image))));
            }
            for left in ["group.json", "images", ""] {
                let left = dir.join(left);
                // What is not empty holds what could not be put back: that stays.
                drop(fs::remove_file(&left).or_else(|_| fs::remove_dir(&left)));
            }
            return Err(error);
        }
        sync_dir(&groups)?;
        sync_dir(&seeding)?;
        let of = |source: Source| Seeded {
            size_bytes: source.size_bytes,
            how: taken.how(&source),
            name: source.name,
            file: source.file,
        };
        Ok(sources.into_iter().map(of).collect())
    }

    /// The members in the order in which they are named, with their disks numbered like that.
    fn members(&self, size_bytes: impl Fn(&SeedDisk) -> Result<u64>) -> Result<Vec<SeededMember>> {
        let mut members: Vec<SeededMember> = Vec::new();
        for disk in &self.args.disks {
            let nth = members.iter().position(|m| m.name == disk.member).unwrap_or(members.len());
            if nth == members.len() {
                members.push(SeededMember { name: disk.member.clone(), disks: Vec::new() });
            }
            let disks = &mut members[nth].disks;
            let (name, size_bytes) = (disk.disk.clone(), size_bytes(disk)?);
            disks.push(DiskSpec { id: DiskId(disks.len() as u16), name, size_bytes });
        }
        Ok(members)
    }

    /// What an attempt has left that was killed.
    fn check_leftovers(&self, images: &Path, names: &Manifest) -> Result<()> {
        let wanted: Vec<_> = image_names(names).collect();
        for entry in fs::read_dir(images)? {
            let (path, name) = entry.map(|e| (e.path(), e.file_name()))?;
            let name = name.to_string_lossy();
            if name.ends_with(source::UNFINISHED) || name.ends_with(image::SUMS) {
                fs::remove_file(&path)?;
            } else {
                ensure!(
                    wanted.iter().any(|(_, wanted)| *wanted == name),
                    "{} is left of a seed of other disks that was killed: move it away first",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// Opens and checks all files before anything is done with any of them.
    fn sources(&self, images: &Path, names: &Manifest) -> Result<Vec<Source>> {
        let images = image_names(names).map(|(key, image)| (key, images.join(image)));
        let images: Vec<_> = images.collect();
        let open = |disk: &SeedDisk| {
            let writer = names.writers.iter().position(|w| *w == disk.member).expect("named");
            let key = (WriterId(writer as u16), disk.disk.clone());
            let (_, image) = images.iter().find(|(of, _)| *of == key).expect("named");
            let name = format!("{}.{}", disk.member, disk.disk);
            Source::open(name, &disk.file, image, self.args.moves)
        };
        let sources = self.args.disks.iter().map(open).collect::<Result<Vec<_>>>()?;
        for (nth, source) in sources.iter().enumerate() {
            let twice = sources[..nth].iter().find(|other| other.is_same_file(source));
            if let Some(twice) = twice {
                bail!("{} and {} are one file", twice.file.display(), source.file.display());
            }
        }
        Ok(sources)
    }

    fn make(&self, dir: &Path, sources: &[Source], taken: &mut Taken) -> Result<()> {
        let sizes = |disk: &SeedDisk| {
            let name = format!("{}.{}", disk.member, disk.disk);
            Ok(sources.iter().find(|of| of.name == name).expect("opened").size_bytes)
        };
        let manifest = seeded_manifest(&self.args.group, &self.members(sizes)?)?;
        let bar = progress("seeding", sources.iter().map(|of| of.size_bytes).sum());
        for source in sources {
            taken.take(source, &bar, &self.stop)?;
        }
        bar.finish_and_clear();
        let storage = Files::new(dir.to_owned());
        let options = self.config.options(&self.args.group);
        let now_ms = crate::server::clock::now().unix_ms;
        let seeded = seed(&storage, &manifest, options.journal, now_ms, !self.args.no_pin);
        seeded.map_err(|error| match error.is_full() {
            true => source::no_room(dir),
            false => SeedError::into(error),
        })?;
        give_to_owner_of(&self.config.data_dir, dir)
    }
}

/// In the place of sizes while only names are looked at.
const SIZE_UNKNOWN: u64 = tidelock_store::image::SECTOR_BYTES;

/// Each disk, and the name of its image.
fn image_names(manifest: &Manifest) -> impl Iterator<Item = ((WriterId, String), String)> + '_ {
    manifest.disks().map(|(writer, disk)| {
        let path = manifest.image_path(writer, disk);
        let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
        ((writer, disk.name.clone()), name)
    })
}

/// What was done so far, so that it can be undone.
#[derive(Default)]
struct Taken(Vec<(PathBuf, PathBuf, How)>);

impl Taken {
    fn take(&mut self, source: &Source, bar: &ProgressBar, stop: &AtomicBool) -> Result<()> {
        let how = source.take(bar, stop)?;
        self.0.push((source.file.clone(), source.image.clone(), how));
        Ok(())
    }

    fn how(&self, source: &Source) -> How {
        let taken = self.0.iter().find(|(_, image, _)| *image == source.image);
        taken.map_or(How::Kept, |(_, _, how)| *how)
    }

    fn undo(&self) {
        for (file, image, how) in &self.0 {
            let undone = match how {
                How::Moved => renameat_with(CWD, image, CWD, file, RenameFlags::NOREPLACE)
                    .map_err(std::io::Error::from),
                How::Copied | How::Reflinked => fs::remove_file(image),
                How::Kept => Ok(()),
            };
            if let Err(error) = undone {
                eprintln!("{} stays where it is: {error}", image.display());
            }
        }
    }
}

/// The server may run as a user of its own, and root seeds.
fn give_to_owner_of(data_dir: &Path, dir: &Path) -> Result<()> {
    let owner = fs::metadata(data_dir)?;
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let found = path.symlink_metadata()?;
        if found.is_dir() {
            let entries = fs::read_dir(&path)?.map(|e| Ok(e?.path()));
            todo.extend(entries.collect::<std::io::Result<Vec<_>>>()?);
        }
        if (found.uid(), found.gid()) != (owner.uid(), owner.gid()) {
            chown(&path, Some(owner.uid()), Some(owner.gid()))
                .with_context(|| format!("cannot give {} to the server's user", path.display()))?;
        }
    }
    Ok(())
}

fn sync_dir(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.with_context(|| format!("cannot sync {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_named_with_their_members() {
        let parse = |text: &str| text.parse::<SeedDisk>();
        let of = |member: &str, disk: &str, file: &str| SeedDisk {
            member: member.into(),
            disk: disk.into(),
            file: file.into(),
        };
        assert_eq!(parse("db.root=/srv/db.img"), Ok(of("db", "root", "/srv/db.img")));
        assert_eq!(parse("db.1/root.2=a=b"), Ok(of("db.1", "root.2", "a=b")));
        for bad in ["db.root", "db=x", "db.root=", "=x"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
