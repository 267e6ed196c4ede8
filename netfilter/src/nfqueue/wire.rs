//! nfnetlink_queue's messages as bytes (`linux/netfilter/nfnetlink_queue.h`). The resource of their
//! generic header is the queue.

use super::{QueueNumber, QueuedPacket};
use crate::netlink::{self, FLAG_ACK, GENERIC_BYTES, TYPE_ERROR, array, attributes, split};
use crate::release_queue::PacketId;
use crate::verdicts::Verdict;

const SUBSYSTEM_QUEUE: u16 = 3 << 8;
const TYPE_PACKET: u16 = SUBSYSTEM_QUEUE;
const TYPE_VERDICT: u16 = SUBSYSTEM_QUEUE | 1;
const TYPE_CONFIG: u16 = SUBSYSTEM_QUEUE | 2;
const TYPE_VERDICT_BATCH: u16 = SUBSYSTEM_QUEUE | 3;

const PACKET_HEADER: u16 = 1;
const VERDICT_HEADER: u16 = 2;
const PAYLOAD: u16 = 10;
const CAPTURE_LEN: u16 = 13;

const CONFIG_COMMAND: u16 = 1;
const CONFIG_PARAMS: u16 = 2;
const CONFIG_QUEUE_LEN_MAX: u16 = 3;
const CONFIG_MASK: u16 = 4;
const CONFIG_FLAGS: u16 = 5;

const COMMAND_BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const CONFIG_FLAG_FAIL_OPEN: u32 = 1;
const CONFIG_FLAG_GSO: u32 = 4;

const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;

/// What comes from the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming<'a> {
    Packet(QueuedPacket<'a>),
    /// The answer to a request, or the refusal of a verdict.
    Answer {
        errno: i32,
    },
}

fn message(
    out: &mut Vec<u8>,
    kind: u16,
    flags: u16,
    queue: QueueNumber,
    attributes: &[(u16, &[u8])],
) {
    // The family counts for nothing but requests to bind, and there since Linux 3.8 neither.
    netlink::message(out, kind, flags, 0, queue.0, attributes);
}

pub(super) fn bind(out: &mut Vec<u8>, queue: QueueNumber) {
    message(out, TYPE_CONFIG, FLAG_ACK, queue, &[(CONFIG_COMMAND, &[COMMAND_BIND, 0, 0, 0])]);
}

/// GSO packets whole, and never open by itself.
pub(super) fn flags(out: &mut Vec<u8>, queue: QueueNumber) {
    let mask = (CONFIG_FLAG_FAIL_OPEN | CONFIG_FLAG_GSO).to_be_bytes();
    let flags = CONFIG_FLAG_GSO.to_be_bytes();
    message(out, TYPE_CONFIG, FLAG_ACK, queue, &[(CONFIG_MASK, &mask), (CONFIG_FLAGS, &flags)]);
}

pub(super) fn len_max(out: &mut Vec<u8>, queue: QueueNumber, len: u32) {
    message(out, TYPE_CONFIG, FLAG_ACK, queue, &[(CONFIG_QUEUE_LEN_MAX, &len.to_be_bytes())]);
}

pub(super) fn copy(out: &mut Vec<u8>, queue: QueueNumber, range_bytes: u32) {
    let mut params = [0; 5];
    params[..4].copy_from_slice(&range_bytes.to_be_bytes());
    params[4] = COPY_PACKET;
    message(out, TYPE_CONFIG, FLAG_ACK, queue, &[(CONFIG_PARAMS, &params)]);
}

pub(super) fn verdict(out: &mut Vec<u8>, queue: QueueNumber, verdict: Verdict) {
    let (kind, decision, id) = match verdict {
        Verdict::Accept(id) => (TYPE_VERDICT, NF_ACCEPT, id),
        Verdict::AcceptUpTo(id) => (TYPE_VERDICT_BATCH, NF_ACCEPT, id),
        Verdict::Drop(id) => (TYPE_VERDICT, NF_DROP, id),
    };
    let mut header = [0; 8];
    header[..4].copy_from_slice(&decision.to_be_bytes());
    header[4..].copy_from_slice(&id.0.to_be_bytes());
    message(out, kind, 0, queue, &[(VERDICT_HEADER, &header)]);
}

