//! A group that does not work, and comes back.

use super::*;
use tidelock_store::fold::FoldError;

fn other() -> Link {
    Link { connection: ConnectionId(2), ..LINK }
}

impl Looped {
    /// The disk fails the sync that is under way.
    fn fail(&mut self, ms: u64) {
        self.driver.disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
        self.turn(ms);
        assert!(self.state.broken_because().is_some() && self.state.group().is_none());
        self.driver.disk.set_faults(Faults::default());
    }

    fn attaches(&mut self, ms: u64, link: Link) {
        let (outbox, room) = (Arc::clone(&self.outbox), Taken::default());
        let (host, attach) = ("host-a".to_owned(), attach());
        self.host(ms, HostEvent::Attach { link, host, attach, outbox, room });
    }

    fn refused(&self) -> Vec<(RefusalKind, String)> {
        let refused = |message| match message {
            Message::Refused { kind, reason } => Some((kind, reason)),
            _ => None,
        };
        self.sent().into_iter().filter_map(refused).collect()
    }
}

#[test]
fn a_group_that_has_failed_says_why_and_is_opened_again_after_a_while() {
    let mut of = Looped::new();
    let opened = (of.state.generation(), of.driver.openings);
    of.record(2);
    of.fail(100);
    let reason = of.state.broken_because().unwrap().to_owned();
    assert!(of.state.unavailable().to_string().contains(&reason));
    assert!(!of.state.came_to_nothing());
    of.sent();
    of.attaches(100, other());
    assert_eq!(of.refused(), [(RefusalKind::Stopping, reason)]);
    assert_eq!(of.state.timeout(at_ms(100)), Some(Duration::from_millis(RETRY_MS)));
    of.turn(100 + RETRY_MS - 1);
    assert!(of.state.group().is_none());
    of.turn(100 + RETRY_MS);
    assert!(of.state.group().is_some() && of.state.broken_because().is_none());
    assert_eq!((of.state.generation(), of.driver.openings), (opened.0 + 1, opened.1 + 1));
}

#[test]
fn a_recovery_does_not_wait_for_the_next_attempt_to_open_the_group() {
    let mut of = Looped::new();
    of.record(2);
    of.fail(0);
    let order = Order::Recover { primary_declared_dead: true, point: None, accepts_damage: false };
    of.order(1, 8, order);
    assert!(of.is_recovered());
}

#[test]
fn the_end_of_a_sync_or_a_job_of_an_earlier_opening_says_nothing_of_this_one() {
    let mut of = Looped::new();
    of.record(2);
    of.turn_alone(0);
    let (generation, job) = of.driver.sync.take().unwrap();
    // The sync ends after the group was opened again.
    of.state.open(at_ms(0), &mut of.driver);
    assert_ne!(of.state.generation(), generation);
    of.sent();
    of.state.synced(generation, job.run(), at_ms(0), &mut of.driver);
    assert_ne!(of.state.timeout(at_ms(0)), Some(Duration::ZERO), "no turn follows from it");
    let broken = Err(JournalError::Full(io::ErrorKind::StorageFull.into()));
    of.state.synced(generation, broken, at_ms(0), &mut of.driver);
    assert!(of.state.group().unwrap().broken().is_none());
    let failed =
        JobEnd::Fold(CountVector::new(), Err(FoldError::Full(io::ErrorKind::StorageFull.into())));
    of.state.job_done(generation, failed, at_ms(0));
    assert!(of.state.group().unwrap().status(at_ms(0)).fold_error.is_none());
}

#[test]
fn an_attachment_that_waits_when_the_group_fails_is_refused() {
    let mut of = Looped::new();
    of.record(2);
    of.turn_alone(0);
    of.sent();
    of.attaches(0, other());
    of.fail(0);
    let refused = of.refused();
    assert!(refused.iter().any(|(kind, _)| *kind == RefusalKind::Stopping), "{refused:?}");
    assert!(!of.state.has_waiting());
}

