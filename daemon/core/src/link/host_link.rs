//! The link of one host, sans-I/O: it connects to the backup again and again, with growing pauses, and has all members of
//! the host on its connection.
//!
//! A driver makes connections when [`HostLink::wants_connection`] says so, carries bytes both ways, and calls
//! [`HostLink::tick`] at the [`HostLink::deadline`]. An error of any call is the end of the connection: the driver drops
//! it and hands the error to [`HostLink::lost`].

use super::LinkState;
use super::connection::{Connection, ConnectionError, Hello, member_of};
use super::member::{Member, MemberError};
use super::port::ToLink;
use bytes::BytesMut;
use std::time::Duration;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::RefusalKind;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest pause of a host that is refused, or that hears what it cannot believe: somebody has to act first.
const PAUSE_REFUSED_MAX: Duration = Duration::from_secs(30);
/// The end of a connection that stood for this long is said in any case.
const LASTING: Duration = Duration::from_secs(60);
/// A reason that repeats is said again after so long.
const SAID_EVERY: Duration = Duration::from_secs(600);
/// A connection that stood for this long ends a row of failures.
const STEADY: Duration = Duration::from_secs(10);

enum Phase {
    /// The next attempt begins then.
    Waiting {
        until: MonoNanos,
    },
    /// The driver is to connect, or is at it.
    Connecting {
        since: MonoNanos,
    },
    Connected {
        since: MonoNanos,
        connection: Connection,
    },
}

/// The link of one host.
pub struct HostLink<T> {
    address: String,
    hello: Hello,
    members: Vec<Member<T>>,
    phase: Phase,
    pause: Duration,
    /// State of the generator that spreads pauses, so that hosts do not come back in step.
    noise: u64,
    /// The output without a connection: always empty.
    nothing: BytesMut,
    /// The owner loops have gone.
    is_ending: bool,
    state: LinkState,
    has_news: bool,
    /// The end of the last connection or attempt, for people.
    last_reason: Option<String>,
    /// The reason that was logged last, and when.
    logged: Option<(String, MonoNanos)>,
}

impl<T> HostLink<T> {
    /// A link without a connection, which wants one. `address` is for the log; `noise` is any number that differs from
    /// host to host.
    #[must_use]
    pub fn new(
        address: String,
        hello: Hello,
        members: Vec<Member<T>>,
        noise: u64,
        now: MonoNanos,
    ) -> Self {
        let mut link = Self {
            address,
            hello,
            members,
            phase: Phase::Waiting { until: now },
            pause: PAUSE_FIRST,
            noise,
            nothing: BytesMut::new(),
            is_ending: false,
            state: LinkState::Connecting { after: None },
            has_news: false,
            last_reason: None,
            logged: None,
        };
        link.may_connect(now);
        link
    }

    /// True if the driver is to make a connection. It then calls [`connected`](Self::connected) or
    /// [`lost`](Self::lost).
    #[must_use]
    pub fn wants_connection(&self) -> bool {
        matches!(self.phase, Phase::Connecting { .. })
    }

