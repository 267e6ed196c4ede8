//! The thread of one direction: reads frames from one TAP, keeps them in its [`Line`], writes them to the other.
//!
//! The thread owns its line. Others talk to it with [`Order`]s, and wake it with a byte on a socket.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::line::{Counters, Line, Params};
use crate::sys;

/// Frames that are read before the line is looked at again.
const READ_BATCH: usize = 32;
/// The largest frame: 64 KiB of IP packet, Ethernet header, `virtio_net_hdr`.
const FRAME_BYTES_MAX: usize = 65536 + 14 + 10;

/// A machine whose cores have slept wakes a sleeper some hundreds of microseconds late, whatever
/// the timer's slack. After a pause the thread therefore gets up so much before a frame is due, and
/// stays awake for the rest. Frames that follow each other closely keep the cores awake themselves.
const EARLY: Duration = Duration::from_micros(500);
const PAUSE: Duration = Duration::from_millis(5);

/// What can be asked of a direction.
pub enum Order {
    /// Change the parameters; answered when they are in force.
    Set(Params, mpsc::Sender<()>),
    /// Tell the parameters and the counters.
    Report(mpsc::Sender<(Params, Counters)>),
}

/// How others reach a direction's thread.
pub struct Handle {
    orders: mpsc::Sender<Order>,
    waker: UnixStream,
}

impl Handle {
    /// Changes the parameters and returns when they are in force.
    pub fn set(&mut self, params: Params) -> io::Result<()> {
        let (done, wait) = mpsc::channel();
        self.order(Order::Set(params, done))?;
        wait.recv().map_err(|_| gone())
    }

    /// The parameters and the counters.
    pub fn report(&mut self) -> io::Result<(Params, Counters)> {
        let (done, wait) = mpsc::channel();
        self.order(Order::Report(done))?;
        wait.recv().map_err(|_| gone())
    }

    fn order(&mut self, order: Order) -> io::Result<()> {
        self.orders.send(order).map_err(|_| gone())?;
        self.waker.write_all(&[0])
    }
}

fn gone() -> io::Error {
    io::Error::new(ErrorKind::BrokenPipe, "the thread of this direction has ended")
}

/// One direction, before its thread runs.
pub struct Pump {
    from: Arc<File>,
    to: Arc<File>,
    line: Line,
    orders: mpsc::Receiver<Order>,
    wakened: UnixStream,
    origin: Instant,
    /// When a frame was last written.
    written: Duration,
}

impl Pump {
    /// A direction between two TAPs, and how to reach it.
    pub fn new(
        from: Arc<File>,
        to: Arc<File>,
        params: Params,
        seed: u64,
    ) -> io::Result<(Self, Handle)> {
        let (waker, wakened) = UnixStream::pair()?;
        wakened.set_nonblocking(true)?;
        let (sender, orders) = mpsc::channel();
        sys::set_offload(&from, params.loss == 0.0)?;
        let pump = Self {
            from,
            to,
            line: Line::new(params, seed),
            orders,
            wakened,
            origin: Instant::now(),
            written: Duration::ZERO,
        };
        Ok((pump, Handle { orders: sender, waker }))
    }

    /// Runs until a TAP fails: its namespace is gone.
    pub fn run(mut self) -> io::Result<()> {
        sys::use_exact_timers()?;
        let mut buffer = vec![0; FRAME_BYTES_MAX];
        loop {
            let timeout = self.line.next_due().map(|due| self.time_to_sleep(due));
            sys::wait_readable([self.from.as_fd(), self.wakened.as_fd()], timeout)?;
            self.follow_orders()?;
            self.write_due()?;
            for _ in 0..READ_BATCH {
                match (&*self.from).read(&mut buffer) {
                    Ok(len) => self.line.accept(self.now(), &buffer[..len]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) if is_passing(&error) => break,
                    Err(error) => return Err(error),
                }
            }
            self.write_due()?;
        }
    }

    fn time_to_sleep(&self, due: Duration) -> Duration {
        let early = if due.saturating_sub(self.written) > PAUSE { EARLY } else { Duration::ZERO };
        due.saturating_sub(self.now() + early)
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn follow_orders(&mut self) -> io::Result<()> {
        let mut bytes = [0; 64];
        match self.wakened.read(&mut bytes) {
            Ok(0) => return Err(gone()),
            Ok(_) => (),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        while let Ok(order) = self.orders.try_recv() {
            // An asker that went away needs no answer.
            match order {
                Order::Set(params, done) => {
                    sys::set_offload(&self.from, params.loss == 0.0)?;
                    self.line.set_params(params);
                    let _ = done.send(());
                }
                Order::Report(done) => {
                    let _ = done.send((self.line.params(), self.line.counters()));
                }
            }
        }
        Ok(())
    }

    fn write_due(&mut self) -> io::Result<()> {
        while let Some(frame) = self.line.pop_due(self.now()) {
            self.written = self.now();
            match (&*self.to).write(&frame) {
                Ok(_) => (),
                // An interface that is down or a full socket loses the frame, as a cable would.
                Err(error) if error.kind() == ErrorKind::WouldBlock || is_passing(&error) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// What a TAP answers while its interface is down, or to a frame that its kernel refuses.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::ENOMEM))
}
