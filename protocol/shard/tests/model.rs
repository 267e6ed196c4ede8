//! The agents and the watermark service, model-checked with Stateright: every order of events of a store with two shards, up
//! to a number of faults. (The paper did it in TLA+, section 6.) The machines are production's own, not a specification of
//! them.
//!
//! Operations are stamped, placed in the log, committed and answered in any order that the contract of a store allows
//! (`docs/shard-logs.md`); clocks are off by ε in opposite directions. Messages are never lost for good, because one that
//! is not delivered yet behaves like one that is lost; each may be delivered twice.

use stateright::{Checker, HasDiscoveries, Model, Property};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::record::Payload;
use tidelock_shard::{
    ApplyTo, Backup, Bsa, Closing, Entry, LogIndex, LogPoint, Order, Psa, Reply, Report, Standing,
    Step, Terms, Todo, WatermarkService,
};

const REPLICAS: u16 = 2;
/// Time of every call: what an agent does after its patience is an event of its own, and no time passes.
const NOW: MonoNanos = MonoNanos(0);
const TERMS: Terms = Terms { replicas: REPLICAS, unacked_max: 2, patience_ns: u64::MAX };
/// ε, in ticks of the model's time.
const EPSILON: u64 = 1;

/// Bounds of what happens.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Shard of each operation.
    ops: &'static [usize],
    ticks: u64,
    faults: u8,
    disaster: bool,
    /// Messages under way at most.
    under_way: usize,
    /// Entries that are placed are committed at once, at both sites. Without faults nothing else can come of what is not
    /// committed yet, and there are far fewer states.
    at_once: bool,
    /// The store keeps to its contract: a reply waits until the clock has passed the stamp.
    commit_wait: bool,
    bug: Option<Bug>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Life {
    #[default]
    Unasked,
    /// Stamped.
    Begun(u64),
    /// Placed in the log of its shard.
    Placed,
    /// Its client has the reply.
    Known,
    /// Lost with a leader.
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Op {
    life: Life,
    /// The operations that were known when it was asked for.
    after: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Agent {
    psa: Psa,
    /// Log as a deposed leader's agent sees it.
    frozen: Option<(Vec<Entry>, usize)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Home {
    log: Vec<Entry>,
    commit: usize,
    /// True if the leader's clock is ahead by ε; behind otherwise.
    is_ahead: bool,
    agents: Vec<Agent>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Far {
    /// [`None`]: the mark of a recovery.
    log: Vec<Option<Entry>>,
    commit: usize,
    leader: usize,
    replicas: Vec<Bsa>,
    apply: ApplyTo,
    recovered: Option<Hlc>,
}

/// Messages under way. Two that are equal count as one, which may be delivered again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Message {
    ToFar { agent: usize, replica: u16, message: Backup },
    ToHome { agent: usize, replica: u16, reply: Reply },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    time: u64,
    faults: u8,
    ops: Vec<Op>,
    home: Vec<Home>,
    far: Vec<Far>,
    /// Messages by a hash, so that the same ones are the same state in whatever order they were sent.
    network: BTreeMap<u64, (usize, Message)>,
    service: WatermarkService,
    disaster: bool,
    /// A machine has refused what an honest peer has sent.
    refused: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    Begin(usize),
    Place(usize),
    CommitHome(usize),
    Answer(usize),
    Ship {
        shard: usize,
        agent: usize,
    },
    Deliver {
        shard: usize,
        message: Message,
        again: bool,
    },
    CommitFar(usize),
    /// A shard reports, and hears the service's order.
    Report(usize),
    HomeLeader {
        shard: usize,
        keeps: bool,
    },
    FarLeader {
        shard: usize,
        keeps: bool,
    },
    /// A deposed leader finds out.
    Depose(usize),
    Service,
    Timeout(usize),
    Disaster,
}

impl Bounds {
    fn shard(&self, op: usize) -> usize {
        self.ops[op]
    }

    fn shards(&self) -> usize {
        self.ops.iter().max().map_or(0, |last| last + 1)
    }
}

/// The operation of an entry.
fn content(entry: &Entry) -> u8 {
    entry.data.as_ref().expect("every entry has data").data()[0]
}

impl Home {
    fn clock(&self, time: u64) -> u64 {
        if self.is_ahead { time + 2 * EPSILON } else { time }
    }

    fn effective(&self, entries: usize) -> Hlc {
        self.log[..entries].iter().map(|entry| entry.stamp).max().unwrap_or_default()
    }

    fn place_of(&self, op: usize) -> Option<usize> {
        self.log.iter().position(|entry| content(entry) == op as u8)
    }
}

impl Far {
    fn new() -> Self {
        let mut replicas = vec![Bsa::following(); REPLICAS.into()];
        replicas[0] = Bsa::leading(Standing::default(), Closing::Open);
        Self {
            log: vec![],
            commit: 0,
            leader: 0,
            replicas,
            apply: ApplyTo::default(),
            recovered: None,
        }
    }

    fn point(&self, items: usize) -> LogPoint {
        self.log[..items].iter().flatten().next_back().map(Entry::point).unwrap_or_default()
    }

    fn closing(&self) -> Closing {
        match self.log.iter().position(Option::is_none) {
            None => Closing::Open,
            Some(at) if at < self.commit => Closing::Closed,
            Some(_) => Closing::Appended,
        }
    }

    fn lead(&mut self, keeps: bool) {
        if !keeps {
            self.log.truncate(self.commit);
        }
        self.leader = 1 - self.leader;
        let log = Standing { append: self.point(self.log.len()), commit: self.point(self.commit) };
        self.replicas[self.leader] = Bsa::leading(log, self.closing());
        let applied = self.apply.apply_to();
        self.apply = ApplyTo::after(applied);
        for entry in self.log[..self.commit].iter().flatten().filter(|entry| entry.end > applied) {
            self.apply.committed(entry.point());
        }
    }

    fn commit(&mut self) {
        let bsa = &mut self.replicas[self.leader];
        match &self.log[self.commit] {
            None => bsa.closed(),
            Some(entry) => {
                bsa.committed(entry.point());
                self.apply.committed(entry.point());
            }
        }
        self.commit += 1;
    }

    fn obey(&mut self, order: Order) {
        match self.replicas[self.leader].ordered(order) {
            None => {}
            Some(Todo::Close) => self.log.push(None),
            Some(Todo::Advance(watermark)) => {
                self.apply.advance(watermark);
            }
            Some(Todo::Recover(watermark)) => {
                self.recovered = Some(watermark);
                self.apply.advance(watermark);
                self.replicas[self.leader].recovered();
            }
        }
    }
}

/// The place of a message in the network.
fn place(shard: usize, message: &Message) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one((shard, message))
}

impl State {
    fn post(&mut self, shard: usize, message: Message) {
        self.network.insert(place(shard, &message), (shard, message));
    }

    fn take(&mut self, shard: usize, message: &Message) {
        self.network.remove(&place(shard, message));
    }

    fn ship(&mut self, shard: usize, agent: usize) -> bool {
        let home = &mut self.home[shard];
        let (log, commit) = match &home.agents[agent].frozen {
            Some((log, commit)) => (log.clone(), *commit),
            None => (home.log.clone(), home.commit),
        };
        let psa = &mut home.agents[agent].psa;
        psa.committed(LogIndex(commit as u64), NOW);
        let message = match psa.poll(NOW) {
            None => return false,
            Some(Step::Ask { .. }) => Some(psa.question()),
            Some(Step::Read { after, up_to }) => {
                let entries =
                    log.into_iter().filter(|entry| entry.end > after && entry.end <= up_to);
                psa.send(entries.collect()).expect("the log is in order")
            }
        };
        let Some(message) = message else { return false };
        let replica = psa.replica();
        self.post(shard, Message::ToFar { agent, replica, message });
        true
    }

    fn deliver(&mut self, shard: usize, message: Message) {
        match message {
            Message::ToFar { agent, replica, message } => {
                let far = &mut self.far[shard];
                match far.replicas[usize::from(replica)].received(message) {
                    Err(_) => self.refused = true,
                    Ok(received) => {
                        if usize::from(replica) == far.leader {
                            far.log.extend(received.append.into_iter().map(Some));
                        }
                        let reply = received.reply;
                        self.post(shard, Message::ToHome { agent, replica, reply });
                    }
                }
            }
            Message::ToHome { agent, replica, reply } => {
                let psa = &mut self.home[shard].agents[agent].psa;
                self.refused |= psa.received(replica, &reply, NOW).is_err();
            }
        }
    }

    fn home_leader(&mut self, shard: usize, keeps: bool, ops: &Bounds) {
        let home = &mut self.home[shard];
        let frozen = (home.log.clone(), home.commit);
        home.agents[0].frozen.get_or_insert(frozen);
        if !keeps {
            home.log.truncate(home.commit);
        }
        home.is_ahead = !home.is_ahead;
        home.agents.push(Agent { psa: Psa::new(TERMS), frozen: None });
        for (number, op) in self.ops.iter_mut().enumerate() {
            let lost = matches!(op.life, Life::Placed) && home.place_of(number).is_none();
            if ops.shard(number) == shard && (lost || matches!(op.life, Life::Begun(_))) {
                op.life = Life::Failed;
            }
        }
    }

    /// Operations of entries at the backup, up to where each shard says.
    fn ops_up_to(&self, to: impl Fn(&Far) -> LogIndex) -> Vec<usize> {
        let inside = self.far.iter().flat_map(|far| {
            let entries = far.log[..far.commit].iter().flatten();
            entries
                .filter(|entry| entry.end <= to(far))
                .map(|entry| usize::from(content(entry)))
                .collect::<Vec<_>>()
        });
        inside.collect()
    }

    /// Operations that may be applied now.
    fn applied(&self) -> Vec<usize> {
        self.ops_up_to(|far| far.apply.apply_to())
    }

    /// Operations that are there to be applied: shards hear of one watermark at different times (Slogger 4). Once all are recovered,
    /// nothing more is.
    fn available(&self) -> Vec<usize> {
        let is_recovered = self.far.iter().all(|far| far.recovered.is_some());
        self.ops_up_to(|far| if is_recovered { far.apply.apply_to() } else { LogIndex(u64::MAX) })
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let home = |is_ahead| Home {
            log: vec![],
            commit: 0,
            is_ahead,
            agents: vec![Agent { psa: Psa::new(TERMS), frozen: None }],
        };
        let mut state = State {
            time: 0,
            faults: 0,
            ops: vec![Op::default(); self.ops.len()],
            home: (0..self.shards()).map(|shard| home(shard == 0)).collect(),
            far: vec![Far::new(); self.shards()],
            network: BTreeMap::new(),
            service: WatermarkService::new(self.shards() as u16),
            disaster: false,
            refused: false,
        };
        // The agents know where the backup stands.
        for shard in 0..self.shards() {
            state.ship(shard, 0);
            while let Some((shard, message)) = state.network.values().next().cloned() {
                state.take(shard, &message);
                state.deliver(shard, message);
            }
        }
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.time < self.ticks {
            actions.push(Action::Tick);
        }
        for (number, op) in state.ops.iter().enumerate() {
            match op.life {
                Life::Unasked => actions.push(Action::Begin(number)),
                Life::Begun(_) => actions.push(Action::Place(number)),
                Life::Placed => actions.push(Action::Answer(number)),
                Life::Known | Life::Failed => {}
            }
        }
        for shard in 0..self.shards() {
            let (home, far) = (&state.home[shard], &state.far[shard]);
            if home.commit < home.log.len() {
                actions.push(Action::CommitHome(shard));
            }
            actions.extend((0..home.agents.len()).map(|agent| Action::Ship { shard, agent }));
            if far.commit < far.log.len() {
                actions.push(Action::CommitFar(shard));
            }
            actions.push(Action::Report(shard));
            if state.faults < self.faults {
                if home.agents.len() < 2 {
                    actions.push(Action::HomeLeader { shard, keeps: true });
                    actions.push(Action::HomeLeader { shard, keeps: false });
                }
                actions.push(Action::FarLeader { shard, keeps: true });
                actions.push(Action::FarLeader { shard, keeps: false });
                actions.push(Action::Timeout(shard));
            }
            if far.replicas[1 - far.leader].report().is_some() {
                actions.push(Action::Depose(shard));
            }
        }
        for (shard, message) in state.network.values() {
            let deliver =
                |again| Action::Deliver { shard: *shard, message: message.clone(), again };
            actions.push(deliver(false));
            if state.faults < self.faults {
                actions.push(deliver(true));
            }
        }
        if state.faults < self.faults {
            actions.push(Action::Service);
        }
        if self.disaster && !state.disaster {
            actions.push(Action::Disaster);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        tidelock_planted::plant(self.bug);
        let mut state = last.clone();
        match action {
            Action::Tick => state.time += 1,
            Action::Begin(op) => {
                // The latest that it can be now.
                let stamp = state.home[self.shard(op)].clock(state.time) + EPSILON;
                let known = state.ops.iter().enumerate().filter(|(_, op)| op.life == Life::Known);
                let after = known.map(|(number, _)| number).collect();
                state.ops[op] = Op { life: Life::Begun(stamp), after };
            }
            Action::Place(op) => {
                let Life::Begun(stamp) = state.ops[op].life else { return None };
                let log = &mut state.home[self.shard(op)].log;
                let end = LogIndex(log.len() as u64 + 1);
                let data = Payload::new(vec![op as u8].into());
                log.push(Entry::update(end, Hlc(stamp), data));
                state.ops[op].life = Life::Placed;
                if self.at_once {
                    state.home[self.shard(op)].commit += 1;
                }
            }
            Action::CommitHome(shard) => state.home[shard].commit += 1,
            Action::Answer(op) => {
                let home = &state.home[self.shard(op)];
                let place = home.place_of(op)?;
                // Commit wait: the earliest that it can be now is beyond the effective stamp.
                let earliest = home.clock(state.time).saturating_sub(EPSILON);
                let waits = self.commit_wait && home.effective(place + 1) >= Hlc(earliest);
                if place >= home.commit || waits {
                    return None;
                }
                state.ops[op].life = Life::Known;
            }
            Action::Ship { shard, agent } => {
                if !state.ship(shard, agent) {
                    return None;
                }
            }
            Action::Deliver { shard, message, again } => {
                state.faults += u8::from(again);
                if !again {
                    state.take(shard, &message);
                }
                state.deliver(shard, message);
                while self.at_once && state.far[shard].commit < state.far[shard].log.len() {
                    state.far[shard].commit();
                }
            }
            Action::CommitFar(shard) => state.far[shard].commit(),
            Action::Report(shard) => {
                let report: Report = state.far[shard].replicas[state.far[shard].leader].report()?;
                state.service.reported(shard as u16, report).expect("there is such a shard");
                if let Some(order) = state.service.order() {
                    state.far[shard].obey(order);
                }
                while self.at_once && state.far[shard].commit < state.far[shard].log.len() {
                    state.far[shard].commit();
                }
            }
            Action::HomeLeader { shard, keeps } => {
                state.faults += 1;
                state.home_leader(shard, keeps, self);
            }
            Action::FarLeader { shard, keeps } => {
                state.faults += 1;
                state.far[shard].lead(keeps);
            }
            Action::Depose(shard) => {
                let other = 1 - state.far[shard].leader;
                state.far[shard].replicas[other] = Bsa::following();
            }
            Action::Service => {
                state.faults += 1;
                state.service = WatermarkService::new(self.shards() as u16);
            }
            Action::Timeout(shard) => {
                state.faults += 1;
                for agent in &mut state.home[shard].agents {
                    agent.psa.reconnected();
                }
            }
            Action::Disaster => {
                state.disaster = true;
                state.service.recover();
            }
        }
        tidelock_planted::plant(None);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(PREFIX, |_: &Bounds, state: &State| {
                let available = state.available();
                let mut needed = state.applied().into_iter().flat_map(|op| &state.ops[op].after);
                needed.all(|known| available.contains(known))
            }),
            Property::always(LOG, |_, state: &State| {
                state.home.iter().zip(&state.far).all(|(home, far)| {
                    let mut entries =
                        far.log[..far.commit].iter().flatten().zip(&home.log[..home.commit]);
                    far.log[..far.commit].iter().flatten().count() <= home.commit
                        && entries.all(|(far, home)| (far.end, &far.data) == (home.end, &home.data))
                })
            }),
            Property::always(
                "what may be trimmed is committed at the backup",
                |_, state: &State| {
                    state.home.iter().zip(&state.far).all(|(home, far)| {
                        let safe = far.point(far.commit).index;
                        home.agents.iter().all(|agent| agent.psa.b_commit() <= safe)
                    })
                },
            ),
            Property::always(ONE_CUT, |_, state: &State| {
                let mut finals = state.far.iter().filter_map(|far| far.recovered);
                finals.next().is_none_or(|first| finals.all(|other| other == first))
            }),
            Property::always(HONEST, |_, state: &State| !state.refused),
            Property::sometimes(APPLIED, |_, state: &State| {
                state.applied().into_iter().any(|op| !state.ops[op].after.is_empty())
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.network.len() <= self.under_way
    }
}

const PREFIX: &str = "prefix";
const LOG: &str = "the backup has what is committed at home, in its order";
const ONE_CUT: &str = "a recovery is at one cut";
const HONEST: &str = "honest peers are not refused";
const APPLIED: &str = "something that depends on another is applied";

/// Three operations on two shards, and no faults: what the first shard writes last lets the watermark pass the second's.
const CALM: Bounds = Bounds {
    ops: &[0, 1, 0],
    ticks: 3,
    faults: 0,
    disaster: false,
    under_way: 2,
    at_once: true,
    commit_wait: true,
    bug: None,
};
/// Operations on one shard, with all that can happen between its two sites.
const ONE_SHARD: Bounds = Bounds { ops: &[0, 0], ticks: 0, faults: 1, at_once: false, ..CALM };

/// Runs the model to its bound: the properties with an example or a counterexample, and the number of states.
fn run(bounds: Bounds) -> (BTreeSet<&'static str>, usize) {
    let checker =
        bounds.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    (checker.discoveries().into_keys().collect(), checker.unique_state_count())
}

/// No property is broken in any state. `applies`: something that depends on another is applied in some.
fn holds(bounds: Bounds, applies: bool) {
    let (found, states) = run(bounds);
    println!("{bounds:?}: {states} states");
    assert_eq!(found, applies.then_some(APPLIED).into_iter().collect(), "{bounds:?}");
}

#[test]
fn every_order_of_events_keeps_the_prefix() {
    holds(CALM, true);
}

#[test]
fn every_order_of_events_of_a_recovery_keeps_the_prefix() {
    holds(Bounds { disaster: true, under_way: 1, ..CALM }, true);
}

#[test]
fn faults_of_one_shard_leave_its_log_whole() {
    holds(Bounds { faults: 2, ..ONE_SHARD }, false);
}

#[test]
fn a_recovery_of_two_shards_with_a_fault_is_at_one_cut() {
    holds(Bounds { ops: &[0, 1], disaster: true, ..ONE_SHARD }, false);
}

#[test]
fn a_store_that_answers_before_its_clock_has_passed_the_stamp_has_no_prefix() {
    let (found, states) = run(Bounds { commit_wait: false, ..CALM });
    assert!(found.contains(PREFIX), "{found:?} in {states} states");
}

#[test]
fn every_planted_fault_is_found() {
    let recovery = Bounds { disaster: true, ..CALM };
    let apart = Bounds { at_once: false, ..CALM };
    let cases = [
        (Bug::SentBeforeCommitted, ONE_SHARD, LOG),
        (Bug::StampsNotMonotone, ONE_SHARD, HONEST),
        (Bug::ShardLogWithGap, ONE_SHARD, LOG),
        (Bug::AppliedBeforeCommitted, apart, PREFIX),
        (Bug::SilentShardIgnored, CALM, PREFIX),
        (Bug::FinalRoundForgetsShard, recovery, ONE_CUT),
        (Bug::ShardNotFenced, recovery, ONE_CUT),
    ];
    for (bug, bounds, property) in cases {
        let (found, states) = run(Bounds { bug: Some(bug), ..bounds });
        println!("{bug:?}: {states} states");
        assert!(found.contains(property), "{bug:?}: {found:?} in {states} states");
    }
}