#[test]
fn a_host_that_may_not_create_the_group_is_told_so_and_leaves_nothing() {
    let mut driver = TestDriver::default();
    let options = GroupOptions { hosts: Some(vec!["host-b".into()]), ..GroupOptions::default() };
    let mut state = GroupLoop::new("g", options);
    state.open(at_ms(0), &mut driver);
    let mut of = Looped { state, driver, outbox: Arc::default() };
    of.attaches(0, LINK);
    let refused = of.refused();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!((of.driver.removals, of.driver.openings), (1, 0));
    assert!(of.state.came_to_nothing());
    assert!(matches!(of.state.unavailable(), RecoverError::Group(GroupError::Unknown)));
}

/// A group that folds at once, with a record that is not durable yet.
fn folding() -> Looped {
    let mut driver = TestDriver::default();
    let options = GroupOptions { fold_min_bytes: 1, ..GroupOptions::default() };
    let mut state = GroupLoop::new("g", options);
    state.open(at_ms(0), &mut driver);
    let mut of = Looped { state, driver, outbox: Arc::default() };
    of.attaches(0, LINK);
    let frames = VecDeque::from([Frame::Record(LINK.channel, copy_done())]);
    of.host(0, HostEvent::Frames { link: LINK, frames, room: Taken::default() });
    of.record(2);
    of
}

#[test]
fn members_hear_of_a_group_that_breaks_at_the_end_of_a_turn() {
    let mut of = folding();
    // Until all of it is folded.
    loop {
        of.turn(0);
        let jobs = std::mem::take(&mut of.driver.jobs);
        if jobs.is_empty() {
            break;
        }
        for (generation, job) in jobs {
            of.state.job_done(generation, job.run(), at_ms(0));
        }
    }
    of.record(3);
    of.turn_alone(0);
    assert!(of.sync_ends(0));
    assert_eq!(of.refused(), []);
    of.driver.disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    of.turn_alone(0);
    let reason = of.state.broken_because().expect("the fold cannot be put on record");
    assert!(reason.contains("fold.json"), "{reason}");
    assert_eq!(of.refused().len(), 1, "the member is to attach again");
}

#[test]
fn a_fold_that_has_failed_is_tried_again_after_a_while() {
    let mut of = folding();
    of.turn(0);
    let folds = |of: &mut Looped| {
        let jobs = std::mem::take(&mut of.driver.jobs);
        jobs.iter().filter(|(_, job)| matches!(job, Job::Fold(_))).count()
    };
    let hour_ms = 48 * 3600 * 1000;
    of.turn(hour_ms);
    assert_eq!(folds(&mut of), 1);
    of.turn(hour_ms);
    assert_eq!(folds(&mut of), 0, "one at a time");
    let generation = of.state.generation();
    let full = || {
        JobEnd::Fold(CountVector::new(), Err(FoldError::Full(io::ErrorKind::StorageFull.into())))
    };
    of.state.job_done(generation, full(), at_ms(hour_ms));
    assert_eq!(of.state.timeout(at_ms(hour_ms)), Some(Duration::from_millis(RETRY_MS)));
    of.turn(hour_ms + RETRY_MS - 1);
    assert_eq!(folds(&mut of), 0);
    of.turn(hour_ms + RETRY_MS);
    assert_eq!(folds(&mut of), 1);
}

/// Tickets are of an opening.
#[test]
fn an_order_that_was_not_on_record_when_the_group_failed_is_carried_out_again() {
    let mut of = Looped::new();
    let order = set(&of, 1);
    let power_off_at = Some(of.driver.disk.ops());
    of.driver.disk.set_faults(Faults { power_off_at, ..Faults::default() });
    of.order(0, 1, order);
    assert!(of.state.broken_because().is_some() && of.driver.answers.is_empty());
    of.driver.disk.set_faults(Faults::default());
    of.turn(RETRY_MS);
    let answers = &*of.driver.answers;
    assert!(matches!(answers, [(1, Answer::Marked(Ok(_)))]), "{answers:?}");
    assert_eq!(of.state.group().unwrap().marks().len(), 1);
}