/// Reads one datagram, which holds one message. `None`: not understood.
pub(super) fn parse(datagram: &[u8]) -> Option<Incoming<'_>> {
    let (kind, body) = split(datagram)?;
    match kind {
        TYPE_ERROR => Some(Incoming::Answer { errno: netlink::errno(body)? }),
        TYPE_PACKET => packet(body.get(GENERIC_BYTES..)?).map(Incoming::Packet),
        _ => None,
    }
}

fn packet(bytes: &[u8]) -> Option<QueuedPacket<'_>> {
    let mut header = None;
    let mut head: &[u8] = &[];
    let mut len_bytes = None;
    for attribute in attributes(bytes) {
        let (kind, value) = attribute?;
        match kind {
            PACKET_HEADER => {
                let id = PacketId(u32::from_be_bytes(array(value, 0)?));
                header = Some((id, u16::from_be_bytes(array(value, 4)?)));
            }
            PAYLOAD => head = value,
            CAPTURE_LEN => len_bytes = Some(u32::from_be_bytes(array(value, 0)?)),
            _ => {}
        }
    }
    let (id, ethertype) = header?;
    // The kernel names the whole length only when it has copied less.
    let len_bytes = len_bytes.or_else(|| u32::try_from(head.len()).ok())?;
    Some(QueuedPacket { id, ethertype, head, len_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::HEADER_BYTES;
    use proptest::prelude::*;

    const QUEUE: QueueNumber = QueueNumber(0x1234);

    fn packet_message(attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        message(&mut out, TYPE_PACKET, 0, QUEUE, attributes);
        out
    }

    #[test]
    fn a_verdict_has_the_kernels_bytes() {
        let mut out = Vec::new();
        verdict(&mut out, QUEUE, Verdict::AcceptUpTo(PacketId(7)));
        let mut expected = Vec::new();
        expected.extend(32u32.to_ne_bytes());
        expected.extend(0x0303u16.to_ne_bytes());
        expected.extend(1u16.to_ne_bytes());
        expected.extend([0; 8]);
        expected.extend([0, 0, 0x12, 0x34]);
        expected.extend(12u16.to_ne_bytes());
        expected.extend(2u16.to_ne_bytes());
        expected.extend([0, 0, 0, 1, 0, 0, 0, 7]);
        assert_eq!(out, expected);
    }

    #[test]
    fn a_packet_is_read() {
        let header = [0, 0, 1, 2, 0x08, 0x00, 2];
        let bytes = packet_message(&[
            (PACKET_HEADER, &header),
            (5, &[0, 0, 0, 3]),
            (PAYLOAD, &[0x45, 1, 2]),
            (CAPTURE_LEN, &1500u32.to_be_bytes()),
        ]);
        let expected = QueuedPacket {
            id: PacketId(0x102),
            ethertype: 0x0800,
            head: &[0x45, 1, 2],
            len_bytes: 1500,
        };
        assert_eq!(parse(&bytes), Some(Incoming::Packet(expected)));
        let short = packet_message(&[(PACKET_HEADER, &header), (PAYLOAD, &[0x45, 1, 2])]);
        let Some(Incoming::Packet(packet)) = parse(&short) else { panic!("not a packet") };
        assert_eq!(packet.len_bytes, 3);
        assert_eq!(parse(&packet_message(&[(PAYLOAD, &[1])])), None, "a packet without an id");
    }

    #[test]
    fn an_answer_is_read() {
        let mut bytes = packet_message(&[]);
        bytes.truncate(HEADER_BYTES);
        bytes.extend((-libc::EBUSY).to_ne_bytes());
        bytes[..4].copy_from_slice(&20u32.to_ne_bytes());
        bytes[4..6].copy_from_slice(&TYPE_ERROR.to_ne_bytes());
        assert_eq!(parse(&bytes), Some(Incoming::Answer { errno: libc::EBUSY }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(mut bytes in prop::collection::vec(any::<u8>(), 0..120), kind in 0u16..4) {
            if bytes.len() >= HEADER_BYTES {
                let len = u32::try_from(bytes.len()).unwrap();
                bytes[..4].copy_from_slice(&len.to_ne_bytes());
                let kind = if kind == 0 { TYPE_ERROR } else { TYPE_PACKET };
                bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            }
            let _ = parse(&bytes);
        }
    }
}
