//! The release queue against a slow and obvious one, with the kernel's queue behind both.
//!
//! The kernel is modelled as the list that it is: verdicts are applied to it, and what leaves it
//! must be exactly what the obvious model lets go, in an order that overtakes nothing in a flow.

use proptest::prelude::*;
use tidelock_netfilter::release_queue::{
    Arrival, Flow, GateState, Kind, Packet, PacketId, PassWhy, ReleaseQueue, ShutWhy,
};
use tidelock_netfilter::verdicts::{Verdict, Verdicts};
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;

const CAPACITY: usize = 12;
const WRITERS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u64),
    Commit(usize, u64),
    Arrive(Kind),
    Gate(GateState),
    Mode(Mode),
    Release,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        3 => (0u64..4).prop_map(|f| Kind::Data { flow: Some(Flow(f)) }),
        1 => Just(Kind::Data { flow: None }),
        3 => (0u64..4).prop_map(|f| Kind::PureAck { flow: Flow(f) }),
        1 => Just(Kind::NeverHeld),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..WRITERS, 1u64..4).prop_map(|(w, n)| Step::Write(w, n)),
        4 => (0..WRITERS, 1u64..6).prop_map(|(w, n)| Step::Commit(w, n)),
        12 => kind().prop_map(Step::Arrive),
        3 => Just(Step::Gate(GateState::Open)),
        1 => Just(Step::Gate(GateState::Shut(ShutWhy::NoLease))),
        1 => prop_oneof![
            30 => Just(Step::Gate(GateState::Open)),
            1 => Just(Step::Gate(GateState::Shut(ShutWhy::Fenced))),
        ],
        1 => prop_oneof![Just(Mode::Sync), Just(Mode::Pipelined), Just(Mode::Async)]
            .prop_map(Step::Mode),
        3 => Just(Step::Release),
    ]
}

#[derive(Clone, Debug)]
struct Waiting {
    id: u32,
    kind: Kind,
    stamp: [u64; WRITERS],
}

/// The obvious model: a list, searched from end to end for every question.
struct Model {
    pending: [u64; WRITERS],
    committed: [u64; WRITERS],
    fenced: bool,
    lease: bool,
    mode: Mode,
    waiting: Vec<Waiting>,
}

impl Model {
    fn covered(&self, stamp: &[u64; WRITERS]) -> bool {
        (0..WRITERS).all(|w| stamp[w] <= self.committed[w])
    }

    fn holds_all(&self) -> bool {
        self.fenced || (!self.lease && self.mode != Mode::Async)
    }

    fn arrive(&mut self, id: u32, kind: Kind) -> Arrival {
        let stamp = self.pending;
        let flow_waits = |flow: Flow| {
            self.waiting.iter().any(|w| match w.kind {
                Kind::Data { flow: f } => f == Some(flow),
                Kind::PureAck { flow: f } => f == flow,
                Kind::NeverHeld => false,
            })
        };
        if kind == Kind::NeverHeld {
            return match self.holds_all() {
                true => Arrival::Refused,
                false => Arrival::Pass(PassWhy::NeverHeld),
            };
        }
        if !self.holds_all() {
            if self.mode == Mode::Async {
                if self.waiting.is_empty() {
                    return Arrival::Pass(PassWhy::Async);
                }
            } else {
                if let Kind::PureAck { flow } = kind
                    && !flow_waits(flow)
                {
                    return Arrival::Pass(PassWhy::PureAck);
                }
                if self.waiting.is_empty() && self.covered(&stamp) {
                    return Arrival::Pass(PassWhy::Covered);
                }
            }
        }
        if self.waiting.len() == CAPACITY {
            return Arrival::Refused;
        }
        self.waiting.push(Waiting { id, kind, stamp });
        Arrival::Held
    }

    fn release(&mut self) -> Vec<u32> {
        let mut left = Vec::new();
        while let Some(first) = self.waiting.first() {
            let goes =
                !self.holds_all() && (self.mode == Mode::Async || self.covered(&first.stamp));
            if !goes {
                break;
            }
            left.push(self.waiting.remove(0).id);
        }
        left
    }
}

/// What `nfnetlink_queue.c` does with its list.
#[derive(Default)]
struct Kernel {
    queued: Vec<u32>,
    left: Vec<u32>,
}

