//! What an interface is a port of: packets of a bridge's port, of one that is routed and of one that is neither come by
//! different rules, and a guest whose interface is not what its topology says would send past ours.
//!
//! Asked of the kernel (`linux/rtnetlink.h`, `linux/if_link.h`) in the calling thread's network namespace:
//!
//! ```text
//! nlmsghdr    type RTM_GETLINK, answered by RTM_NEWLINK or an error
//! ifinfomsg   family u8 | 0 | type u16 | index i32 | flags u32 | change u32
//! attribute   3, IFLA_IFNAME: the name, with a 0 at the end
//!            10, IFLA_MASTER: the index of what it is a port of
//!            18, IFLA_LINKINFO: attributes 1, the interface's kind, and 4, the kind of what it is a port of
//! ```

use super::{RulesError, Topology};
use crate::netlink::{FLAG_REQUEST, TYPE_ERROR, array, attribute, attributes, errno, split};
use crate::sys::{NetlinkSocket, Slots};
use std::io;
use tidelock_tagging::interface_name;

const LINK_INFO_BYTES: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
/// Without the bits that say what an attribute holds.
const ATTRIBUTE_KIND: u16 = 0x3fff;
/// A link's message is some 2 KiB.
const ANSWER_BYTES_MAX: usize = 32 << 10;
/// Interfaces whose frames go straight to the device below.
const PAST_THE_FILTER: [&str; 4] = ["macvtap", "macvlan", "ipvtap", "ipvlan"];

/// What the kernel says of an interface.
#[derive(Debug, Default, PartialEq, Eq)]
struct Link {
    is_up: bool,
    kind: String,
    master: Option<u32>,
    master_kind: String,
}

/// Whether an interface is what its topology says. One that is not there is nothing yet, and neither is one that is
/// down on its way into a bridge.
pub(super) fn check(interface: &str, topology: Topology) -> Result<(), RulesError> {
    let link = look(interface)
        .map_err(|source| RulesError::UnknownPort { interface: interface.to_owned(), source })?;
    let wrong = link.and_then(|link| link.what_is_wrong(interface, topology));
    wrong.map_or(Ok(()), |(found, instead)| {
        Err(RulesError::WrongTopology { interface: interface.to_owned(), found, topology, instead })
    })
}

impl Link {
    /// What it is instead, and what to do.
    fn what_is_wrong(&self, interface: &str, topology: Topology) -> Option<(String, String)> {
        if PAST_THE_FILTER.contains(&self.kind.as_str()) {
            let instead = "give the guest a tap that is routed or a port of a Linux bridge";
            return Some((format!("a {}", self.kind), instead.to_owned()));
        }
        let of = self.master.map(|index| {
            let name = interface_name(index).unwrap_or_else(|| format!("interface {index}"));
            format!("a port of {name} ({})", self.master_kind)
        });
        match (topology, of) {
            (Topology::Routed, Some(of)) if self.master_kind == "bridge" => Some((
                of,
                format!("say topology = \"bridged\", or `ip link set {interface} nomaster`"),
            )),
            (Topology::Bridged, Some(_)) if self.master_kind == "bridge" => None,
            (_, Some(of)) => {
                Some((of, "only ports of a Linux bridge and routed interfaces can be gated".into()))
            }
            (Topology::Bridged, None) if self.is_up => Some((
                "no port of a bridge".to_owned(),
                format!("`ip link set {interface} master BRIDGE`, or say topology = \"routed\""),
            )),
            (_, None) => None,
        }
    }
}

