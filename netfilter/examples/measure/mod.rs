//! What the benchmarks of this folder measure with: round trips, floods, TCP streams.
#![allow(dead_code, unsafe_code, reason = "each benchmark uses some of it")]

pub mod programs;
pub mod taps;

use crate::lab::{PATIENCE, in_namespace, next, obstacle};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// What a stream with a fixed window has under way, at most.
const WINDOW_BYTES: libc::c_int = 512 << 10;

/// Ends the process, with the reason, where namespaces cannot be made.
pub fn require_namespaces(benchmark: &str) {
    if let Some(why) = obstacle() {
        eprintln!("{benchmark}: {why}");
        std::process::exit(1);
    }
}

/// The arguments that are numbers.
pub fn numbers() -> impl Iterator<Item = u64> {
    std::env::args().skip(1).filter_map(|argument| argument.parse().ok())
}

/// `None` without values.
pub fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() * percent / 100).min(sorted.len().checked_sub(1)?);
    Some(rounded(sorted[at]))
}

pub fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Keeps the calling thread, and what it starts, on a core, if there are as many. Both ends of a round trip on the same:
/// what is measured is the work on the way, not how soon a sleeping core is woken.
pub fn stay_on_core(core: usize) {
    keep_on(0, Some(core));
}

/// Keeps a thread on a core, or lets it run on any; 0 is the calling one.
pub fn keep_on(thread: libc::pid_t, core: Option<usize>) {
    let count = std::thread::available_parallelism().map_or(1, |n| n.get());
    // SAFETY: all zeros is an empty set.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for core in core.map_or(0..count, |core| core % count..core % count + 1) {
        // SAFETY: the set is ours, and a machine's cores are within it.
        unsafe { libc::CPU_SET(core, &mut cores) };
    }
    // SAFETY: the set has this size.
    let result = unsafe { libc::sched_setaffinity(thread, size_of_val(&cores), &raw const cores) };
    assert_eq!(result, 0, "sched_setaffinity: {}", std::io::Error::last_os_error());
}

/// Microseconds that each of `count` trips takes, after some that are not counted.
fn timed(count: usize, mut trip: impl FnMut()) -> Vec<f64> {
    for _ in 0..count / 10 {
        trip();
    }
    let one = |_| {
        let start = Instant::now();
        trip();
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..count).map(one).collect()
}

/// Microseconds of `count` round trips; `answer` answers one request, in a thread of its own.
fn round_trips(
    count: usize,
    mut answer: impl FnMut() + Send,
    ask: impl FnMut() + Send,
) -> Vec<f64> {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            stay_on_core(0);
            (0..count + count / 10).for_each(|_| answer());
        });
        let asker = scope.spawn(move || {
            stay_on_core(0);
            timed(count, ask)
        });
        asker.join().expect("round trips")
    })
}

/// Microseconds from `client` to `server` at this address and back.
pub fn udp_round_trips(
    client: &UdpSocket,
    server: &UdpSocket,
    address: SocketAddr,
    count: usize,
) -> Vec<f64> {
    let answer = || {
        let mut buffer = [0; 64];
        let (len, from) = server.recv_from(&mut buffer).expect("a request");
        server.send_to(&buffer[..len], from).expect("a reply");
    };
    let ask = || {
        client.send_to(&[0; 64], address).expect("a request");
        next(client);
    };
    round_trips(count, answer, ask)
}

/// The same over an established connection.
pub fn tcp_round_trips(mut client: &TcpStream, mut server: &TcpStream, count: usize) -> Vec<f64> {
    let answer = || {
        let mut buffer = [0; 64];
        server.read_exact(&mut buffer).expect("a request");
        server.write_all(&buffer).expect("a reply");
    };
    let ask = || {
        client.write_all(&[0; 64]).expect("a request");
        client.read_exact(&mut [0; 64]).expect("a reply");
    };
    round_trips(count, answer, ask)
}

/// A connection from one namespace to an address of another. The first one's end comes first.
pub fn connection(from: &str, to: &str, address: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = in_namespace(to, || TcpListener::bind(("0.0.0.0", address.port())));
    let listener = listener.expect("bound");
    let sender = in_namespace(from, || TcpStream::connect(address)).expect("connected");
    let (receiver, _) = listener.accept().expect("accepted");
    for socket in [&sender, &receiver] {
        socket.set_nodelay(true).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    }
    (sender, receiver)
}

/// Gigabits per second of one TCP stream, with whatever goes on in both threads.
pub fn stream(connection: (TcpStream, TcpStream), span: Duration) -> f64 {
    let (mut sender, mut receiver) = connection;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let block = vec![0; 256 << 10];
            let start = Instant::now();
            while start.elapsed() < span {
                sender.write_all(&block).expect("written");
            }
        });
        let (start, mut bytes, mut buffer) = (Instant::now(), 0u64, vec![0; 256 << 10]);
        loop {
            match receiver.read(&mut buffer).expect("read") {
                0 => break,
                len => bytes += len as u64,
            }
        }
        rounded(bytes as f64 * 8.0 / 1e9 / start.elapsed().as_secs_f64())
    })
}

