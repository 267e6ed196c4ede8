//! Consoles of recovered machines. A machine is the server's: whatever becomes of this terminal, the machine goes on.

use crate::server::machines::MachineStatus;
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Ctrl-]: leaves the console, as in telnet and `virsh console`.
const LEAVES: u8 = 0x1d;

/// A console that is connected.
pub(super) struct Console {
    member: String,
    stream: UnixStream,
}

/// Connects to the consoles of these machines.
pub(super) async fn connect(machines: &[MachineStatus]) -> Result<Vec<Console>> {
    let mut consoles = Vec::new();
    for MachineStatus { member, machine, .. } in machines {
        let path = machine.console.as_ref();
        let path = path.with_context(|| format!("{member} has no console here"))?;
        let stream = UnixStream::connect(path)
            .await
            .with_context(|| format!("cannot connect to the console {}", path.display()))?;
        consoles.push(Console { member: member.clone(), stream });
    }
    Ok(consoles)
}

/// One console alone has the terminal. Of several, each line is told with the member's name in front. Returns when the
/// machines have ended, or the operator leaves.
pub(super) async fn follow(mut consoles: Vec<Console>) -> Result<()> {
    if consoles.len() == 1 && io::stdin().is_terminal() {
        let console = consoles.remove(0);
        return attend(console).await;
    }
    let mut running = JoinSet::new();
    let several = consoles.len() > 1;
    for console in consoles {
        running.spawn(pass_on(console, several));
    }
    let all = async { while running.join_next().await.is_some() {} };
    tokio::select! {
        () = all => Ok(()),
        signal = super::asked_to_leave() => {
            eprintln!("{}: the machines go on", signal?);
            Ok(())
        }
    }
}

async fn pass_on(console: Console, several: bool) {
    let mut lines = BufReader::new(console.stream).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let text = String::from_utf8_lossy(&line);
        let told = match several {
            true => writeln!(io::stdout(), "{}: {}", console.member, text.trim_end()),
            false => writeln!(io::stdout(), "{}", text.trim_end()),
        };
        if told.and_then(|()| io::stdout().flush()).is_err() {
            return;
        }
    }
}

/// The terminal as it was, again, whatever happens.
struct Raw {
    before: Termios,
}

impl Raw {
    fn set() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

async fn attend(console: Console) -> Result<()> {
    let Console { member, stream } = console;
    eprintln!("the console of {member}; Ctrl-] leaves it, and {member} goes on");
    let raw = Raw::set().context("cannot use the terminal")?;
    let (mut from, mut to) = stream.into_split();
    let (keys, mut typed) = mpsc::channel(16);
    std::thread::spawn(move || read_keys(&keys));
    let output = async {
        let mut buf = vec![0; 4096];
        loop {
            match from.read(&mut buf).await {
                Ok(0) | Err(_) => return format!("{member} has ended"),
                Ok(len) if write_out(&buf[..len]).is_err() => {
                    return format!("the terminal is gone; {member} goes on");
                }
                Ok(_) => {}
            }
        }
    };
    let input = async {
        while let Some(keys) = typed.recv().await {
            let keys: Vec<u8> = keys;
            let end = keys.iter().position(|key| *key == LEAVES);
            if to.write_all(&keys[..end.unwrap_or(keys.len())]).await.is_err() || end.is_some() {
                break;
            }
        }
        format!("left the console; {member} goes on")
    };
    let ended = tokio::select! {
        ended = output => ended,
        left = input => left,
        signal = super::asked_to_leave() => format!("{}: {member} goes on", signal?),
    };
    drop(raw);
    eprintln!("\n{ended}");
    Ok(())
}

/// Standard input in pieces. It may be shared with others, who may have made it non-blocking.
fn read_keys(keys: &mpsc::Sender<Vec<u8>>) {
    let Ok(input) = io::stdin().as_fd().try_clone_to_owned() else { return };
    let mut input = File::from(input);
    let mut buf = [0; 256];
    loop {
        match input.read(&mut buf) {
            Ok(0) => return,
            Ok(len) => {
                if keys.blocking_send(buf[..len].to_vec()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !is_ready(&input, PollFlags::IN) {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// Writes all, also to a terminal that somebody has made non-blocking.
fn write_out(mut bytes: &[u8]) -> io::Result<()> {
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !is_ready(&output, PollFlags::OUT) {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the terminal can be used, or is gone.
fn is_ready(file: &File, wanted: PollFlags) -> bool {
    let mut fds = [PollFd::new(file, wanted)];
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    match poll(&mut fds, Some(&second)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => true,
        Ok(_) => fds[0].revents().intersects(wanted),
        Err(_) => false,
    }
}
