//! Against a store whose every state was kept; and with the power going off at every operation.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use tidelock_storage::memory::{Faults, Memory};

type Store = BTreeMap<Vec<u8>, Vec<u8>>;

const OPTIONS: Options =
    Options { window_ms: 1 << 40, size_max_bytes: 1 << 40, segment_bytes: 600 };

fn open(disk: &Memory, options: Options) -> WindowLog<Memory> {
    WindowLog::open(disk.clone(), "log", options).unwrap()
}

/// A store that logs what it does.
struct Played {
    log: WindowLog<Memory>,
    now: Store,
    /// The state at each time, oldest first.
    states: Vec<(Hlc, Store)>,
}

impl Played {
    fn new(log: WindowLog<Memory>) -> Self {
        Self { log, now: Store::new(), states: vec![(Hlc(0), Store::new())] }
    }

    fn put(&mut self, at: Hlc, key: u8, new: Option<u8>) -> Result<(), WindowLogError> {
        let value = |byte: u8| vec![byte; usize::from(byte)];
        let (key, new) = (vec![key], new.map(value));
        let old = self.now.get(&key).cloned();
        self.log.append(at, &key, old.as_deref(), new.as_deref())?;
        match new {
            Some(new) => drop(self.now.insert(key, new)),
            None => drop(self.now.remove(&key)),
        }
        self.states.retain(|(time, _)| *time != at);
        self.states.push((at, self.now.clone()));
        Ok(())
    }

    fn at(&self, time: Hlc) -> &Store {
        &self.states.iter().rev().find(|(at, _)| *at <= time).expect("the beginning").1
    }

