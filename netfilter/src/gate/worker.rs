//! The gate's thread: waits in epoll for packets, changes and the ends of leases, and calls the groups' gates.

use super::group_gate::GroupGate;
use super::{GateError, Stopped};
use crate::nfqueue::Nfqueue;
use crate::sys::{Epoll, EventFd, TimerFd, now};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_protocol::ids::MonoNanos;

const TOKEN_WAKE: u64 = 0;
const TOKEN_LEASE: u64 = 1;
const TOKEN_FIRST_PORT: u64 = 2;

/// A group's gate with the timer of its lease.
struct Timed {
    gate: GroupGate<Nfqueue>,
    timer: TimerFd,
    armed: Option<MonoNanos>,
}

impl Timed {
    fn follow(&mut self, now: MonoNanos) -> Result<(), GateError> {
        self.gate.follow(now)?;
        let end = self.gate.lease_end().filter(|end| *end > now);
        if self.armed != end {
            self.timer.arm(end).map_err(GateError::Wait)?;
            self.armed = end;
        }
        Ok(())
    }
}

/// The thread's state.
pub(super) struct Worker {
    epoll: Epoll,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    groups: Vec<Timed>,
}

impl Drop for Worker {
    /// However the thread ends, the way past the queues ends with it.
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| group.gate.end());
    }
}

impl Worker {
    /// Waits for everything that the thread must react to.
    pub(super) fn new(
        gates: Vec<GroupGate<Nfqueue>>,
        wake: Arc<EventFd>,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, GateError> {
        let epoll = Epoll::new().map_err(GateError::Wait)?;
        epoll.add(wake.fd(), TOKEN_WAKE).map_err(GateError::Wait)?;
        let (mut token, mut groups) = (TOKEN_FIRST_PORT, Vec::new());
        for gate in gates {
            let timer = TimerFd::new().map_err(GateError::Wait)?;
            epoll.add(timer.fd(), TOKEN_LEASE).map_err(GateError::Wait)?;
            for port in 0..gate.port_count() {
                epoll.add(gate.queue(port).fd(), token).map_err(GateError::Wait)?;
                token += 1;
            }
            groups.push(Timed { gate, timer, armed: None });
        }
        Ok(Self { epoll, wake, stop, groups })
    }

    /// Runs until it is told to stop.
    pub(super) fn run(mut self) -> Result<Vec<Stopped>, GateError> {
        let mut ready = Vec::new();
        // Packets that came while the queues were being bound have been read already: nothing would wake for them.
        for Timed { gate, .. } in &mut self.groups {
            (0..gate.port_count()).try_for_each(|port| gate.take_up(port))?;
        }
        loop {
            for group in &mut self.groups {
                group.follow(now())?;
            }
            if self.stop.load(Ordering::SeqCst) {
                return Ok(self.groups.iter().flat_map(|group| group.gate.stopped()).collect());
            }
            for Timed { gate, .. } in &mut self.groups {
                let unsettled: Vec<_> = gate.unsettled().collect();
                unsettled.into_iter().try_for_each(|port| gate.take_up(port))?;
            }
            self.epoll.wait(&mut ready, self.timeout_ms()).map_err(GateError::Wait)?;
            for token in &ready {
                match *token {
                    TOKEN_WAKE => self.wake.drain(),
                    TOKEN_LEASE => self.timer_has_fired(),
                    port => self.take_up(port - TOKEN_FIRST_PORT)?,
                }
            }
        }
    }

    /// Timeout as epoll takes it: -1 is for ever.
    fn timeout_ms(&self) -> i32 {
        let mut may_sleep = true;
        for group in &self.groups {
            may_sleep &= group.gate.may_sleep();
        }
        let longest = self.groups.iter().filter_map(|group| group.gate.sleep_max_ms()).min();
        match may_sleep {
            true => longest.map_or(-1, |ms| i32::try_from(ms).expect("at most a minute")),
            false => 0,
        }
    }

    fn timer_has_fired(&mut self) {
        for group in &mut self.groups {
            group.timer.drain();
        }
    }

    fn take_up(&mut self, nth: u64) -> Result<(), GateError> {
        let mut port = usize::try_from(nth).expect("tokens count ports");
        for Timed { gate, .. } in &mut self.groups {
            if port < gate.port_count() {
                return gate.take_up(port);
            }
            port -= gate.port_count();
        }
        Ok(())
    }
}
