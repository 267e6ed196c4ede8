//! What holds across the whole file: nothing is shared that must not be.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

use tidelock_config::{Place, Section};

use super::Group;

pub(super) fn check(root: &Section<'_>, groups: &[Group]) {
    let mut groups_by_name = Unique::new(root, "group");
    // Across groups: a member's packet-filter chains are named after it alone.
    let mut members = Unique::new(root, "member");
    let mut paths = Unique::new(root, "disk path");
    let mut sockets = Unique::new(root, "socket");
    let mut interfaces = Unique::new(root, "interface");
    let mut queues = Unique::new(root, "queue");
    for group in groups {
        groups_by_name.take(group.name.value.clone(), &group.name.place);
        for member in &group.members {
            members.take(member.name.value.clone(), &member.name.place);
            let mut disks = Unique::new(root, "disk of the member");
            for disk in &member.disks {
                // The socket's default comes from the name: one complaint is enough.
                if disks.take(disk.name.value.clone(), &disk.name.place) {
                    sockets.take(disk.socket.display().to_string(), &disk.socket.place);
                }
                paths.take(disk.path.display().to_string(), &disk.path.place);
            }
            for disk in &member.removed_disks {
                disks.take(disk.name.value.clone(), &disk.name.place);
            }
            for network in &member.networks {
                interfaces.take(network.interface.value.clone(), &network.interface.place);
                queues.take(network.queue.value, &network.queue.place);
            }
        }
        let mut roster = Unique::new(root, "member of the group");
        let (here, elsewhere): (Vec<_>, Vec<_>) =
            group.roster.iter().partition(|peer| peer.host.is_none() && !peer.removed);
        // Those that are here are looked at below: one complaint is enough.
        here.iter().for_each(|peer| roster.know(peer.name.value.clone(), &peer.name.place));
        for peer in elsewhere {
            roster.take(peer.name.value.clone(), &peer.name.place);
        }
    }
}

/// Things of one kind of which no two may be the same.
struct Unique<'s, 'd, T> {
    root: &'s Section<'d>,
    what: &'static str,
    seen: HashMap<T, Place>,
}

impl<'s, 'd, T: Eq + Hash + Display> Unique<'s, 'd, T> {
    fn new(root: &'s Section<'d>, what: &'static str) -> Self {
        Self { root, what, seen: HashMap::new() }
    }

    fn know(&mut self, value: T, place: &Place) {
        self.seen.entry(value).or_insert_with(|| place.clone());
    }

    /// Whether it was free.
    fn take(&mut self, value: T, place: &Place) -> bool {
        if let Some(first) = self.seen.get(&value) {
            let what =
                format!("the {} {value} is already taken in line {}", self.what, first.line());
            self.root.fail(place, what, "another one");
            return false;
        }
        self.seen.insert(value, place.clone());
        true
    }
}