impl Kernel {
    fn apply(&mut self, verdicts: &Verdicts) {
        for verdict in verdicts.as_slice() {
            match *verdict {
                Verdict::Accept(id) => {
                    let at = self.queued.iter().position(|q| *q == id.0).expect("ENOENT");
                    self.left.push(self.queued.remove(at));
                }
                Verdict::Drop(id) => {
                    let at = self.queued.iter().position(|q| *q == id.0).expect("ENOENT");
                    self.queued.remove(at);
                }
                Verdict::AcceptUpTo(max) => {
                    let run =
                        self.queued.iter().take_while(|q| !PacketId(**q).is_after(max)).count();
                    assert_ne!(run, 0, "ENOENT");
                    self.left.extend(self.queued.drain(..run));
                }
            }
        }
    }
}

fn vector(seqs: &[u64; WRITERS]) -> CountVector {
    seqs.iter().enumerate().map(|(w, s)| (WriterId(w as u16), Seq(*s))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn behaves_as_the_obvious_model(
        steps in prop::collection::vec(step(), 1..200),
        batch in 1usize..5,
    ) {
        let mut model = Model {
            pending: [0; WRITERS],
            committed: [0; WRITERS],
            fenced: false,
            lease: false,
            mode: Mode::Pipelined,
            waiting: Vec::new(),
        };
        let mut queue = ReleaseQueue::new(CAPACITY, Mode::Pipelined);
        let mut kernel = Kernel::default();
        let mut verdicts = Verdicts::new();
        let mut must_leave = Vec::new();
        let mut arrived_in_flow: Vec<(Flow, u32)> = Vec::new();
        let mut id = u32::MAX - 40;
        for (i, step) in steps.into_iter().enumerate() {
            let now = MonoNanos(i as u64 * 1000);
            let mut state_changed = true;
            match step {
                Step::Write(w, n) => {
                    model.pending[w] += n;
                    state_changed = false;
                }
                Step::Commit(w, n) => {
                    model.committed[w] = (model.committed[w] + n).min(model.pending[w]);
                    queue.set_committed(&vector(&model.committed));
                }
                Step::Gate(gate) => {
                    model.lease = gate == GateState::Open;
                    model.fenced |= gate == GateState::Shut(ShutWhy::Fenced);
                    queue.set_gate(gate);
                }
                Step::Mode(mode) => {
                    model.mode = mode;
                    queue.set_mode(mode);
                }
                Step::Arrive(kind) => {
                    state_changed = false;
                    id = id.wrapping_add(1);
                    kernel.queued.push(id);
                    let packet = Packet { id: PacketId(id), kind, len_bytes: 100 };
                    let expected = model.arrive(id, kind);
                    let arrival = queue.arrive(packet, &vector(&model.pending), now);
                    prop_assert_eq!(arrival, expected);
                    match arrival {
                        Arrival::Pass(_) => {
                            verdicts.pass(PacketId(id), queue.is_empty());
                            must_leave.push(id);
                        }
                        Arrival::Held => {}
                        Arrival::Refused => verdicts.drop_packet(PacketId(id)),
                    }
                    let flow = match kind {
                        Kind::Data { flow } => flow,
                        Kind::PureAck { flow } => Some(flow),
                        Kind::NeverHeld => None,
                    };
                    if arrival != Arrival::Refused {
                        arrived_in_flow.extend(flow.map(|flow| (flow, id)));
                    }
                }
                Step::Release => {}
            }
            // The gate may do several things before it tells the kernel, and releases whenever
            // what decides has changed.
            if state_changed {
                let mut left = Vec::new();
                let up_to = queue.release(now, |packet| left.push(packet.id.0));
                let expected = model.release();
                prop_assert_eq!(up_to.map(|id| id.0), left.last().copied());
                prop_assert_eq!(&left, &expected);
                if let Some(up_to) = up_to {
                    verdicts.release(up_to);
                }
                must_leave.extend(expected);
            }
            prop_assert_eq!(queue.len(), model.waiting.len());
            prop_assert_eq!(queue.held_bytes(), 100 * model.waiting.len() as u64);
            if i % batch == 0 {
                kernel.apply(&verdicts);
                verdicts.clear();
                let waiting: Vec<u32> = model.waiting.iter().map(|w| w.id).collect();
                prop_assert_eq!(&kernel.queued, &waiting);
                prop_assert_eq!(&kernel.left, &must_leave);
            }
        }
        kernel.apply(&verdicts);
        prop_assert_eq!(&kernel.left, &must_leave);
        for flow in (0..4).map(Flow) {
            let in_order: Vec<u32> =
                arrived_in_flow.iter().filter(|(f, _)| *f == flow).map(|(_, id)| *id).collect();
            let left: Vec<u32> =
                kernel.left.iter().filter(|id| in_order.contains(id)).copied().collect();
            prop_assert!(in_order.starts_with(&left), "{flow:?}: {left:?} left, {in_order:?} came");
        }
    }
}
