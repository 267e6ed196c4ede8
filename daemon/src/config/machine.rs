//! What only the machine can tell: whether files exist and fit what the configuration says.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use tidelock_config::{Diagnostic, Diagnostics, Located, Place, Size, format_duration};
use tidelock_protocol::machine::Machine;
use tidelock_tls::TlsError;

use super::{Config, Disk, Member, Security, cards};

/// Disks are replicated in whole sectors.
const SECTOR_BYTES: u64 = 512;

/// Checks everything that the configuration names on this machine, all of it at once. Changes
/// nothing.
pub fn check_machine(config: &Config, now: SystemTime) -> Result<(), Diagnostics> {
    let (mut found, expired) = find_mistakes(config, now);
    expired.into_iter().for_each(|wrong| found.push(wrong));
    found.into_result(())
}

/// Checks whatever a start needs: everything but that the host's certificate has not expired.
///
/// Guests need their disks, and a new certificate is taken up without a restart. Returns the mistake of an expired
/// certificate.
pub fn check_for_start(
    config: &Config,
    now: SystemTime,
) -> Result<Option<Diagnostic>, Diagnostics> {
    let (found, expired) = find_mistakes(config, now);
    found.into_result(expired)
}

/// Returns all mistakes but an expired certificate, and that one apart.
fn find_mistakes(config: &Config, now: SystemTime) -> (Diagnostics, Option<Diagnostic>) {
    let mut found = Diagnostics::new();
    let expired = match &config.backup.security {
        Security::Tls { files, place } => check_tls(config, files, place, now, &mut found),
        Security::Plaintext => None,
    };
    for member in config.groups.iter().flat_map(|group| &group.members) {
        match member.machine.as_ref().map(read_machine) {
            Some(Ok(machine)) => {
                check_machine_disks(&machine, member, &mut found);
                cards::check(member, &machine).into_iter().for_each(|wrong| found.push(wrong));
            }
            Some(Err(diagnostic)) => found.push(diagnostic),
            None => {}
        }
        member.disks.iter().for_each(|disk| check_disk(disk, &mut found));
    }
    check_no_disk_twice(config, &mut found);
    (found, expired)
}

/// Returns the mistake of an expired certificate; all others go to `found`.
fn check_tls(
    config: &Config,
    files: &tidelock_tls::Files,
    place: &Place,
    now: SystemTime,
    found: &mut Diagnostics,
) -> Option<Diagnostic> {
    let wrong =
        |error: TlsError| Diagnostic::new(place, error.to_string(), "files that can be used");
    let credentials = match files.load() {
        Ok(credentials) => credentials,
        Err(error) => {
            found.push(wrong(error));
            return None;
        }
    };
    let expired = match credentials.host_config(now) {
        Ok(_) => None,
        Err(error @ TlsError::Expired { .. }) => Some(wrong(error)),
        Err(error) => {
            found.push(wrong(error));
            None
        }
    };
    let name = &config.host.name;
    if !credentials.identity().speaks_for(name.as_str()) {
        let names = credentials.identity().names().join(", ");
        let what = format!(
            "the certificate {} is for {names}, not for {}: the backup would refuse this host",
            files.certificate.display(),
            name.value
        );
        let instead = format!("name = \"{}\"", credentials.identity().name());
        found.push(Diagnostic::new(&name.place, what, instead));
    }
    expired
}

/// Reads what is to be booted after a disaster.
pub fn read_machine(path: &Located<std::path::PathBuf>) -> Result<Machine, Diagnostic> {
    let wrong = |what: String, instead: String| {
        let what = format!("the machine description {}: {what}", path.display());
        Diagnostic::new(&path.place, what, instead)
    };
    let text = std::fs::read_to_string(&path.value)
        .map_err(|error| wrong(error.to_string(), "the path of a file that can be read".into()))?;
    tidelock_machine::read(&text).map_err(|error| wrong(error.what, error.instead))
}