    /// True if nothing is left to do: the owner loops have gone, and the network has taken everything.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.is_ending
            && match &self.phase {
                Phase::Waiting { .. } | Phase::Connecting { .. } => true,
                Phase::Connected { connection, .. } => connection.out_bytes() == 0,
            }
    }

    /// The state of the link, if it has changed since it was asked for last.
    pub fn news(&mut self) -> Option<LinkState> {
        std::mem::take(&mut self.has_news).then(|| self.state.clone())
    }

    /// The connection is there.
    pub fn connected(&mut self, now: MonoNanos) {
        if let Phase::Connecting { since } = self.phase {
            let connection = Connection::open(&self.hello, &self.members, now);
            self.phase = Phase::Connected { since, connection };
        }
    }

    /// Bytes have arrived. What is left in `input` is the beginning of a frame.
    pub fn received(
        &mut self,
        input: &mut BytesMut,
        now: MonoNanos,
        wall_ms: u64,
    ) -> Result<(), ConnectionError> {
        let Phase::Connected { connection, .. } = &mut self.phase else { return Ok(()) };
        let Some(greeting) = connection.received(input, &mut self.members, now, wall_ms)? else {
            return Ok(());
        };
        tracing::info!(
            address = self.address,
            server = greeting.server,
            software = greeting.software,
            "connected to the backup"
        );
        self.set_state(LinkState::Up { server: greeting.server, software: greeting.software });
        Ok(())
    }

    /// A message of a member's owner loop.
    pub fn owner_says(&mut self, channel: Channel, message: ToLink) -> Result<(), ConnectionError> {
        let member = member_of(&mut self.members, channel)?;
        match &mut self.phase {
            Phase::Connected { connection, .. } => connection.owner_says(member, message),
            // Nothing can be said without a connection.
            Phase::Waiting { .. } | Phase::Connecting { .. } => {
                member.hear_owner(message, &mut BytesMut::new());
            }
        }
        Ok(())
    }

    /// The owner loops have gone: what they have said is sent if there is a connection, and that is all.
    pub fn owners_gone(&mut self) {
        self.is_ending = true;
    }

    /// Bytes for the network, which takes them from the front.
    pub fn output(&mut self) -> Result<&mut BytesMut, ConnectionError> {
        match &mut self.phase {
            Phase::Connected { connection, .. } => connection.output(&mut self.members),
            Phase::Waiting { .. } | Phase::Connecting { .. } => Ok(&mut self.nothing),
        }
    }

    /// True if [`owners_gone`](Self::owners_gone) was called.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// The bytes of that which are encoded ahead of the network.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        match &self.phase {
            Phase::Connected { connection, .. } => connection.out_bytes(),
            Phase::Waiting { .. } | Phase::Connecting { .. } => 0,
        }
    }

    /// The time at which [`tick`](Self::tick) is due.
    #[must_use]
    pub fn deadline(&self) -> MonoNanos {
        match &self.phase {
            Phase::Waiting { until } => *until,
            Phase::Connecting { since } => since.plus_ms(CONNECT_TIMEOUT.as_millis() as u64),
            Phase::Connected { connection, .. } => connection.deadline(),
        }
    }

    /// Time has passed. Nothing happens before the deadline.
    pub fn tick(&mut self, now: MonoNanos) -> Result<(), ConnectionError> {
        if now < self.deadline() {
            return Ok(());
        }
        match &mut self.phase {
            Phase::Waiting { .. } => {
                self.may_connect(now);
                Ok(())
            }
            Phase::Connecting { .. } => Err(ConnectionError::Silent(CONNECT_TIMEOUT)),
            Phase::Connected { connection, .. } => connection.tick(&mut self.members, now),
        }
    }

    /// A pause is over.
    fn may_connect(&mut self, now: MonoNanos) {
        if !self.members.is_empty() && self.members.iter().all(Member::awaits_adoption) {
            self.phase = Phase::Waiting { until: now.plus_ms(PAUSE_FIRST.as_millis() as u64) };
            let reason = "no group begins before `tidelock adopt`".to_owned();
            self.set_state(LinkState::Down { reason, retry_at: None });
        } else {
            self.phase = Phase::Connecting { since: now };
            self.set_state(LinkState::Connecting { after: self.last_reason.clone() });
        }
    }

    /// The connection, or the attempt to make one, has ended. An error means that the daemon has to start anew.
    pub fn lost(&mut self, error: ConnectionError, now: MonoNanos) -> Result<(), MemberError> {
        let (Phase::Connecting { since } | Phase::Connected { since, .. }) = self.phase else {
            return Ok(());
        };
        let error = match error {
            ConnectionError::Member(error) if error.ends_run() => {
                let reason = error.to_string();
                self.set_state(LinkState::Down { reason, retry_at: None });
                return Err(error);
            }
            error => error,
        };
        for member in &mut self.members {
            member.disconnected();
            if let ConnectionError::Refused { kind, reason } = &error {
                member.connection_refused(*kind, reason);
            }
        }
        let stood = Duration::from_nanos(now.since_ns(since));
        self.log(&error, stood, now);
        let is_refused = error.is_of_words()
            || matches!(
                error,
                ConnectionError::Refused { kind, .. } if kind != RefusalKind::Stopping
            );
        let pause_max = if is_refused { PAUSE_REFUSED_MAX } else { PAUSE_MAX };
        let was_steady = stood > STEADY && !is_refused;
        self.pause = if was_steady { PAUSE_FIRST } else { (self.pause * 2).min(pause_max) };
        let until = now.plus_ms(self.with_noise(self.pause).as_millis() as u64);
        self.phase = Phase::Waiting { until };
        let reason = error.to_string();
        self.last_reason = Some(reason.clone());
        self.set_state(LinkState::Down { reason, retry_at: Some(until) });
        Ok(())
    }

    fn log(&mut self, error: &ConnectionError, stood: Duration, now: MonoNanos) {
        let repeats = error.what_repeats();
        let is_late = |at: MonoNanos| u128::from(now.since_ns(at)) > SAID_EVERY.as_nanos();
        let is_known =
            self.logged.as_ref().is_some_and(|(what, at)| *what == repeats && !is_late(*at));
        if is_known && stood <= LASTING {
            return;
        }
        tracing::warn!(
            address = self.address,
            reason = error.to_string(),
            "the link to the backup is down; a reason that repeats is said every 10 minutes"
        );
        self.logged = Some((repeats, now));
    }

    /// Between half of the pause and all of it, by a linear congruential generator (Knuth, MMIX).
    fn with_noise(&mut self, pause: Duration) -> Duration {
        self.noise = self
            .noise
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let per_mille = (self.noise >> 33) % 1000;
        pause / 2 + pause / 2 * per_mille as u32 / 1000
    }

    fn set_state(&mut self, state: LinkState) {
        if self.state != state {
            self.state = state;
            self.has_news = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::Seq;
    use tidelock_protocol::sender::SenderError;

    const BEGUN: MonoNanos = MonoNanos(1_000_000);

    fn link() -> HostLink<()> {
        let hello = Hello { host: "host-a".into(), software: "test".into() };
        HostLink::new("backup".into(), hello, Vec::new(), 7, BEGUN)
    }

    #[test]
    fn an_attempt_has_its_time_and_the_next_one_comes_after_a_pause() {
        let mut link = link();
        assert!(link.wants_connection());
        let late = BEGUN.plus_ms(CONNECT_TIMEOUT.as_millis() as u64);
        assert_eq!(link.deadline(), late);
        link.tick(MonoNanos(late.0 - 1)).unwrap();
        let silent = link.tick(late).unwrap_err();
        link.lost(silent, late).unwrap();
        let again = link.deadline();
        link.tick(MonoNanos(again.0 - 1)).unwrap();
        assert!(!link.wants_connection());
        link.tick(again).unwrap();
        assert!(link.wants_connection());
    }

    #[test]
    fn pauses_grow_to_a_bound_that_is_higher_for_a_host_that_is_refused() {
        let refused = |kind| ConnectionError::Refused { kind, reason: "a test".into() };
        let are_within = |error: &dyn Fn() -> ConnectionError, stood_ms, bounds_ms: [u64; 8]| {
            let (mut link, mut now) = (link(), BEGUN);
            for bound_ms in bounds_ms {
                let lost_at = now.plus_ms(stood_ms);
                link.lost(error(), lost_at).unwrap();
                now = link.deadline();
                link.tick(now).unwrap();
                let pause_ms = now.since_ns(lost_at) / 1_000_000;
                assert!((bound_ms / 2..=bound_ms).contains(&pause_ms), "{pause_ms} of {bound_ms}");
            }
        };
        let silent = || ConnectionError::Silent(CONNECT_TIMEOUT);
        let (stopping, quota) = (|| refused(RefusalKind::Stopping), || refused(RefusalKind::Quota));
        let growing_ms = [200, 400, 800, 1600, 3200, 5000, 5000, 5000];
        are_within(&silent, 0, growing_ms);
        are_within(&stopping, 0, growing_ms);
        are_within(&quota, 0, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600]);
        let steady_ms = STEADY.as_millis() as u64;
        are_within(&silent, steady_ms, growing_ms);
        are_within(&silent, steady_ms + 1, [100; 8]);
        are_within(&quota, steady_ms + 1, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600]);
    }

    #[test]
    fn a_link_that_ends_is_finished_when_the_network_has_taken_everything() {
        let mut link = link();
        link.connected(BEGUN);
        assert!(!link.output().unwrap().is_empty() && link.out_bytes() > 1);
        assert!(!link.is_finished() && !link.is_ending());
        link.owners_gone();
        assert!(!link.is_finished() && link.is_ending());
        link.output().unwrap().clear();
        assert!(link.is_finished());
    }

    /// Words that cannot be true are not believed, and the next connection may bring others. A stream that does not fit
    /// is for a new run, which compares the sites.
    #[test]
    fn a_backup_that_cannot_be_believed_is_asked_again_and_a_stream_that_does_not_fit_ends_the_run()
    {
        let member = || "db".to_owned();
        let lost = |error| {
            let mut link = link();
            link.news();
            let lost = link.lost(ConnectionError::Member(error), BEGUN);
            let Some(LinkState::Down { retry_at, .. }) = link.news() else { panic!("{lost:?}") };
            assert_eq!(retry_at.is_none(), lost.is_err());
            lost.is_err()
        };
        assert!(!lost(MemberError::Unexpected { member: member(), what: "lease" }));
        let (durable, sent) = (Seq(5), Seq(4));
        let source = SenderError::Unsent { durable, sent };
        assert!(lost(MemberError::Stream { member: member(), source }));
    }
}
