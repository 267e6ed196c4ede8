//! A rule of nftables that queues by iptables' target NFQUEUE. A kernel may have that target and the
//! layer by which nftables calls it (CONFIG_NFT_COMPAT: iptables-nft lives on it), but no `queue`
//! (CONFIG_NFT_QUEUE). The `nft` tool shows such rules and cannot write them.
//!
//! A transaction (`linux/netfilter/nf_tables.h`, `nf_tables_compat.h`, `xt_NFQUEUE.h`):
//!
//! ```text
//! NFNL_MSG_BATCH_BEGIN   family 0 | resource NFNL_SUBSYS_NFTABLES
//! NFT_MSG_NEWRULE        family NFPROTO_INET | resource 0
//!   NFTA_RULE_TABLE, NFTA_RULE_CHAIN     names, with a 0 at the end as all text here
//!   NFTA_RULE_EXPRESSIONS
//!     NFTA_LIST_ELEM
//!       NFTA_EXPR_NAME "counter"
//!     NFTA_LIST_ELEM
//!       NFTA_EXPR_NAME "target"
//!       NFTA_EXPR_DATA
//!         NFTA_TARGET_NAME "NFQUEUE"
//!         NFTA_TARGET_REV  u32 0         its struct has no flags, hence no bypass
//!         NFTA_TARGET_INFO xt_NFQ_info   queue u16 in the machine's order, filled up to 8 (XT_ALIGN)
//! NFNL_MSG_BATCH_END     family 0 | resource NFNL_SUBSYS_NFTABLES
//! ```

use crate::netlink::{
    FLAG_ACK, NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWRULE, NFTA_RULE_CHAIN, NFTA_RULE_TABLE, TYPE_ERROR,
    attribute, errno, message, split,
};
use crate::nfqueue::QueueNumber;
use crate::sys::{NetlinkSocket, Slots};
use std::io;

const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NFPROTO_INET: u8 = 1;
/// Without NLM_F_APPEND the rule comes before all others of its chain.
const NLM_F_CREATE: u16 = 0x400;

const NLA_F_NESTED: u16 = 0x8000;
const NFTA_RULE_EXPRESSIONS: u16 = 4 | NLA_F_NESTED;
const NFTA_LIST_ELEM: u16 = 1 | NLA_F_NESTED;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2 | NLA_F_NESTED;
const NFTA_TARGET_NAME: u16 = 1;
const NFTA_TARGET_REV: u16 = 2;
const NFTA_TARGET_INFO: u16 = 3;
const XT_NFQ_INFO_BYTES: usize = 8;

/// Puts a rule that queues whatever comes before all others of a chain.
pub(super) fn queue_first(table: &str, chain: &str, queue: QueueNumber) -> io::Result<()> {
    let socket = NetlinkSocket::open(libc::NETLINK_NETFILTER)?;
    socket.send(&transaction(table, chain, queue))?;
    // The kernel has acted and answered by now.
    let mut slots = Slots::of(Slots::PACKET_BYTES);
    let mut is_done = false;
    loop {
        match socket.receive(&mut slots) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
        for answer in slots.datagrams().filter_map(answer) {
            match answer {
                0 => is_done = true,
                refused => return Err(io::Error::from_raw_os_error(refused)),
            }
        }
    }
    if is_done { Ok(()) } else { Err(io::Error::other("the kernel did not answer")) }
}

fn answer(datagram: &[u8]) -> Option<i32> {
    let (kind, body) = split(datagram)?;
    if kind == TYPE_ERROR { errno(body) } else { None }
}

fn transaction(table: &str, chain: &str, queue: QueueNumber) -> Vec<u8> {
    let mut rule = Vec::new();
    attribute(&mut rule, NFTA_LIST_ELEM, &list(&[(NFTA_EXPR_NAME, b"counter\0")]));
    attribute(&mut rule, NFTA_LIST_ELEM, &target(queue));
    let rule = [
        (NFTA_RULE_TABLE, &*text(table)),
        (NFTA_RULE_CHAIN, &*text(chain)),
        (NFTA_RULE_EXPRESSIONS, &*rule),
    ];
    let mut out = Vec::new();
    message(&mut out, NFNL_MSG_BATCH_BEGIN, 0, 0, NFNL_SUBSYS_NFTABLES, &[]);
    message(&mut out, NFT_MSG_NEWRULE, NLM_F_CREATE | FLAG_ACK, NFPROTO_INET, 0, &rule);
    message(&mut out, NFNL_MSG_BATCH_END, 0, 0, NFNL_SUBSYS_NFTABLES, &[]);
    out
}

fn target(queue: QueueNumber) -> Vec<u8> {
    let mut info = [0; XT_NFQ_INFO_BYTES];
    info[..2].copy_from_slice(&queue.0.to_ne_bytes());
    let nfqueue = list(&[
        (NFTA_TARGET_NAME, b"NFQUEUE\0"),
        (NFTA_TARGET_REV, &0u32.to_be_bytes()),
        (NFTA_TARGET_INFO, &info),
    ]);
    list(&[(NFTA_EXPR_NAME, b"target\0"), (NFTA_EXPR_DATA, &nfqueue)])
}

fn list(attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    attributes.iter().for_each(|(kind, value)| attribute(&mut out, *kind, value));
    out
}

fn text(text: &str) -> Vec<u8> {
    [text.as_bytes(), b"\0"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_has_the_kernels_bytes() {
        let pair = |a: u16, b: u16| [a.to_ne_bytes(), b.to_ne_bytes()].concat();
        let header =
            |len: u32, kind, flags| [&len.to_ne_bytes()[..], &pair(kind, flags), &[0; 8]].concat();
        let expected: [&[u8]; 25] = [
            &header(20, 0x10, 1),
            &[0, 0, 0, 10],
            &header(112, 0x0a06, 0x405),
            &[1, 0, 0, 0],
            &pair(6, 1),
            b"t\0\0\0",
            &pair(9, 2),
            b"held\0\0\0\0",
            &pair(72, 0x8004),
            &pair(16, 0x8001),
            &pair(12, 1),
            b"counter\0",
            &pair(52, 0x8001),
            &pair(11, 1),
            b"target\0\0",
            &pair(36, 0x8002),
            &pair(12, 1),
            b"NFQUEUE\0",
            &pair(8, 2),
            &[0; 4],
            &pair(12, 3),
            &0x1234u16.to_ne_bytes(),
            &[0; 6],
            &header(20, 0x11, 1),
            &[0, 0, 0, 10],
        ];
        assert_eq!(transaction("t", "held", QueueNumber(0x1234)), expected.concat());
    }

    #[test]
    fn what_is_refused_is_told_from_what_is_done() {
        let of = |kind, errno: i32| {
            let mut out = Vec::new();
            message(&mut out, kind, 0, 0, 0, &[]);
            out[16..].copy_from_slice(&errno.to_ne_bytes());
            out
        };
        assert_eq!(answer(&of(TYPE_ERROR, 0)), Some(0));
        assert_eq!(answer(&of(TYPE_ERROR, -libc::EPERM)), Some(libc::EPERM));
        assert_eq!(answer(&of(NFT_MSG_NEWRULE, 0)), None);
        assert_eq!(answer(&[]), None);
    }
}
