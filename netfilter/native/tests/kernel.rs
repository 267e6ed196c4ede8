//! The kernel and this process do the same with random frames, in random states: verdict, mark, frame, P and counters.

#[allow(dead_code)] // Other tests use the rest.
#[path = "../../tagging/tests/programs/case.rs"]
mod case;
#[allow(dead_code)]
#[path = "../../tagging/tests/programs/frames.rs"]
mod frames;
#[allow(dead_code)]
#[path = "../../tagging/tests/programs/member.rs"]
mod member;

use case::{Case, FORMS, Known, WALL_AT_BOOT_MS, case};
use frames::{OWN6, PEER6, STRANGER6, ip6};
use member::{ELSEWHERE, HERE, KEY, MARK_MASK, Member, load_peer, load_with, settings, terms};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use tidelock_native::{Maps, Planted, Programs};
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::tag::{Form, TagKeys};
use tidelock_tagging::{
    Addresses, CommittedCells, CrossingCells, Direction, MemberTags, Peer, PendingCells, Settings,
};

const CASES: u32 = 1500;
/// The run of this process's programs, for the member and for the other one.
const RUN: u64 = 77;

/// State of the group, besides P and C.
#[derive(Clone, Debug)]
struct State {
    is_incomplete: bool,
    is_async: bool,
    is_open: bool,
    is_trusted: bool,
    rules_are_gone: bool,
    waits: bool,
    interface: u32,
}

fn state() -> impl Strategy<Value = State> {
    let seldom = || prop::bool::weighted(0.1);
    let interface = prop_oneof![6 => Just(HERE), 1 => Just(ELSEWHERE)];
    let often = (any::<bool>(), prop::bool::weighted(0.9), interface);
    (often, seldom(), seldom(), seldom(), seldom()).prop_map(
        |((is_open, is_trusted, interface), is_incomplete, is_async, rules_are_gone, waits)| {
            State { is_incomplete, is_async, is_open, is_trusted, rules_are_gone, waits, interface }
        },
    )
}

impl State {
    fn set(&self, pending: &PendingCells, committed: &CommittedCells, crossing: &CrossingCells) {
        let until = |is| if is { u64::MAX } else { 0 };
        pending.incomplete.store(self.is_incomplete.into(), SeqCst);
        committed.is_async.store(self.is_async.into(), SeqCst);
        committed.open_until.store(until(self.is_open), SeqCst);
        committed.trusted_until.store(until(self.is_trusted), SeqCst);
        committed.rules_gone.store(self.rules_are_gone.into(), SeqCst);
        crossing.waiting.store(self.waits.into(), SeqCst);
        crossing.decided.store(crossing.queued.load(SeqCst), SeqCst);
    }
}

