//! Word from the kernel that somebody has changed the packet filter.
//!
//! nftables tells of every change, whoever made it; iptables-nft is one of its users.
//!
//! A transaction is a datagram or several, each of several messages (`linux/netfilter/nf_tables.h`), of which the last
//! is NFT_MSG_NEWGEN:
//!
//! ```text
//! nlmsghdr   type NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_..
//! nfgenmsg
//! attribute 1: the table's name, with a 0 at the end (of NEWGEN: a number)
//! of a rule:  attribute 2: the name of its chain
//! of a chain: attribute 3: its name
//! ```

use super::names::{CHAIN_PREFIX, TABLE_PREFIX};
use crate::netlink::{
    GENERIC_BYTES, NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWRULE, NFTA_RULE_CHAIN, NFTA_RULE_TABLE,
    attributes, messages,
};
use crate::sys::{Epoll, NetlinkSocket, Slots};
use std::io;
use std::time::{Duration, Instant};

const NFT_MSG_DELTABLE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 2;
const NFT_MSG_NEWCHAIN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 3;
const NFT_MSG_DELCHAIN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 5;
const NFT_MSG_DELRULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 8;
const NFT_MSG_NEWGEN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 15;
/// Of whatever the message is about.
const TABLE: u16 = NFTA_RULE_TABLE;
const NFTA_CHAIN_NAME: u16 = 3;
/// Iptables' own, in which our chains are led to.
const IPTABLES_TABLE: &str = "raw";
const IPTABLES_HOOKS: [&str; 1] = ["PREROUTING"];
/// The kernel puts messages together up to this (NLMSG_GOODSIZE).
const DATAGRAM_BYTES_MAX: usize = 8192;

/// What has changed; of several changes the last of these counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// What is none of ours, for all that is said of it.
    Others,
    /// What our rules stand in, or nobody can tell: they may be gone.
    Ours,
}

/// Hears of changes in one network namespace.
pub struct RuleChanges {
    socket: NetlinkSocket,
    slots: Slots,
    epoll: Epoll,
}

impl RuleChanges {
    /// Listens, from now on, in the network namespace of the calling thread.
    pub fn open() -> io::Result<RuleChanges> {
        let socket = NetlinkSocket::open(libc::NETLINK_NETFILTER)?;
        socket.join(libc::NFNLGRP_NFTABLES)?;
        let epoll = Epoll::new()?;
        epoll.add(socket.fd(), 0)?;
        Ok(RuleChanges { socket, slots: Slots::of(DATAGRAM_BYTES_MAX), epoll })
    }

    /// What has changed since the last call. Whether the rules are still as they were is not said: look at them.
    pub fn drain(&mut self) -> Option<Change> {
        let mut change = None;
        loop {
            match self.socket.receive(&mut self.slots) {
                Ok(()) => change = change.max(self.slots.datagrams().map(what).max()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return change,
                // There were more than the socket takes.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => change = Some(Change::Ours),
                // Whatever this is, a look does no harm.
                Err(_) => return Some(Change::Ours),
            }
        }
    }

    /// Waits for a change, but no longer than this. What has changed since the last call.
    pub fn wait(&mut self, at_most: Duration) -> Option<Change> {
        let (until, mut ready) = (Instant::now() + at_most, Vec::new());
        loop {
            let change = self.drain();
            if change.is_some() {
                return change;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Rounded up: what is left must not be waited for in no time.
            let timeout_ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            if self.epoll.wait(&mut ready, timeout_ms).is_err() {
                // It cannot be waited for: then for the time alone.
                std::thread::sleep(left);
                return Some(Change::Ours);
            }
        }
    }
}

/// What a datagram tells of. One that was too long is empty.
fn what(datagram: &[u8]) -> Change {
    let all = messages(datagram).map(|(kind, body)| {
        let others = kind >> 8 == NFNL_SUBSYS_NFTABLES && is_ours(kind, body) == Some(false);
        if others { Change::Others } else { Change::Ours }
    });
    all.max().unwrap_or(Change::Ours)
}

/// `None`: not understood.
fn is_ours(kind: u16, body: &[u8]) -> Option<bool> {
    if kind == NFT_MSG_NEWGEN {
        return Some(false);
    }
    let name = |wanted: u16| {
        let mut all = attributes(body.get(GENERIC_BYTES..)?);
        let value = all.find_map(|a| a.filter(|(kind, _)| *kind == wanted))?.1;
        std::str::from_utf8(value.strip_suffix(&[0])?).ok()
    };
    let table = name(TABLE)?;
    if table.starts_with(TABLE_PREFIX) {
        return Some(true);
    }
    if table != IPTABLES_TABLE {
        return Some(false);
    }
    // Others have rules there, too.
    let chain = match kind {
        NFT_MSG_NEWRULE | NFT_MSG_DELRULE => name(NFTA_RULE_CHAIN)?,
        NFT_MSG_NEWCHAIN | NFT_MSG_DELCHAIN => name(NFTA_CHAIN_NAME)?,
        _ => return Some(kind == NFT_MSG_DELTABLE),
    };
    Some(chain.starts_with(CHAIN_PREFIX) || IPTABLES_HOOKS.contains(&chain))
}
