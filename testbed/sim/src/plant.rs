//! Bugs that are planted on purpose, to show that the checkers bite.

use tidelock_native::Planted;
use tidelock_planted::Bug;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A bug in production's code.
    Production(Bug),
    /// A bug in a copy of the kernel programs' text.
    Programs(Planted),
    /// A bug in the simulator's own code between production's parts.
    OnTheWay(OnTheWay),
}

/// Bugs of the glue between production's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTheWay {
    /// A write is begun on the local disk before the backlog on disk has its record.
    WrittenBeforeKept,
}

impl Plant {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        let of_production = Bug::ALL.iter().copied().map(Plant::Production);
        let of_programs = Planted::ALL.into_iter().map(Plant::Programs);
        of_production.chain(of_programs).chain([Plant::OnTheWay(OnTheWay::WrittenBeforeKept)])
    }

    /// The bug of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::all().find(|plant| plant.name() == name)
    }

    /// Name of the bug: the variant's words in small letters, with hyphens.
    #[must_use]
    pub fn name(self) -> String {
        let variant = match self {
            Plant::Production(bug) => format!("{bug:?}"),
            Plant::Programs(bug) => format!("{bug:?}"),
            Plant::OnTheWay(bug) => format!("{bug:?}"),
        };
        let mut name = String::new();
        for letter in variant.chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }
}

/// Plants a bug of production's code for what this thread runs; anything else takes it out.
pub fn in_this_thread(plant: Option<Plant>) {
    tidelock_planted::plant(match plant {
        Some(Plant::Production(bug)) => Some(bug),
        Some(Plant::Programs(_) | Plant::OnTheWay(_)) | None => None,
    });
}
