//! Colours, only where a person reads them.

use crate::status::GroupState;
use std::io::IsTerminal;

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

/// How a state is to be seen.
#[must_use]
pub fn tone_of(state: GroupState) -> Tone {
    match state {
        GroupState::Protected | GroupState::Replicating => Tone::Good,
        GroupState::Initialising
        | GroupState::Resyncing
        | GroupState::WaitingForBackup
        | GroupState::Stopping => Tone::Watch,
        GroupState::Degraded
        | GroupState::Unprotected
        | GroupState::Unheld
        | GroupState::Overflowed
        | GroupState::Differs
        | GroupState::Disconnected
        | GroupState::Stalled
        | GroupState::NoHeartbeat
        | GroupState::Fenced
        | GroupState::Superseded => Tone::Bad,
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
    fn only_a_fine_state_is_green() {
        for state in GroupState::ALL {
            assert_eq!(tone_of(state) == Tone::Good, state.is_fine());
        }
    }
}
