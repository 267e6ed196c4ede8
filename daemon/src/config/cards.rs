//! The network cards of a member's machine, against those whose packets are held.
//!
//! A card that is not held answers clients with what a disaster undoes, whatever the others do. So each card of a
//! `machine` has a `[[group.member.network]]`, or is named in `ungated`.

use tidelock_config::Diagnostic;
use tidelock_protocol::machine::Machine;

use super::Member;

/// The names of a network card that `ungated` may give: its name and its MAC address.
struct Card(Vec<String>);

impl Card {
    fn is(&self, name: &str) -> bool {
        self.0.iter().any(|own| own.eq_ignore_ascii_case(name))
    }
}

/// Compares the cards in a machine description with the member's section.
pub(super) fn check(member: &Member, machine: &Machine) -> Option<Diagnostic> {
    let cards = cards(machine);
    let unknown = member.ungated.value.iter().find(|name| !cards.iter().any(|card| card.is(name)));
    if let Some(name) = unknown {
        let what = format!(
            "`ungated` of {}: its machine has no network card \"{name}\"",
            member.name.value
        );
        return Some(Diagnostic::new(
            &member.ungated.place,
            what,
            format!("one of {}", words(&cards.iter().collect::<Vec<_>>())),
        ));
    }
    let gated: Vec<_> = cards
        .iter()
        .filter(|card| !member.ungated.value.iter().any(|name| card.is(name)))
        .collect();
    if gated.len() <= member.networks.len() {
        return None;
    }
    let what = format!(
        "the machine of {} has {} network cards that are not in `ungated` ({}), and {} of them {} held: what the others \
         send could not be undone",
        member.name.value,
        gated.len(),
        words(&gated),
        member.networks.len(),
        if member.networks.len() == 1 { "is" } else { "are" },
    );
    let instead = "a [[group.member.network]] for each of them, or `ungated = [\"MAC\"]` in [[group.member]] with those \
                   that no client and no other member can reach";
    Some(Diagnostic::new(&member.name.place, what, instead))
}

fn words(cards: &[&Card]) -> String {
    cards.iter().map(|card| card.0.join(" ")).collect::<Vec<_>>().join(", ")
}

fn cards(machine: &Machine) -> Vec<Card> {
    let networks = machine.networks.iter().zip(machine.network_names());
    networks
        .map(|(of, name)| Card([Some(name), of.mac.clone()].into_iter().flatten().collect()))
        .collect()
}