/// ARP, neighbour discovery, and what a bridge takes for itself, as they should be but for some bytes.
fn neighbourly() -> impl Strategy<Value = Vec<u8>> {
    let arp = (prop_oneof![Just(1u8), Just(2u8)], any::<bool>()).prop_map(|(operation, peer)| {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 6];
        frame.extend([0, 1, 8, 0, 6, 4, 0, operation, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
        frame.extend([9, 9, 9, 9, 9, 9, 10, 0, 0, if peer { 2 } else { 9 }]);
        frame
    });
    let to = prop_oneof![Just(PEER6), Just(STRANGER6), Just("ff02::1:ff00:2"), Just("fe80::2")];
    let discovery = (133u8..=137, to, any::<bool>()).prop_map(|(kind, to, with_option)| {
        let mut message = vec![kind, 0, 1, 2, 0, 0, 0, 0];
        if kind != 133 {
            message.extend(frames::address(PEER6));
        }
        if with_option {
            message.extend([if kind == 136 { 2 } else { 1 }, 1, 2, 0, 0, 0, 0, 1]);
        }
        let mut frame = ip6(OWN6, to, frames::ICMPV6, &message);
        frame[14..18].copy_from_slice(&[0x60, 0, 0, 0]);
        frame[21] = 255;
        frame
    });
    let link = prop_oneof![
        3 => Just(None),
        1 => Just(Some([0xff; 6])),
        1 => Just(Some([1, 0x80, 0xc2, 0, 0, 3])),
    ];
    let change = prop::option::weighted(0.4, (any::<usize>(), any::<u8>()));
    let longer = prop_oneof![2 => Just(0usize), 1 => 1usize..20];
    (prop_oneof![arp, discovery], link, change, longer).prop_map(
        |(mut frame, link, change, longer)| {
            if let Some(link) = link {
                frame[..6].copy_from_slice(&link);
            }
            if let Some((at, byte)) = change {
                let len = frame.len();
                frame[14 + at % (len - 14)] = byte;
            }
            frame.resize(frame.len() + longer, 0x33);
            frame
        },
    )
}

/// Programs of a member in the kernel and here, with their maps.
struct Both {
    kernel: Member,
    beside: Option<MemberTags>,
    native: Programs,
    pending: PendingCells,
    committed: CommittedCells,
    crossing: CrossingCells,
    neighbour: PendingCells,
}

fn peers() -> [IpAddr; 2] {
    ["10.0.0.2", PEER6].map(|text| text.parse().expect("an address"))
}

impl Both {
    fn load(
        settings: &Settings,
        is_here: bool,
        has_neighbour: bool,
        fault: Option<Planted>,
    ) -> Option<Both> {
        let kernel = load_with(settings, is_here)?;
        let beside = has_neighbour.then(|| {
            let beside = load_peer(settings, &kernel.group);
            beside.join(&kernel.group).expect("it joins");
            beside
        });
        let own = ["10.0.0.1", OWN6].map(|text| text.parse().expect("an address")).to_vec();
        let peers = peers().map(|address| Peer { address, is_here }).to_vec();
        let native =
            Programs::new(settings, &Addresses { own, peers }, RUN, kernel.tags.pass_mark())
                .with_fault(fault);
        let both = Both {
            kernel,
            beside,
            native,
            pending: PendingCells::new(),
            committed: CommittedCells::new(),
            crossing: CrossingCells::default(),
            neighbour: PendingCells::new(),
        };
        both.committed.set_tag_terms(&terms(TagKeys::only(KEY)));
        for committed in [&both.committed, both.kernel.group.committed()] {
            committed.wall_minus_boot.store(WALL_AT_BOOT_MS * 1_000_000, SeqCst);
        }
        for pending in [&both.pending, &both.neighbour] {
            pending.run.store(RUN, SeqCst);
        }
        Some(both)
    }

    /// Gives P, C and the rest of the state to both.
    fn set(&self, known: &Known, state: &State) {
        known.set(&self.kernel);
        let (pending, committed) = (self.kernel.tags.pending(), self.kernel.group.committed());
        state.set(pending, committed, self.kernel.tags.crossing());
        state.set(&self.pending, &self.committed, &self.crossing);
        copy(&pending.entries, &self.pending.entries);
        copy(&committed.entries, &self.committed.entries);
        self.pending.hlc.store(pending.hlc.load(SeqCst), SeqCst);
        let neighbour = self.beside.as_ref().map(MemberTags::pending);
        for cells in [&self.neighbour].into_iter().chain(neighbour.map(|pending| &***pending)) {
            // Some of the other one's entries are greater, some smaller.
            for (nth, (to, from)) in cells.entries.iter().zip(&committed.entries).enumerate() {
                to.store(from.load(SeqCst).saturating_sub(nth as u64 % 3), SeqCst);
            }
            cells.hlc.store(7, SeqCst);
        }
    }

    fn try_case(&mut self, (case, state): (Case, State), six: bool) -> Result<(), TestCaseError> {
        self.set(&case.known(self.kernel.codec.form()), &state);
        let frame = case.frame(&self.kernel, six);
        let direction = if case.to_guest { Direction::ToGuest } else { Direction::FromGuest };
        self.try_frame(direction, state.interface, &frame)
    }

    /// Gives both the frame, and compares.
    fn try_frame(
        &mut self,
        direction: Direction,
        interface: u32,
        frame: &[u8],
    ) -> Result<(), TestCaseError> {
        let by_kernel = self
            .kernel
            .tags
            .try_frame_from(interface, direction, frame, 0)
            .map_err(|e| TestCaseError::reject(e.to_string()))?;
        let beside: Vec<_> = match self.beside {
            Some(_) => peers().map(|address| (address, &self.neighbour)).to_vec(),
            None => Vec::new(),
        };
        let maps = Maps {
            pending: &self.pending,
            committed: &self.committed,
            crossing: &self.crossing,
            neighbours: &beside,
            interfaces: &[HERE],
            has_judge: true,
            now: MonoNanos(member::boot_ms() * 1_000_000),
        };
        let here = self.native.run(direction, &maps, interface, frame);
        prop_assert_eq!(here.passed, by_kernel.passed, "verdict");
        if here.passed {
            prop_assert_eq!(here.mark & MARK_MASK, by_kernel.mark & MARK_MASK, "mark");
            prop_assert_eq!(&here.frame, &by_kernel.frame, "frame");
        }
        same(&self.pending, self.kernel.tags.pending())?;
        if let Some(beside) = &self.beside {
            same(&self.neighbour, beside.pending())?;
        }
        let queued = self.kernel.tags.crossing().queued.load(SeqCst);
        prop_assert_eq!(self.crossing.queued.load(SeqCst), queued, "left to the queue");
        let by_kernel = self.kernel.tags.stats().expect("counters");
        prop_assert_eq!(self.native.stats(), by_kernel, "counters");
        Ok(())
    }
}

fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(SeqCst), SeqCst);
    }
}