/// The description of a member that has disks is of these disks: each is named, or none by its name.
fn check_machine_disks(machine: &Machine, member: &Member, found: &mut Diagnostics) {
    let (Some(path), false) = (&member.machine, machine.disks.is_empty()) else { return };
    let has = |name: &str| member.disks.iter().any(|disk| disk.name.as_str() == name);
    let foreign = machine.disks.iter().find(|disk| !has(&disk.name));
    let by_order = machine.disks.len() == member.disks.len()
        && machine.disks.iter().all(|disk| !has(&disk.name));
    let Some(foreign) = foreign.filter(|_| !by_order) else { return };
    let known = member.disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>().join(", ");
    let what = format!(
        "the machine description {} names the disk {}, which is not protected",
        path.display(),
        foreign.name
    );
    let instead = format!("the protected disks, by name or in their order: {known}");
    found.push(Diagnostic::new(&path.place, what, instead));
}

/// The size of an image or a block device.
pub fn disk_size(path: &Path) -> std::io::Result<u64> {
    let mut file = File::open(path)?;
    let kind = file.metadata()?.file_type();
    if !(kind.is_file() || kind.is_block_device()) {
        return Err(std::io::Error::other("neither a file nor a block device"));
    }
    file.seek(SeekFrom::End(0))
}

fn check_disk(disk: &Disk, found: &mut Diagnostics) {
    let path = disk.path.display();
    let size_bytes = match disk_size(&disk.path) {
        Ok(size_bytes) => size_bytes,
        Err(error) => {
            let what = format!("the disk {path}: {error}");
            let instead = "the path of a raw image or a block device that can be opened";
            found.push(Diagnostic::new(&disk.path.place, what, instead));
            return;
        }
    };
    let is = Size { bytes: size_bytes };
    if !disk.is_raw && is_qcow2(&disk.path) {
        let what = format!("the disk {path} is a qcow2 image, and only raw ones can be protected");
        let instead = "a raw image: qemu-img convert -O raw OLD NEW; or format = \"raw\" for the disk, if \
                       its guest has written that into a raw one";
        found.push(Diagnostic::new(&disk.path.place, what, instead));
    } else if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        let what = format!("the disk {path} has {is}, not a whole number of sectors");
        let instead = format!("an image of a multiple of {SECTOR_BYTES} bytes (see truncate(1))");
        found.push(Diagnostic::new(&disk.path.place, what, instead));
    } else if let Some(size) = disk.size.as_ref().filter(|size| size.bytes != size_bytes) {
        let kind = if size_bytes < size.bytes { "smaller" } else { "larger" };
        let what = format!("the disk {path} has {is}: {kind} than configured");
        let instead = format!("\"{is}\", if this is the right disk");
        found.push(Diagnostic::new(&size.place, what, instead));
    }
}

/// Two paths may lead to one disk, which would then be written by two sequencers.
fn check_no_disk_twice(config: &Config, found: &mut Diagnostics) {
    let mut seen: HashMap<(u64, u64), &Disk> = HashMap::new();
    let members = config.groups.iter().flat_map(|group| &group.members);
    for disk in members.flat_map(|member| &member.disks) {
        let Ok(metadata) = std::fs::metadata(&disk.path.value) else { continue };
        let identity = if metadata.file_type().is_block_device() {
            (u64::MAX, metadata.rdev())
        } else {
            (metadata.dev(), metadata.ino())
        };
        if let Some(first) = seen.insert(identity, disk) {
            let what = format!(
                "the disk {} is the same as {} in line {}",
                disk.path.display(),
                first.path.display(),
                first.path.place.line()
            );
            found.push(Diagnostic::new(&disk.path.place, what, "another disk"));
        }
    }
}

fn is_qcow2(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && magic == *b"QFI\xfb"
}

/// Says so when the own certificate ends soon; to be logged at start and once a day.
#[must_use]
pub fn certificate_warning(valid_for: Duration) -> Option<String> {
    const SOON: Duration = Duration::from_secs(30 * 86_400);
    let days = Duration::from_secs(valid_for.as_secs() / 86_400 * 86_400);
    if valid_for.is_zero() {
        let text = "the own certificate is not valid, or cannot be read: no connection to the backup can be made. Issue a new one \
                    with `tidelock pki issue`";
        return Some(text.to_owned());
    }
    (valid_for < SOON).then(|| {
        format!(
            "the own certificate ends in {}: issue a new one with `tidelock pki issue`, it is \
             taken up at the next connection",
            format_duration(days)
        )
    })
}
