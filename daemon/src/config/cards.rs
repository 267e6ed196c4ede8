//! The network cards of a member's machine, against those whose packets are held.
//!
//! A card that is not held answers clients with what a disaster undoes, whatever the others do. So each card of a
//! `machine` has a `[[group.member.network]]`, or is named in `ungated`.

use tidelock_config::Diagnostic;

use super::Member;

/// What a card goes by: its MAC address, its name, the host's interface.
struct Card(Vec<String>);

impl Card {
    fn is(&self, name: &str) -> bool {
        self.0.iter().any(|own| own.eq_ignore_ascii_case(name))
    }
}

/// Compares the cards in the text of a machine description with the member's section.
pub(super) fn check(member: &Member, machine: &str) -> Option<Diagnostic> {
    // What cannot be read is said by whoever reads the description as a whole.
    let cards = cards(machine)?;
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

fn cards(machine: &str) -> Option<Vec<Card>> {
    match machine.trim_start().starts_with('<') {
        true => of_libvirt(machine),
        false => of_json(machine),
    }
}

fn of_json(text: &str) -> Option<Vec<Card>> {
    let description: serde_json::Value = serde_json::from_str(text).ok()?;
    let networks = description.get("networks").and_then(serde_json::Value::as_array)?;
    let card = |(nth, network): (usize, &serde_json::Value)| {
        let text = |key| Some(network.get(key)?.as_str()?.to_owned());
        Card(
            [text("name").or_else(|| Some(format!("net{nth}"))), text("mac")]
                .into_iter()
                .flatten()
                .collect(),
        )
    };
    Some(networks.iter().enumerate().map(card).collect())
}

fn of_libvirt(text: &str) -> Option<Vec<Card>> {
    let document = roxmltree::Document::parse(text).ok()?;
    let devices = document.root_element().children().find(|node| node.has_tag_name("devices"))?;
    let card = |(nth, interface): (usize, roxmltree::Node<'_, '_>)| {
        let attribute = |element, name| {
            let found = interface.children().find(|node| node.has_tag_name(element))?;
            found.attribute(name).map(str::to_owned)
        };
        let names =
            [Some(format!("net{nth}")), attribute("mac", "address"), attribute("target", "dev")];
        Card(names.into_iter().flatten().collect())
    };
    Some(
        devices
            .children()
            .filter(|node| node.has_tag_name("interface"))
            .enumerate()
            .map(card)
            .collect(),
    )
}
