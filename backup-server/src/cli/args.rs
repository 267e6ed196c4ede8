//! The arguments.

use super::seed::SeedDisk;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use tidelock_config::Size;
use tidelock_replica::travel::when::{self, When};

const AT_HELP: &str = "A point in time (AT, FROM, TO) is one of:
  latest, oldest                   the ends of what can be seen
  2026-11-22T13:05:00Z             the wall clock, UTC unless it has a zone; seconds may be left out
  -5min, -90s, -1h30min, now-2d    before now
  hlc:L.C                          the group's own clock, as it is shown by every command
  db=120,web=7                     not after these seqs; members that are not named are not limited
  bookmark:NAME                    of a bookmark or a pin
What is shown is a consistent state of the whole group, with nothing that is later.";

const RECOVER_HELP: &str = "With --boot the server runs the VMs: they go on whatever becomes of this terminal. At a terminal the console of a VM
that is alone is shown: Ctrl-] leaves it. `tidelock-backup machine` lists, attaches to and stops VMs.";

const BISECT_HELP: &str = "The command is run once for each step, as `git bisect run` does it. Its exit code says what it saw:
  0               good
  1 to 124, 126, 127   bad
  125             cannot say: another point is tried
  128 and more, or a signal: the search ends
It gets:
  TIDELOCK_VIEW_<MEMBER>_<DISK>    the path of the NBD socket of a disk, writable (export MEMBER.DISK);
                                   letters are upper case, other characters than letters and digits are _
  TIDELOCK_VIEW_DIR                the directory with all of them, as MEMBER.DISK.sock
  TIDELOCK_GROUP, TIDELOCK_STEP    the group, and which step this is
  TIDELOCK_AT, TIDELOCK_AT_HLC, TIDELOCK_AT_SEQS    the point: wall clock, hlc:L.C, seqs
What it writes to the disks is gone with the step. What it prints goes to standard error.

Exit codes of bisect itself: 0 the first bad instant is exact to one record; 3 it is one of several, because the command
could not say or records may still arrive; 1 an error, also if --from is bad or --to is good.";

const SEED_HELP: &str = "FILE is a raw image or a block device that nobody uses: what the old primary's daemon had, after this group was
recovered elsewhere, or disks that were shipped. Name all members with disks, and the disks of each, in the order of
the hosts' configuration. It may be in any state: when the host attaches, both sides are compared by digests, and what
differs is sent. Until that is done, nothing can be recovered.

Do it before the host's daemon is started. It runs beside the server, as root or as the server's user. If it is
killed, give the same command again.";