    /// Each state leads to each other one.
    fn check(&mut self) {
        let times: Vec<Hlc> = self.states.iter().map(|(at, _)| *at).collect();
        let times = times.into_iter().flat_map(|at| [at, Hlc(at.0 + 1)]);
        let times: Vec<Hlc> = times.filter(|at| *at >= self.log.oldest()).collect();
        for from in &times {
            for to in &times {
                let diff = self.log.diff(*from, *to).unwrap();
                let (mut state, wanted) = (self.at(*from).clone(), self.at(*to));
                let differs = |key: &[u8]| state.get(key) != wanted.get(key);
                assert!(diff.changes.keys().all(|key| differs(key)), "{from} to {to}: {diff:?}");
                diff.apply(&mut state);
                assert_eq!(&state, wanted, "{from} to {to}");
            }
            let mut state = self.now.clone();
            self.log.diff_from_now(*from).unwrap().apply(&mut state);
            assert_eq!(&state, self.at(*from));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_state_leads_to_every_other(
        steps in prop::collection::vec((0u64..3, 0u8..4, prop::option::of(0u8..60), any::<bool>()), 1..24)
    ) {
        let disk = Memory::new();
        let mut played = Played::new(open(&disk, OPTIONS));
        let mut at = Hlc(1);
        for (later, key, new, reopened) in steps {
            at = Hlc(at.0 + later);
            played.put(at, key, new).unwrap();
            if reopened {
                played.log.sync().unwrap();
                played.log = open(&disk, OPTIONS);
                prop_assert_eq!(played.log.newest(), at);
            }
        }
        played.check();
    }
}

#[test]
fn what_leaves_the_window_is_refused_by_name_and_the_rest_stays() {
    for options in
        [Options { window_ms: 20, ..OPTIONS }, Options { size_max_bytes: 3_000, ..OPTIONS }]
    {
        let disk = Memory::new();
        let mut played = Played::new(open(&disk, options));
        for ms in 1..200 {
            played.put(Hlc::new(ms, 0), (ms % 3) as u8, Some((ms % 50) as u8)).unwrap();
            played.log.sync().unwrap();
        }
        let oldest = played.log.oldest();
        assert!(oldest > Hlc::new(100, 0) && oldest < Hlc::new(195, 0), "{oldest}");
        assert!(played.log.size_bytes() < 6_000, "{}", played.log.size_bytes());
        let error = played.log.diff_from_now(Hlc(oldest.0 - 1)).unwrap_err();
        assert!(matches!(error, WindowLogError::BeforeWindow { .. }), "{error}");
        played.log = open(&disk, options);
        assert_eq!(played.log.oldest(), oldest);
        played.check();
    }
}

#[test]
fn times_do_not_go_back_and_names_are_names() {
    let disk = Memory::new();
    let mut log = open(&disk, OPTIONS);
    log.append(Hlc(7), b"k", None, Some(b"v")).unwrap();
    log.append(Hlc(7), b"l", None, Some(b"v")).unwrap();
    let error = log.append(Hlc(6), b"k", Some(b"v"), None).unwrap_err();
    assert!(matches!(error, WindowLogError::WentBack { at: Hlc(6), newest: Hlc(7) }));
    let mut state = Store::new();
    log.diff(Hlc(0), Hlc(7)).unwrap().apply(&mut state);
    assert_eq!(state.len(), 2, "one step");
    let error = WindowLog::open(disk, "../log", OPTIONS).unwrap_err();
    assert!(matches!(error, WindowLogError::Name(_)));
}

/// What `docs/window-log.md` says of its size.
#[test]
fn a_change_takes_68_bytes_more_than_its_item_and_a_sync_56() {
    let mut log = open(&Memory::new(), Options { segment_bytes: 1 << 20, ..OPTIONS });
    log.append(Hlc(1), b"k", None, None).unwrap();
    log.sync().unwrap();
    let before = log.size_bytes();
    for n in 2..12 {
        log.append(Hlc(n), b"key", Some(b"old value"), Some(b"new")).unwrap();
    }
    log.sync().unwrap();
    assert_eq!(log.size_bytes() - before, 56 + 10 * (68 + 3 + 9 + 3));
}

#[test]
fn a_newer_format_is_refused() {
    let disk = Memory::new();
    drop(open(&disk, OPTIONS));
    tidelock_storage::replace(&disk, "log", MARK, b"{\"format\": 2}\n").unwrap();
    let error = WindowLog::open(disk, "log", OPTIONS).unwrap_err();
    assert!(matches!(error, WindowLogError::Format), "{error}");
}

/// Steps until something fails. Returns the last time that was synced.
fn run(disk: &Memory, from: u64) -> Result<u64, (u64, WindowLogError)> {
    let options = Options { window_ms: 4, ..OPTIONS };
    let mut synced = from;
    let mut log = WindowLog::open(disk.clone(), "log", options).map_err(|e| (synced, e))?;
    for step in from + 1..from + 8 {
        let old = (step > 1).then(|| (step - 1).to_le_bytes());
        let value = step.to_le_bytes();
        // Large enough for a segment now and then.
        let aside = vec![step as u8; 150];
        log.append(Hlc::new(step, 0), b"n", old.as_ref().map(|b| &b[..]), Some(&value))
            .and_then(|()| log.append(Hlc::new(step, 0), &value, None, Some(&aside)))
            .and_then(|()| log.sync())
            .map_err(|e| (synced, e))?;
        synced = step;
    }
    Ok(synced)
}

#[test]
fn power_loss_at_every_operation_keeps_what_was_synced() {
    let whole = Memory::new();
    run(&whole, 0).unwrap();
    for at in 0..whole.ops() {
        for seed in 0..4u64 {
            let disk = Memory::new();
            disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
            let (synced, _) = run(&disk, 0).unwrap_err();
            let mut bits = (at * 4 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let disk = disk.crash(&mut || {
                bits = bits.rotate_left(7).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ seed;
                bits >> 63 == 1
            });
            let mut log = open(&disk, Options { window_ms: 4, ..OPTIONS });
            let newest = log.newest().physical_ms();
            assert!(newest == synced || newest == synced + 1, "{newest} after {synced}, at {at}");
            if newest > log.oldest().physical_ms() {
                let mut state = Store::new();
                let before = Hlc::new(newest, 0).0 - 1;
                log.diff(Hlc(before), log.newest()).unwrap().apply(&mut state);
                assert_eq!(state[b"n".as_slice()], newest.to_le_bytes());
            }
            // It goes on.
            drop(log);
            run(&disk, newest).unwrap();
        }
    }
}