fn same(here: &PendingCells, there: &PendingCells) -> Result<(), TestCaseError> {
    let all = |p: &PendingCells| {
        let entries: Vec<_> = p.entries.iter().map(|entry| entry.load(SeqCst)).collect();
        (p.hlc.load(SeqCst), p.incomplete.load(SeqCst), entries)
    };
    prop_assert_eq!(all(here), all(there), "P");
    Ok(())
}

/// Settings of a member, whether the other one is on this host, and whether its programs are.
fn members(form: Form, fault: Option<Planted>) -> impl Iterator<Item = Option<Both>> {
    let with = move |(is_bridged, strips, is_here, has_neighbour)| {
        let settings = Settings { is_bridged, path_strips_options: strips, ..settings(form) };
        Both::load(&settings, is_here, has_neighbour, fault)
    };
    [
        (true, false, true, false),
        (false, false, true, false),
        (true, false, false, false),
        (true, true, false, false),
        (true, false, true, true),
    ]
    .into_iter()
    .map(with)
}

fn runner(cases: u32) -> TestRunner {
    let max_global_rejects = cases * 10;
    let config =
        Config { cases, failure_persistence: None, max_global_rejects, ..Config::default() };
    TestRunner::new(config)
}

fn try_cases(six: bool) {
    let mut seen = std::collections::BTreeMap::<&str, u64>::new();
    for form in FORMS {
        for both in members(form, None) {
            let Some(both) = both else { return };
            let both = std::cell::RefCell::new(both);
            runner(CASES)
                .run(&(case(), state()), |drawn| both.borrow_mut().try_case(drawn, six))
                .unwrap();
            for (name, n) in both.borrow().native.stats().named() {
                *seen.entry(name).or_default() += n;
            }
        }
    }
    for (name, n) in &seen {
        // The first two are of the offloads, the others of what a test cannot bring about, or sets otherwise.
        let never = [
            "tagged_gso_lowered",
            "gated_refused",
            "dropped_failed",
            "dropped_unjudged",
            "untagged_for_a_demonstration",
            "dropped_shut",
        ];
        assert_eq!(*n > 0, !never.contains(name), "{name}: {seen:?}");
    }
}

#[test]
fn any_ipv4_packet_fares_as_in_the_kernel() {
    try_cases(false);
}

#[test]
fn any_ipv6_packet_fares_as_in_the_kernel() {
    try_cases(true);
}

#[test]
fn any_neighbourly_frame_fares_as_in_the_kernel() {
    for both in members(FORMS[1], None) {
        let Some(both) = both else { return };
        let both = std::cell::RefCell::new(both);
        runner(2 * CASES)
            .run(&(neighbourly(), case(), state()), |(frame, case, state)| {
                let mut both = both.borrow_mut();
                both.set(&case.known(FORMS[1]), &state);
                both.try_frame(Direction::FromGuest, state.interface, &frame)
            })
            .unwrap();
    }
}

/// The comparison finds each of the faults that are planted for the simulator.
#[test]
fn a_program_with_a_fault_fares_otherwise() {
    for fault in Planted::ALL {
        let finds = |both: Both| {
            let both = std::cell::RefCell::new(both);
            let config = Config { max_shrink_iters: 0, ..runner(2 * CASES).config().clone() };
            TestRunner::new(config)
                .run(&(case(), state()), |drawn| both.borrow_mut().try_case(drawn, false))
                .is_err()
        };
        let mut found = false;
        for both in FORMS.into_iter().flat_map(|form| members(form, Some(fault))) {
            let Some(both) = both else { return };
            found |= finds(both);
            if found {
                break;
            }
        }
        assert!(found, "{fault:?}");
    }
}