/// In which order so many take their turns in a round. Whose turn it is, and whose it was before, may make one faster
/// (what it needs is still in the cache): in twice as many rounds each has every place equally often, and follows upon
/// itself as often as any other.
pub fn order(of: usize, round: usize) -> impl Iterator<Item = usize> {
    let nth = move |at: usize| {
        let at = if round.is_multiple_of(2) { at } else { of - 1 - at };
        (at + round / 2) % of
    };
    (0..of).map(nth)
}

/// Streams of bytes over standing connections, one after the other, each until all of its bytes have arrived; both ends
/// on one core. Returns how long each connection took in each round.
///
/// The first round is not counted: a connection that was idle has to find its pace again.
pub fn streams_in_turn(
    connections: &[&(TcpStream, TcpStream)],
    rounds: usize,
    bytes: u64,
) -> Vec<Vec<Duration>> {
    let turns = || {
        let of = connections.len();
        (0..=rounds).flat_map(move |round| order(of, round).map(move |nth| (round, nth)))
    };
    let (begins, begun) = mpsc::channel();
    let (ends, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            stay_on_core(0);
            let block = vec![1; 256 << 10];
            for (_, nth) in turns() {
                begins.send(Instant::now()).expect("a receiver");
                for _ in 0..bytes / block.len() as u64 {
                    (&connections[nth].0).write_all(&block).expect("written");
                }
                ended.recv().expect("all of it has arrived");
            }
        });
        let receiver = scope.spawn(move || {
            stay_on_core(0);
            let mut buffer = vec![0; 256 << 10];
            let mut took = vec![Vec::with_capacity(rounds); connections.len()];
            for (round, nth) in turns() {
                let start = begun.recv().expect("a sender");
                for _ in 0..bytes / buffer.len() as u64 {
                    (&connections[nth].1).read_exact(&mut buffer).expect("read");
                }
                if round > 0 {
                    took[nth].push(start.elapsed());
                }
                ends.send(()).expect("a sender");
            }
            took
        });
        receiver.join().expect("streams")
    })
}

/// Makes a stream over a connection like those over others: no congestion control whose timer decides how fast it goes
/// (BBR is usual on some machines), and as much under way as a cache holds, where the kernel would find a size for each
/// connection, and keep it.
pub fn fixed_window((sender, receiver): &(TcpStream, TcpStream)) {
    set(sender, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic");
    set(sender, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &WINDOW_BYTES.to_ne_bytes());
    set(receiver, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &WINDOW_BYTES.to_ne_bytes());
}

fn set(socket: &TcpStream, level: libc::c_int, option: libc::c_int, value: &[u8]) {
    let (at, len) = (value.as_ptr().cast(), value.len() as libc::socklen_t);
    // SAFETY: the value is as long as is said.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, at, len) };
    assert_eq!(result, 0, "option {option}: {}", std::io::Error::last_os_error());
}

/// Small datagrams as fast as they can be sent; those that arrived at an interface of `to`, each
/// second.
pub fn flood(
    from: &UdpSocket,
    address: SocketAddr,
    to: &str,
    interface: &'static str,
    span: Duration,
) -> f64 {
    let arrived = Received::from_now_on(to, interface);
    let start = Instant::now();
    while start.elapsed() < span {
        for _ in 0..256 {
            from.send_to(&[0; 64], address).expect("it is sent");
        }
    }
    (arrived.packets() as f64 / start.elapsed().as_secs_f64()).round()
}

/// Counts the packets that an interface receives.
pub struct Received {
    counters: File,
    interface: &'static str,
    before: u64,
}

impl Received {
    pub fn from_now_on(namespace: &str, interface: &'static str) -> Received {
        // An open file of this kind stays with the namespace that it was opened in.
        let open = || File::open("/proc/thread-self/net/dev").expect("interface counters");
        let mut received =
            Received { counters: in_namespace(namespace, open), interface, before: 0 };
        received.before = received.packets();
        received
    }

    pub fn packets(&self) -> u64 {
        let mut text = [0; 4096];
        let len = self.counters.read_at(&mut text, 0).expect("interface counters");
        let text = std::str::from_utf8(&text[..len]).expect("text");
        let own = |line: &str| {
            line.trim().strip_prefix(self.interface)?.strip_prefix(':').map(str::to_owned)
        };
        let counters = text.lines().find_map(own).expect("the interface");
        let packets = counters.split_whitespace().nth(1).expect("a column of packets");
        packets.parse::<u64>().expect("a count") - self.before
    }
}
