//! The hello of a connection, and the channels after it.
//!
//! Invariant: nothing but an attachment is heard on a channel before a member was attached there.

use std::collections::BTreeMap;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Attach, Bookmark, Message, PROTOCOL, RefusalKind};

/// Why a connection ends, or a member is not attached: for programs, and for people.
pub type Refusal = (RefusalKind, String);

fn refuse<T>(kind: RefusalKind, reason: impl Into<String>) -> Result<T, Refusal> {
    Err((kind, reason.into()))
}

/// A good hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The host's name. Whether its certificate allows that name is the caller's to check.
    pub host: String,
    /// Name and version of the host's software.
    pub software: String,
    /// The version that both speak.
    pub protocol: u16,
}

impl Greeting {
    /// From the first frame of a connection.
    pub fn of(first: Frame) -> Result<Self, Refusal> {
        let Frame::Control(Channel(0), Message::Hello { oldest, newest, host, software }) = first
        else {
            return refuse(RefusalKind::Invalid, "the first message must be a hello");
        };
        let (ours_oldest, ours_newest) = PROTOCOL;
        if newest < ours_oldest || oldest > ours_newest || oldest > newest {
            return refuse(
                RefusalKind::Version,
                format!(
                    "the host speaks the protocol from {oldest} to {newest}, this server from {ours_oldest} to \
                     {ours_newest}: upgrade the older side"
                ),
            );
        }
        Ok(Self { host, software, protocol: newest.min(ours_newest) })
    }
}

/// A frame after the hello, by what becomes of it.
#[derive(Debug)]
pub enum Heard<'a, G> {
    /// A member is to be attached on this channel.
    Attach(Channel, Box<Attach>),
    /// A beacon does not wait behind frames that the group cannot take.
    Beacon(&'a G, MonoNanos),
    /// A bookmark is to be set.
    Bookmark(&'a G, Box<Bookmark>),
    /// All else is the group's, in order.
    Frame(&'a G, Frame),
}

/// The channels of one connection, with the group that each belongs to.
#[derive(Debug)]
pub struct Channels<G>(BTreeMap<Channel, G>);

impl<G> Default for Channels<G> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<G> Channels<G> {
    /// Sorts a frame. An error ends the connection.
    pub fn hear(&self, frame: Frame) -> Result<Heard<'_, G>, Refusal> {
        let channel = frame.channel();
        match frame {
            Frame::Control(Channel(0), Message::Attach(_)) => {
                refuse(RefusalKind::Invalid, "channel 0 is the connection's own")
            }
            Frame::Control(_, Message::Attach(attach)) => Ok(Heard::Attach(channel, attach)),
            Frame::Control(_, Message::Beacon { sent_at }) => {
                Ok(Heard::Beacon(self.group(channel)?, sent_at))
            }
            Frame::Control(_, Message::Bookmark(wanted)) => {
                Ok(Heard::Bookmark(self.group(channel)?, wanted))
            }
            frame => Ok(Heard::Frame(self.group(channel)?, frame)),
        }
    }

    fn group(&self, channel: Channel) -> Result<&G, Refusal> {
        match self.0.get(&channel) {
            Some(group) => Ok(group),
            None => refuse(RefusalKind::Invalid, format!("channel {channel} is not attached")),
        }
    }

    /// The group of a channel, if it has one.
    #[must_use]
    pub fn get(&self, channel: Channel) -> Option<&G> {
        self.0.get(&channel)
    }

    /// A member of this group is being attached on the channel.
    pub fn give(&mut self, channel: Channel, group: G) {
        self.0.insert(channel, group);
    }

    /// The groups of all channels, one for each channel.
    pub fn groups(&self) -> impl Iterator<Item = &G> {
        self.0.values()
    }

    /// True if nothing was attached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
