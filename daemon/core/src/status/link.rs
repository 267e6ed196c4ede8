//! Status of the connection to the backup.

use super::ms;
use crate::link;
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::MonoNanos;

/// The connection to the backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The backup's address as configured.
    pub backup: String,
    /// True if it is up.
    pub state: LinkState,
    /// Time for which it has been up, or not been up.
    pub state_age_ms: u64,
    /// True if the link is encrypted and both sides are authenticated.
    pub tls: bool,
    /// Time for which this host's certificate is still valid; 0: it is not, or cannot be read. `None`: none is used.
    pub certificate_valid_s: Option<u64>,
    /// Connections made since the start; more than one means that it was lost.
    pub connects: u64,
    /// Why it is not up, if it is not.
    pub problem: Option<String>,
    /// Time of the next attempt, if one is waiting.
    pub retry_in_ms: Option<u64>,
}

/// State of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkState {
    /// An attempt is being made.
    Connecting,
    /// The backup has answered the hello.
    Connected,
    /// No connection; the next attempt waits.
    Disconnected,
}

/// The configuration of the link, as far as status tells of it.
#[derive(Clone, Debug)]
pub struct LinkTerms {
    /// The backup's address.
    pub backup: String,
    /// The link is encrypted, and both sides are authenticated.
    pub tls: bool,
    /// Seconds for which this host's certificate is still valid; 0: it is not, or cannot be read. `None`: none is used.
    pub certificate_valid_s: Option<u64>,
}

/// The past of the link since the daemon started, as far as status tells of it.
#[derive(Clone, Debug)]
pub struct LinkHistory {
    connects: u64,
    /// The time since when it has been up, or not been up.
    since: MonoNanos,
    now: link::LinkState,
}

impl LinkHistory {
    /// The link of a daemon that starts.
    #[must_use]
    pub fn new(now: MonoNanos) -> Self {
        Self { connects: 0, since: now, now: link::LinkState::Connecting { after: None } }
    }

    /// Follows the link into another state.
    pub fn follow(&mut self, state: &link::LinkState, now: MonoNanos) {
        let is_up = |state: &link::LinkState| matches!(state, link::LinkState::Up { .. });
        if is_up(state) != is_up(&self.now) {
            self.since = now;
            self.connects += u64::from(is_up(state));
        }
        self.now = state.clone();
    }

    /// The status of the link.
    #[must_use]
    pub fn status(&self, terms: LinkTerms, now: MonoNanos) -> LinkStatus {
        let (state, problem, retry_at) = match &self.now {
            link::LinkState::Up { .. } => (LinkState::Connected, None, None),
            link::LinkState::Connecting { after } => (LinkState::Connecting, after.clone(), None),
            link::LinkState::Down { reason, retry_at } => {
                (LinkState::Disconnected, Some(reason.clone()), *retry_at)
            }
        };
        LinkStatus {
            backup: terms.backup,
            state,
            state_age_ms: ms(now.since_ns(self.since)),
            tls: terms.tls,
            certificate_valid_s: terms.certificate_valid_s,
            connects: self.connects,
            problem,
            retry_in_ms: retry_at.map(|at| ms(at.since_ns(now))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attempts are no connections, and the time counts from the last one that came or went.
    #[test]
    fn a_link_is_up_or_not_since_a_time() {
        let at_s = |s: u64| MonoNanos(s * 1_000_000_000);
        let terms = LinkTerms { backup: "b:1".into(), tls: true, certificate_valid_s: Some(9) };
        let mut history = LinkHistory::new(at_s(1));
        let up = link::LinkState::Up { server: "b".into(), software: "s".into() };
        let down = link::LinkState::Down {
            reason: "reset".into(),
            retry_at: Some(MonoNanos(9_500_000_000)),
        };
        let told = |history: &LinkHistory| {
            let of = history.status(terms.clone(), at_s(9));
            (of.state, of.state_age_ms, of.connects, of.problem, of.retry_in_ms)
        };
        assert_eq!(told(&history), (LinkState::Connecting, 8_000, 0, None, None));
        history.follow(&up, at_s(3));
        history.follow(&up, at_s(4));
        assert_eq!(told(&history), (LinkState::Connected, 6_000, 1, None, None));
        history.follow(&down, at_s(5));
        let why = || Some("reset".to_owned());
        assert_eq!(told(&history), (LinkState::Disconnected, 4_000, 1, why(), Some(500)));
        history.follow(&link::LinkState::Connecting { after: why() }, at_s(6));
        assert_eq!(told(&history), (LinkState::Connecting, 4_000, 1, why(), None));
        history.follow(&up, at_s(8));
        assert_eq!(told(&history), (LinkState::Connected, 1_000, 2, None, None));
    }
}
