//! Colours, only where a person reads them.

use std::io::IsTerminal;
use tidelock_daemon_core::status::{GroupStatus, Kind};

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint {
    on: bool,
}

/// What a text is, for its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// All is well.
    Good,
    /// Needs a look.
    Watch,
    /// Needs someone now.
    Bad,
    /// Stands back.
    Faint,
    /// A heading.
    Strong,
}

impl Paint {
    /// Without colours.
    pub const PLAIN: Paint = Paint { on: false };

    /// On a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
    #[must_use]
    pub fn for_stdout() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { on: wanted && std::io::stdout().is_terminal() }
    }

    /// The text in its colour.
    #[must_use]
    pub fn tone(self, tone: Tone, text: &str) -> String {
        if !self.on {
            return text.to_owned();
        }
        let code = match tone {
            Tone::Good => "32",
            Tone::Watch => "33",
            Tone::Bad => "1;31",
            Tone::Faint => "2",
            Tone::Strong => "1",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// The look of a group.
#[must_use]
pub fn tone_of(group: &GroupStatus) -> Tone {
    match group.risk.why.kind {
        _ if group.is_fine() => Tone::Good,
        Kind::Copying if group.risk.told.is_none() => Tone::Watch,
        _ => Tone::Bad,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_is_plain() {
        assert_eq!(Paint::PLAIN.tone(Tone::Bad, "x"), "x");
        assert_eq!(Paint { on: true }.tone(Tone::Good, "x"), "\x1b[32mx\x1b[0m");
    }

    #[test]
    fn only_a_group_that_is_fine_is_green() {
        let mut group = crate::example_status::status().groups.remove(0);
        for kind in Kind::ALL {
            group.risk.why.kind = kind;
            group.protected = group.risk.is_protected();
            assert_eq!(tone_of(&group) == Tone::Good, kind == Kind::Following);
        }
    }
}
