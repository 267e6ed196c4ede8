//! What is kept beside an exported image: what it is of, so that a wrong base is refused, and while it is being made,
//! what was asked for, so that the same command goes on.
//!
//! Both are JSON, format 1: `OUT.tidelock.json` and `OUT.unfinished.json`.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;

/// The version of both.
pub(super) const FORMAT: u32 = 1;

/// What an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) format_version: u32,
    pub(super) group: String,
    /// `member.disk`.
    pub(super) disk: String,
    pub(super) size_bytes: u64,
    /// `raw` or `qcow2`.
    pub(super) format: String,
    pub(super) at: Moment,
    /// Of its content.
    pub(super) digest: String,
    /// What it is over.
    pub(super) base: Option<BaseRecord>,
}

/// What an image is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BaseRecord {
    /// The file, as the image names it.
    pub(super) file: PathBuf,
    pub(super) at: Moment,
    /// Of its content; `None`: it was not known.
    pub(super) digest: Option<String>,
}

/// An image that another one is to be over.
#[derive(Clone, Debug)]
pub(super) struct Base {
    pub(super) file: PathBuf,
    pub(super) at: When,
    /// What is beside it.
    pub(super) known: Option<Record>,
}

impl Base {
    pub(super) fn of(file: &Path, record: &Record) -> Self {
        Self {
            file: file.to_owned(),
            at: When::Hlc(record.at.hlc_raw),
            known: Some(record.clone()),
        }
    }
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExportRequest {
    pub(super) format_version: u32,
    pub(super) group: String,
    pub(super) disk: String,
    pub(super) format: String,
    /// The point as it was written.
    pub(super) asked: String,
    /// What that was.
    pub(super) at: Moment,
    pub(super) base: Option<PathBuf>,
}

impl Record {
    /// What is beside an image; `None`: nothing.
    pub(super) fn beside(image: &Path) -> Result<Option<Self>> {
        let record: Option<Self> = read(&beside(image))?;
        if let Some(record) = &record {
            check(&beside(image), record.format_version)?;
        }
        Ok(record)
    }

    pub(super) fn write(&self, image: &Path) -> Result<()> {
        replace(&beside(image), &serde_json::to_vec_pretty(self)?)
    }
}

impl ExportRequest {
    /// What was begun and not ended.
    pub(super) fn find(out: &Path) -> Result<Option<Self>> {
        let begun: Option<Self> = read(&with(out, ".unfinished.json"))?;
        if let Some(begun) = &begun {
            check(&with(out, ".unfinished.json"), begun.format_version)?;
        }
        Ok(begun)
    }

    pub(super) fn write(&self, out: &Path) -> Result<()> {
        // Of a record that is gone.
        remove_all(&[unfinished(out), empty(out), digests(out)])?;
        replace(&with(out, ".unfinished.json"), &serde_json::to_vec_pretty(self)?)
    }

    /// The image has its name, or is given up: takes out what was for making it.
    pub(super) fn remove(out: &Path) -> Result<()> {
        remove_all(&[with(out, ".unfinished.json"), unfinished(out), empty(out), digests(out)])
    }
}

/// Where it is said what an image is.
pub(super) fn beside(image: &Path) -> PathBuf {
    with(image, ".tidelock.json")
}

/// The image until it is whole.
pub(super) fn unfinished(out: &Path) -> PathBuf {
    with(out, ".unfinished")
}

/// And until it is an image.
pub(super) fn empty(out: &Path) -> PathBuf {
    with(out, ".unfinished.new")
}

/// The digests of its blocks.
pub(super) fn digests(out: &Path) -> PathBuf {
    with(out, ".unfinished.digests")
}

fn with(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn remove_all(files: &[PathBuf]) -> Result<()> {
    for file in files {
        match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("cannot remove {}", file.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Option<T>> {
    let text = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    serde_json::from_slice(&text)
        .map(Some)
        .with_context(|| format!("{} is damaged: remove it", path.display()))
}

fn check(path: &Path, format: u32) -> Result<()> {
    ensure!(
        format == FORMAT,
        "{} has format {format}, this program knows {FORMAT}: use a newer one",
        path.display()
    );
    Ok(())
}

fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let new = with(path, ".new");
    let written = || {
        let mut file = File::create(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    written().with_context(|| format!("cannot write {}", path.display()))?;
    sync_dir(path)
}

/// Makes the entries of a file's directory durable.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all().with_context(|| format!("cannot sync {}", dir.display()))
}