/// `None`: there is no such interface.
fn look(interface: &str) -> io::Result<Option<Link>> {
    let socket = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
    socket.send(&request(interface))?;
    let mut slots = Slots::of(ANSWER_BYTES_MAX);
    // The kernel has answered when `send` returns.
    socket.receive(&mut slots)?;
    let answer = slots.datagrams().next().and_then(split);
    let (kind, body) = answer.ok_or(io::ErrorKind::InvalidData)?;
    if kind == TYPE_ERROR {
        return match errno(body) {
            Some(libc::ENODEV) => Ok(None),
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Err(io::ErrorKind::InvalidData.into()),
        };
    }
    let link = (kind == libc::RTM_NEWLINK).then(|| read(body)).flatten();
    link.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn request(interface: &str) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.extend_from_slice(&libc::RTM_GETLINK.to_ne_bytes());
    out.extend_from_slice(&FLAG_REQUEST.to_ne_bytes());
    out.extend_from_slice(&[0; 8 + LINK_INFO_BYTES]);
    attribute(&mut out, IFLA_IFNAME, &[interface.as_bytes(), &[0]].concat());
    let len = u32::try_from(out.len()).expect("names are short");
    out[..4].copy_from_slice(&len.to_ne_bytes());
    out
}

/// `None`: not understood.
fn read(body: &[u8]) -> Option<Link> {
    let is_up = u32::from_ne_bytes(array(body, 8)?) & libc::IFF_UP.cast_unsigned() != 0;
    let mut link = Link { is_up, ..Link::default() };
    for found in attributes(body.get(LINK_INFO_BYTES..)?) {
        match found? {
            (kind, value) if kind & ATTRIBUTE_KIND == IFLA_MASTER => {
                link.master = Some(u32::from_ne_bytes(array(value, 0)?));
            }
            (kind, value) if kind & ATTRIBUTE_KIND == IFLA_LINKINFO => {
                for found in attributes(value) {
                    let (kind, value) = found?;
                    let text = || String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
                    match kind & ATTRIBUTE_KIND {
                        IFLA_INFO_KIND => link.kind = text(),
                        IFLA_INFO_SLAVE_KIND => link.master_kind = text(),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port_of(master_kind: &str) -> Link {
        Link { is_up: true, kind: "tun".into(), master: Some(1), master_kind: master_kind.into() }
    }

    #[test]
    fn only_what_the_rules_see_is_right() {
        let alone = Link { is_up: true, kind: "tun".into(), ..Link::default() };
        let down = Link { is_up: false, ..Link::default() };
        let macvtap = Link { kind: "macvtap".into(), ..Link::default() };
        let found = |link: &Link, topology| link.what_is_wrong("tap0", topology).map(|w| w.0);
        for right in [&alone, &down] {
            assert_eq!(found(right, Topology::Routed), None);
        }
        for right in [&port_of("bridge"), &down] {
            assert_eq!(found(right, Topology::Bridged), None);
        }
        assert_eq!(found(&port_of("bridge"), Topology::Routed).unwrap(), "a port of lo (bridge)");
        assert_eq!(found(&alone, Topology::Bridged).unwrap(), "no port of a bridge");
        for topology in [Topology::Routed, Topology::Bridged] {
            let of_switch = port_of("openvswitch");
            assert_eq!(found(&of_switch, topology).unwrap(), "a port of lo (openvswitch)");
            assert_eq!(found(&macvtap, topology).unwrap(), "a macvtap");
        }
    }

    #[test]
    fn the_kernel_tells_of_an_interface_and_of_none() {
        let lo = look("lo").expect("an answer").expect("it is there");
        assert_eq!((lo.master, lo.master_kind.as_str()), (None, ""));
        assert_eq!(look("tl-no-such-one").expect("an answer"), None);
    }

    #[test]
    fn what_is_cut_short_is_not_understood() {
        let mut body = vec![0u8; LINK_INFO_BYTES];
        attribute(&mut body, IFLA_MASTER, &7u32.to_ne_bytes());
        assert_eq!(read(&body).expect("whole").master, Some(7));
        for len in (0..body.len()).filter(|len| *len != LINK_INFO_BYTES) {
            assert_eq!(read(&body[..len]), None, "{len}");
        }
    }
}
