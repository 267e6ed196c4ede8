//! Messages to and from the kernel's netfilter subsystems as bytes (`linux/netlink.h`,
//! `linux/netfilter/nfnetlink.h`).
//!
//! ```text
//! nlmsghdr   len u32 | type u16 | flags u16 | seq u32 | port u32      in the machine's order
//! nfgenmsg   family u8 | version u8 | resource be16
//! nlattr     len u16 | type u16 | value, filled up to 4 bytes         numbers in values are big endian
//! ```

pub(crate) const HEADER_BYTES: usize = 16;
pub(crate) const GENERIC_BYTES: usize = 4;
pub(crate) const ATTRIBUTE_HEADER_BYTES: usize = 4;

/// `NLMSG_ERROR`, which also says that all went well.
pub(crate) const TYPE_ERROR: u16 = 2;
/// `NLM_F_REQUEST`; every message of ours has it.
pub(crate) const FLAG_REQUEST: u16 = 1;
/// `NLM_F_ACK`.
pub(crate) const FLAG_ACK: u16 = 4;

/// nftables' subsystem, and its messages and attributes that are both sent and heard
/// (`linux/netfilter/nf_tables.h`).
pub(crate) const NFNL_SUBSYS_NFTABLES: u16 = 10;
pub(crate) const NFT_MSG_NEWRULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 6;
pub(crate) const NFTA_RULE_TABLE: u16 = 1;
pub(crate) const NFTA_RULE_CHAIN: u16 = 2;

/// Appends a message to `out`. What the generic header's two fields mean depends on its type.
pub(crate) fn message(
    out: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    family: u8,
    resource: u16,
    attributes: &[(u16, &[u8])],
) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&(FLAG_REQUEST | flags).to_ne_bytes());
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(&[family, 0]);
    out.extend_from_slice(&resource.to_be_bytes());
    for (kind, value) in attributes {
        attribute(out, *kind, value);
    }
    let len = u32::try_from(out.len() - start).expect("short messages");
    out[start..start + 4].copy_from_slice(&len.to_ne_bytes());
}

/// Appends an attribute to `out`.
pub(crate) fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).expect("short attributes");
    out.extend_from_slice(&len.to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The type of the message in a datagram, and what follows its header. `None`: there is not all of it.
pub(crate) fn split(datagram: &[u8]) -> Option<(u16, &[u8])> {
    let len = u32::from_ne_bytes(array(datagram, 0)?) as usize;
    let body = datagram.get(HEADER_BYTES..len)?;
    Some((u16::from_ne_bytes(array(datagram, 4)?), body))
}

/// The messages of a datagram of several, as [`split`] returns each. One that is not all there ends them.
pub(crate) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (kind, body) = split(datagram)?;
        let len = HEADER_BYTES + body.len();
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, body))
    })
}

/// The attributes behind a generic header. `None`: the rest is not understood.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = Option<(u16, &[u8])>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let rest = std::mem::take(&mut bytes);
        let read = || {
            let len = usize::from(u16::from_ne_bytes(array(rest, 0)?));
            let kind = u16::from_ne_bytes(array(rest, 2)?);
            let value = rest.get(ATTRIBUTE_HEADER_BYTES..len)?;
            Some((len, kind, value))
        };
        let read = read();
        if let Some((len, ..)) = read {
            bytes = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
        Some(read.map(|(_, kind, value)| (kind, value)))
    })
}

/// The error number in the body of a [`TYPE_ERROR`]; 0 is success.
pub(crate) fn errno(body: &[u8]) -> Option<i32> {
    i32::from_ne_bytes(array(body, 0)?).checked_neg()
}

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}