/// Tidelock's backup site: receives what protected VMs write, and recovers them.
#[derive(Debug, Parser)]
#[command(name = "tidelock-backup", version)]
pub struct Args {
    /// The configuration
    #[arg(long, global = true, default_value = "/etc/tidelock/backup.toml", value_name = "FILE")]
    pub config: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the server
    Serve {
        /// Only check the configuration
        #[arg(long)]
        check: bool,
    },
    /// Show the groups
    Status {
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Make this site the primary of a group: fence the old primary, serve the disks
    #[command(after_help = RECOVER_HELP)]
    Recover(Recover),
    /// Recovered VMs that run here: list them, attach to a console, stop them; approve what hosts say about theirs
    Machine(Machine),
    /// Show damaged segments of the journal, and what they affect; check them again, or give one up
    Damaged(Damaged),
    /// Show what can be kept of a journal that cannot be opened, or cut it there
    Repair(Repair),
    /// Make a group of disks that are here already, so that the first host to attach it sends only what differs
    #[command(after_help = SEED_HELP)]
    Seed(Seed),
    /// Say which host a member belongs to
    #[command(subcommand)]
    Member(Member),
    /// Take a member out of a group for good: nothing waits for it any more, and it is not recovered. Or remove a group
    Remove(Remove),
    /// Copy a disk of a group into an image, before or after a recovery, without stopping anything
    #[command(after_help = AT_HELP)]
    Export(Export),
    /// Serve the disks of a group as they were at a point in time, over NBD, without copying
    #[command(after_help = AT_HELP)]
    View(View),
    /// Make copies of all disks of a group at a point in time that outlive the window, move them, list them
    #[command(after_help = AT_HELP)]
    Snapshot(Snapshot),
    /// Show what can be seen of the past: the window, how much was written when, bookmarks and pins
    #[command(after_help = AT_HELP)]
    Timeline(Timeline),
    /// Give a point in time a name; it lives as long as the point is in the window
    #[command(after_help = AT_HELP)]
    Bookmark(Mark),
    /// Give a point in time a name and keep it, whatever the window is
    #[command(after_help = AT_HELP)]
    Pin(Mark),
    /// Show which extents were written between two points in time, or make an increment of them
    #[command(after_help = AT_HELP)]
    Diff(Diff),
    /// Apply an increment, which `diff --output` made, to a raw image of its first point
    Apply(Apply),
    /// Find the first instant at which a command of yours finds the disks bad
    #[command(after_help = BISECT_HELP)]
    Bisect(Bisect),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct View {
    /// The group
    #[arg(required_unless_present_any = ["list", "close", "roll"])]
    pub(crate) group: Option<String>,
    /// The point in time [default: latest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) at: Option<When>,
    /// The disks can be written to; the replica does not change, and what was written goes with the view
    #[arg(long)]
    pub(crate) write: bool,
    /// What may be written, all disks together [default: 1GiB]
    #[arg(long, value_name = "SIZE", requires = "write")]
    pub(crate) quota: Option<Size>,
    /// The view's name [default: view-N]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Leave it open in the server, until --close or the server's end
    #[arg(long)]
    pub(crate) detach: bool,
    /// Show the views that are open
    #[arg(long, conflicts_with_all = ["group", "at", "write", "name", "detach", "close"])]
    pub(crate) list: bool,
    /// Close a view
    #[arg(long, value_name = "NAME", conflicts_with_all = ["group", "at", "write", "name", "detach"])]
    pub(crate) close: Option<String>,
    /// Move a view that is open to another point in time; its sockets and clients stay
    #[arg(long, value_name = "NAME", conflicts_with_all = ["group", "at", "write", "name", "detach", "list", "close"])]
    pub(crate) roll: Option<String>,
    /// Where a view is moved to [default: latest]
    #[arg(long, value_name = "AT", requires = "roll", allow_hyphen_values = true)]
    pub(crate) to: Option<When>,
    /// Throw away what was written to a writable view that is moved
    #[arg(long, requires = "roll")]
    pub(crate) discard_writes: bool,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Snapshot {
    /// The group
    #[arg(required_unless_present = "list")]
    pub(crate) group: Option<String>,
    /// The snapshot's name; several with a point each are made in one pass: NAME=AT NAME=AT
    #[arg(required_unless_present_any = ["list", "remove", "verify"], value_name = "NAME[=AT]")]
    pub(crate) names: Vec<String>,
    /// The point in time [default: latest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) at: Option<When>,
    /// Store only what is different from this snapshot, as qcow2 over its images
    #[arg(long, value_name = "NAME", conflicts_with = "roll_to")]
    pub(crate) base: Option<String>,
    /// Move a snapshot that is there to this point, forward or back; only the difference is written
    #[arg(long, value_name = "AT", conflicts_with = "at", allow_hyphen_values = true)]
    pub(crate) roll_to: Option<When>,
    /// Read and write so much each second at most, like 50MiB/s
    #[arg(long, value_name = "SIZE/s", value_parser = parse_rate)]
    pub(crate) rate: Option<Size>,
    /// Begin at this time; the point is that of the asking, and is held until it is made
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) not_before: Option<When>,
    /// Spread the work over this span, like 10min
    #[arg(long, value_name = "SPAN", value_parser = when::parse_span_ms)]
    pub(crate) over: Option<u64>,
    /// It goes by itself after this span, like 7d
    #[arg(long, value_name = "SPAN", value_parser = when::parse_span_ms)]
    pub(crate) expires: Option<u64>,
    /// Do not wait for it: the server makes it
    #[arg(long)]
    pub(crate) detach: bool,
    /// Show those that there are
    #[arg(long, conflicts_with_all = ["names", "at", "base", "roll_to", "remove", "verify"])]
    pub(crate) list: bool,
    /// Take a snapshot out
    #[arg(long, value_name = "NAME", conflicts_with_all = ["names", "at", "base", "roll_to", "verify"])]
    pub(crate) remove: Option<String>,
    /// Read a snapshot's images, and say whether they are what they were
    #[arg(long, value_name = "NAME", conflicts_with_all = ["names", "at", "base", "roll_to"])]
    pub(crate) verify: Option<String>,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Damaged {
    /// The group
    pub(crate) group: String,
    /// Look at them again now: what was restored from a copy is no longer damaged
    #[arg(long)]
    pub(crate) check: bool,
    /// Give this segment up: its file is not kept, and what is damaged stays so until it is written again
    #[arg(long, value_name = "SEGMENT", conflicts_with = "check")]
    pub(crate) forget: Option<u64>,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Repair {
    /// The group
    pub(crate) group: String,
    /// Cut it: what is behind the damage goes to the quarantine
    #[arg(long)]
    pub(crate) yes: bool,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

/// Bytes each second.
fn parse_rate(text: &str) -> Result<Size, String> {
    let size: Size = text.strip_suffix("/s").unwrap_or(text).parse()?;
    if size.bytes == 0 {
        return Err("nothing would ever be done".into());
    }
    Ok(size)
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Timeline {
    /// The group
    pub(crate) group: String,
    /// From here [default: oldest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) from: Option<When>,
    /// To here [default: latest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) to: Option<When>,
    /// In so many spans
    #[arg(long, default_value = "24", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) buckets: u32,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Mark {
    /// The group
    pub(crate) group: String,
    /// The name: letters, digits, `.`, `_` and `-`
    #[arg(required_unless_present = "list")]
    pub(crate) name: Option<String>,
    /// The point in time [default: latest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) at: Option<When>,
    /// It goes by itself after this span, like 7d or 12h
    #[arg(long, value_name = "SPAN", value_parser = when::parse_span_ms)]
    pub(crate) expires: Option<u64>,
    /// Move the one that has this name
    #[arg(long = "move")]
    pub(crate) moves: bool,
    /// Take it out
    #[arg(long, conflicts_with_all = ["at", "expires", "moves"])]
    pub(crate) remove: bool,
    /// Show all
    #[arg(long, conflicts_with_all = ["name", "at", "expires", "moves", "remove"])]
    pub(crate) list: bool,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Diff {
    /// The group
    pub(crate) group: String,
    /// The first point in time
    #[arg(allow_hyphen_values = true)]
    pub(crate) from: When,
    /// The second
    #[arg(allow_hyphen_values = true)]
    pub(crate) to: When,
    /// Of this disk only, as member.disk
    #[arg(long)]
    pub(crate) disk: Option<String>,
    /// Each extent: offset and length in bytes
    #[arg(long, conflicts_with = "output")]
    pub(crate) extents: bool,
    /// Write the extents with their content at TO into this file, which must not exist
    #[arg(long, value_name = "FILE", requires = "disk")]
    pub(crate) output: Option<PathBuf>,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Apply {
    /// The increment
    pub(crate) increment: PathBuf,
    /// The raw image, which is changed in place
    pub(crate) image: PathBuf,
    /// For programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Bisect {
    /// The group
    pub(crate) group: String,
    /// A point in time that is good
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) from: When,
    /// A point in time that is bad
    #[arg(long, value_name = "AT", allow_hyphen_values = true, default_value = "latest")]
    pub(crate) to: When,
    /// What the command may write, all disks together
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub(crate) quota: Size,
    /// Give up after so many points of which the command could not say
    #[arg(long, value_name = "N", default_value = "32")]
    pub(crate) skips: usize,
    /// Pin the last good point under this name, so that the window's end does not pass it
    #[arg(long, value_name = "NAME")]
    pub(crate) pin: Option<String>,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// The check, after `--`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Machine {
    #[command(subcommand)]
    pub(crate) command: MachineCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MachineCommand {
    /// Show the recovered VMs that run here
    List {
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Attach to a VM's console; Ctrl-] leaves it, and the VM goes on
    Attach {
        /// The group
        group: String,
        /// The member
        member: String,
    },
    /// Shut VMs down
    Stop {
        /// The group
        group: String,
        /// The member [default: all]
        member: Option<String>,
        /// As if the power failed
        #[arg(long)]
        now: bool,
        /// How long guests have for it
        #[arg(long, value_name = "SPAN", default_value = "2min", value_parser = when::parse_span_ms)]
        within: u64,
    },
    /// Show what hosts have changed in their machine descriptions since these were approved, and approve them
    Approve {
        /// The group
        group: String,
        /// The member [default: all]
        member: Option<String>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Recover {
    /// The group
    pub(crate) group: String,
    /// It is certain that the old primary no longer runs: do not wait for its lease to end
    #[arg(long)]
    pub(crate) primary_is_dead: bool,
    /// With --primary-is-dead, for scripts: also if a host of the group is connected
    #[arg(long, requires = "primary_is_dead")]
    pub(crate) although_connected: bool,
    /// Recover to this point in time; what came later is left out for good [default: everything that can be]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) at: Option<When>,
    /// Also if some of that state is damaged and cannot be read: guests get I/O errors there
    #[arg(long)]
    pub(crate) accept_damage: bool,
    /// With --at: also if there are pins of later points, which are lost for good
    #[arg(long, requires = "at")]
    pub(crate) drop_later_pins: bool,
    /// Boot the group's VMs with QEMU
    #[arg(long)]
    pub(crate) boot: bool,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Connect a network: NAME=tap:INTERFACE, NAME=bridge:BRIDGE, NAME=user; of one VM of several: MEMBER.NAME=...
    #[arg(long = "network", value_name = "[MEMBER.]NAME=HOW", requires = "boot")]
    pub(crate) networks: Vec<String>,
    /// Boot this description in place of the one that the host sent; with several VMs say whose it is
    #[arg(long = "machine", value_name = "[MEMBER=]FILE", requires = "boot")]
    pub(crate) machines: Vec<String>,
    /// For scripts: approve the machine descriptions that the hosts sent, as `machine approve` does
    #[arg(long, requires = "boot")]
    pub(crate) accept_machine: bool,
    /// Show the consoles until the VMs end, also if standard input is no terminal
    #[arg(long, requires = "boot", conflicts_with = "detach")]
    pub(crate) console: bool,
    /// Do not show the console
    #[arg(long, requires = "boot")]
    pub(crate) detach: bool,
    /// QEMU's accelerator: kvm or tcg [default: kvm where QEMU starts with it]
    #[arg(long, value_name = "NAME", requires = "boot")]
    pub(crate) accelerator: Option<String>,
    /// Another memory size
    #[arg(long, value_name = "MIB", requires = "boot")]
    pub(crate) memory_mib: Option<u64>,
    /// Another QEMU
    #[arg(long, value_name = "FILE", requires = "boot")]
    pub(crate) qemu: Option<PathBuf>,
    /// Change nothing: say what would be recovered, and with --boot start QEMU without the disks and end it again
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// More arguments for QEMU, after `--`; {member} in them is the name of the member that is booted
    #[arg(last = true, requires = "boot")]
    pub(crate) qemu_arguments: Vec<String>,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Seed {
    /// The group to make
    pub(crate) group: String,
    /// A disk, and where it is
    #[arg(required = true, value_name = "MEMBER.DISK=FILE")]
    pub(crate) disks: Vec<SeedDisk>,
    /// Copy the files, sharing their blocks where the file system can [default]
    #[arg(long = "copy", conflicts_with = "moves")]
    pub(crate) _copies: bool,
    /// Move the files: they become the server's, and are changed by what arrives
    #[arg(long = "move")]
    pub(crate) moves: bool,
    /// Do not keep the disks as they are now, as pin `seeded`, once a host has sent what differs
    #[arg(long = "no-pin")]
    pub(crate) no_pin: bool,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Member {
    /// Give a member to a host, or give it to its host again after that was installed anew
    ///
    /// A member belongs to the host that attaches it first. Another host is refused, and so is the same one if it has
    /// no record of the member, until this command says otherwise. The host that has the member now must not be
    /// connected, and its lease must have ended: this command waits for that. All disks of the member are compared when
    /// the new host attaches it.
    Move(MoveMember),
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct MoveMember {
    /// The group
    pub(crate) group: String,
    /// The member
    pub(crate) member: String,
    /// The name of the host, as its certificate has it
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Remove {
    /// The group
    pub(crate) group: String,
    /// The member; left out: the whole group
    pub(crate) member: Option<String>,
    /// Remove the whole group: its journal, its images, its past. Without this only what would go is shown
    #[arg(long, conflicts_with = "member")]
    pub(crate) everything: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Format {
    Raw,
    Qcow2,
}

impl Format {
    /// As QEMU calls it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Export {
    /// The group
    pub(crate) group: String,
    /// The disk, as member.disk
    pub(crate) disk: String,
    /// The image to make; it must not exist
    pub(crate) out: PathBuf,
    /// The image's format
    #[arg(long, value_enum, default_value = "raw")]
    pub(crate) format: Format,
    /// The point in time [default: latest]
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    pub(crate) at: Option<When>,
    /// Only what is different from this earlier export, over which the image is made; it may be of a later point, too
    #[arg(long, value_name = "IMAGE", conflicts_with = "chain")]
    pub(crate) base: Option<PathBuf>,
    /// The point of the base, if it is not said beside it
    #[arg(long, value_name = "AT", requires = "base", allow_hyphen_values = true)]
    pub(crate) base_at: Option<When>,
    /// Given several times: images of these points, each over the one before; OUT gets a number before its suffix
    #[arg(long, value_name = "AT", conflicts_with = "at", allow_hyphen_values = true)]
    pub(crate) chain: Vec<When>,
    /// For programs: one JSON object on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_in_time_may_begin_with_a_hyphen_after_a_blank() {
        for words in [
            "recover shop --at -10min",
            "view shop --at -10min",
            "snapshot shop x --at -10min",
            "bookmark shop x --at -10min",
            "timeline shop --from -10min --to -5min",
            "diff shop -10min -5min",
            "export shop db.root out --at -10min",
        ] {
            let words = ["tidelock-backup"].into_iter().chain(words.split(' '));
            Args::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
