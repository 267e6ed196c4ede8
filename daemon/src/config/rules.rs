//! What holds across the whole file: nothing is shared that must not be.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

use tidelock_config::{Place, Section};

use super::{Group, Member};

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
            if let Some(network) = &member.network {
                interfaces.take(network.interface.value.clone(), &network.interface.place);
                queues.take(network.queue.value, &network.queue.place);
            }
        }
        check_members_served(root, group);
    }
}

/// Between members, packets must carry what they depend on, and nothing tags them yet: a group of
/// several would look protected and not be.
fn check_members_served(root: &Section<'_>, group: &Group) {
    let [_, second, ..] = group.members.as_slice() else { return };
    let Member { name, .. } = second;
    let what = format!(
        "group {} has {} members: this version does not tag the packets between them yet \
         (it comes with multi-VM groups)",
        group.name.value,
        group.members.len()
    );
    root.fail(&name.place, what, format!("a [[group]] of its own for {}", name.value));
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
