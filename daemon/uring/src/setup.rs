//! Setting up the kernel's side of a ring: the best mode that the kernel has, or a clear error.

use std::fmt;
use std::io;

use io_uring::{IoUring, Probe, opcode};

use crate::error::{RingError, RingErrorKind};

/// How completions reach the owner thread. Later kernels have better modes; all behave alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingMode {
    /// `SINGLE_ISSUER`, `DEFER_TASKRUN`, `COOP_TASKRUN` (Linux 6.1): completions are worked off only
    /// when the owner waits, in batches, without interrupting it.
    Deferred,
    /// `COOP_TASKRUN` (Linux 5.19): completions are worked off at the owner's next system call.
    Cooperative,
    /// Neither (before Linux 5.19): completions interrupt the owner.
    Interrupting,
}

impl RingMode {
    const BEST_FIRST: [RingMode; 3] =
        [RingMode::Deferred, RingMode::Cooperative, RingMode::Interrupting];
}

impl fmt::Display for RingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RingMode::Deferred => "io_uring with deferred task work (Linux 6.1 or later)",
            RingMode::Cooperative => "io_uring with cooperative task work (Linux 5.19 or later)",
            RingMode::Interrupting => "io_uring in its basic mode (slower; Linux 6.1 is better)",
        })
    }
}

/// The operations that the owner loop stands on; all are there since Linux 5.6.
const NEEDED: [(u8, &str); 11] = [
    (opcode::Read::CODE, "read"),
    (opcode::Write::CODE, "write"),
    (opcode::Fsync::CODE, "fsync"),
    (opcode::Fallocate::CODE, "fallocate"),
    (opcode::Recv::CODE, "recv"),
    (opcode::Send::CODE, "send"),
    (opcode::SendMsg::CODE, "sendmsg"),
    (opcode::Accept::CODE, "accept"),
    (opcode::PollAdd::CODE, "poll"),
    (opcode::Timeout::CODE, "timeout"),
    (opcode::AsyncCancel::CODE, "cancel"),
];

/// Makes a ring in the best mode, at or below `best`, that the kernel has.
pub(crate) fn set_up(entries: u32, best: RingMode) -> Result<(IoUring, RingMode), RingError> {
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for mode in RingMode::BEST_FIRST.into_iter().skip_while(|mode| *mode != best) {
        match build(entries, mode) {
            Ok(ring) => {
                check(&ring)?;
                return Ok((ring, mode));
            }
            // EINVAL: this kernel does not know one of the flags.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(explain(entries, error)),
        }
    }
    Err(explain(entries, refused))
}

fn build(entries: u32, mode: RingMode) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    // After a fork, the child must not share the queues.
    builder.dontfork();
    builder.setup_clamp();
    // More operations can be in flight than the submission queue holds. Beyond the completion
    // queue's size the kernel keeps completions in its memory, which works but is slower.
    builder.setup_cqsize(entries.saturating_mul(4));
    match mode {
        RingMode::Deferred => {
            builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun();
            builder.setup_submit_all();
        }
        RingMode::Cooperative => {
            builder.setup_coop_taskrun().setup_submit_all();
        }
        RingMode::Interrupting => {}
    }
    builder.build(entries)
}

/// Refuses a kernel that lacks what the loop's correctness needs.
fn check(ring: &IoUring) -> Result<(), RingError> {
    let params = ring.params();
    let lacks = |what: &str| RingError {
        kind: RingErrorKind::KernelTooOld,
        context: format!("this kernel's io_uring lacks {what}; use Linux 5.15 or later"),
        source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
    };
    if !params.is_feature_nodrop() {
        return Err(lacks("the promise to drop no completion"));
    }
    if !params.is_feature_fast_poll() {
        return Err(lacks("waiting for sockets without threads"));
    }
    if !params.is_feature_ext_arg() {
        return Err(lacks("waiting with a time limit"));
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|source| RingError {
        kind: RingErrorKind::Os,
        context: "the kernel does not say which operations it has".to_owned(),
        source,
    })?;
    match NEEDED.iter().find(|(code, _)| !probe.is_supported(*code)) {
        Some((_, name)) => Err(lacks(&format!("the operation \"{name}\""))),
        None => Ok(()),
    }
}

fn explain(entries: u32, source: io::Error) -> RingError {
    let (kind, context) = match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => (RingErrorKind::Disabled, why_forbidden()),
        Some(libc::ENOSYS) => (
            RingErrorKind::Disabled,
            "the kernel was built without io_uring, or a seccomp filter hides it (in a container, \
             allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile)"
                .to_owned(),
        ),
        Some(libc::ENOMEM) => (
            RingErrorKind::Limit,
            format!(
                "there is no memory for a ring of {entries} entries; raise the limit for locked \
                 memory (LimitMEMLOCK= in the systemd unit, or ulimit -l)"
            ),
        ),
        Some(libc::EMFILE | libc::ENFILE) => (
            RingErrorKind::Limit,
            "too many open files; raise LimitNOFILE= in the systemd unit (or ulimit -n)".to_owned(),
        ),
        Some(libc::EINVAL) => (
            RingErrorKind::KernelTooOld,
            format!(
                "the kernel refuses a ring of {entries} entries in every mode; use Linux 5.15 or later"
            ),
        ),
        _ => (RingErrorKind::Os, "the kernel refused".to_owned()),
    };
    RingError { kind, context, source }
}

/// EPERM has two causes; the sysctl can be read, so tell them apart.
fn why_forbidden() -> String {
    const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";
    let value = std::fs::read_to_string(SYSCTL).unwrap_or_default();
    match value.trim() {
        "2" => "it is switched off for everyone; run: sysctl kernel.io_uring_disabled=0".to_owned(),
        "1" => "it is switched off for unprivileged processes; put the daemon's group into the \
                sysctl kernel.io_uring_group, or run: sysctl kernel.io_uring_disabled=0"
            .to_owned(),
        _ => "a seccomp filter or security module forbids it; allow io_uring_setup, \
              io_uring_enter and io_uring_register (systemd: SystemCallFilter=@aio, \
              Docker: a seccomp profile with these three)"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_below_the_best_can_be_chosen() {
        for best in RingMode::BEST_FIRST {
            let (_ring, mode) = set_up(8, best).expect("this kernel has io_uring");
            let rank = |m| RingMode::BEST_FIRST.iter().position(|x| *x == m);
            assert!(rank(mode) >= rank(best), "{mode} is better than {best}");
        }
    }

    #[test]
    fn errors_say_what_to_do() {
        let cases = [
            (libc::EPERM, RingErrorKind::Disabled),
            (libc::ENOSYS, RingErrorKind::Disabled),
            (libc::ENOMEM, RingErrorKind::Limit),
            (libc::EMFILE, RingErrorKind::Limit),
            (libc::EINVAL, RingErrorKind::KernelTooOld),
            (libc::EIO, RingErrorKind::Os),
        ];
        for (errno, kind) in cases {
            let error = explain(8, io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind, kind);
            assert!(error.to_string().starts_with("cannot set up io_uring: "));
        }
    }
}
