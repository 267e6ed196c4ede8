//! Guest, host and client as three network namespaces, gone when the value is dropped.
//!
//! ```text
//! routed    guest 10.71.0.2 ── 10.71.0.1 host 10.72.0.1 ── 10.72.0.2 client      (fd71::, fd72::)
//! bridged   guest 10.71.0.2 ──── br0 10.71.0.1, host ───── 10.71.0.3 client      (fd71::)
//! ```
#![allow(unsafe_code)]

use std::fs::File;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tidelock_netfilter::rules::Topology;

/// Far more than anything here takes; only a failure lasts so long.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The host's interface to the guest.
pub const INTERFACE: &str = "gh0";
/// A packet that the host itself sends, ungated: what arrives before it was let out.
pub const MARKER: &[u8] = b"marker";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Why these tests cannot run here.
pub fn obstacle() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    *FOUND.get_or_init(look_for_obstacle)
}

fn look_for_obstacle() -> Option<&'static str> {
    // SAFETY: geteuid has no conditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("needs root");
    }
    sweep();
    let probe = format!("tlg{}-probe", std::process::id());
    if !quiet(&["ip", "netns", "add", &probe]) {
        return Some("needs iproute2 and the right to make network namespaces");
    }
    quiet(&["ip", "netns", "del", &probe]);
    None
}

/// Removes the namespaces of runs that were killed, and where they had pinned maps.
fn sweep() {
    for name in left_in(Path::new("/run/netns")) {
        quiet(&["ip", "netns", "del", &name]);
    }
    let temporary = std::env::temp_dir();
    for name in left_in(&temporary) {
        let pins = temporary.join(name);
        quiet(&["umount", &pins.display().to_string()]);
        // Not empty: then it is nothing of ours.
        let _ = std::fs::remove_dir(pins);
    }
}

/// Names of ours whose process is gone.
fn left_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| {
            let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect();
            let pid: String = name.strip_prefix("tlg").map(digits).unwrap_or_default();
            !pid.is_empty() && !Path::new("/proc").join(pid).exists()
        })
        .collect()
}

pub fn quiet(command: &[&str]) -> bool {
    let mut run = Command::new(command[0]);
    run.args(&command[1..]).stdout(Stdio::null()).stderr(Stdio::null());
    run.status().is_ok_and(|status| status.success())
}

pub fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().expect("a shell");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Three namespaces.
pub struct Lab {
    prefix: String,
    topology: Topology,
}

impl Lab {
    pub fn new(topology: Topology) -> Lab {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let lab = Lab { prefix: format!("tlg{}x{nth}", std::process::id()), topology };
        let (guest, host, client) = (lab.guest(), lab.host(), lab.client());
        // The guest's IPv6 stays silent until a test asks for it: what it sends by itself
        // (multicast listener reports) would be counted.
        run(&format!(
            "ip netns add {guest}; ip netns add {host}; ip netns add {client}
             ip netns exec {guest} sysctl -qw net.ipv6.conf.all.disable_ipv6=1
             ip -n {host} link add {INTERFACE} type veth peer name g0 netns {guest}
             ip -n {host} link add ch0 type veth peer name c0 netns {client}
             ip -n {guest} link set lo up; ip -n {guest} link set g0 up
             ip -n {client} link set lo up; ip -n {client} link set c0 up
             ip -n {host} link set {INTERFACE} up; ip -n {host} link set ch0 up
             ip -n {guest} addr add 10.71.0.2/24 dev g0"
        ));
        match topology {
            Topology::Routed => run(&format!(
                "ip -n {host} addr add 10.71.0.1/24 dev {INTERFACE}
                 ip -n {host} addr add 10.72.0.1/24 dev ch0
                 ip -n {host} -6 addr add fd71::1/64 dev {INTERFACE} nodad
                 ip -n {host} -6 addr add fd72::1/64 dev ch0 nodad
                 ip -n {client} addr add 10.72.0.2/24 dev c0
                 ip -n {client} -6 addr add fd72::2/64 dev c0 nodad
                 ip -n {guest} route add default via 10.71.0.1
                 ip -n {client} route add default via 10.72.0.1
                 ip -n {client} -6 route add default via fd72::1
                 ip netns exec {host} sysctl -qw net.ipv4.ip_forward=1 \
                     net.ipv6.conf.all.forwarding=1"
            )),
            Topology::Bridged => run(&format!(
                "ip -n {host} link add br0 type bridge
                 ip -n {host} link set {INTERFACE} master br0; ip -n {host} link set ch0 master br0
                 ip -n {host} link set br0 up
                 ip -n {host} addr add 10.71.0.1/24 dev br0
                 ip -n {host} -6 addr add fd71::1/64 dev br0 nodad
                 ip -n {client} addr add 10.71.0.3/24 dev c0
                 ip -n {client} -6 addr add fd71::3/64 dev c0 nodad
                 ip netns exec {host} sysctl -qw net.bridge.bridge-nf-call-iptables=1 \
                     net.bridge.bridge-nf-call-ip6tables=1"
            )),
        };
        lab
    }

    /// Gives the guest its IPv6 address.
    pub fn guest_speaks_ipv6(&self) {
        let guest = self.guest();
        run(&format!(
            "ip netns exec {guest} sysctl -qw net.ipv6.conf.all.disable_ipv6=0
             ip -n {guest} -6 addr add fd71::2/64 dev g0 nodad"
        ));
        if self.topology == Topology::Routed {
            run(&format!("ip -n {guest} -6 route add default via fd71::1"));
        }
    }

    pub fn guest(&self) -> String {
        format!("{}-g", self.prefix)
    }

    pub fn host(&self) -> String {
        format!("{}-h", self.prefix)
    }

    pub fn client(&self) -> String {
        format!("{}-c", self.prefix)
    }

    pub fn topology(&self) -> Topology {
        self.topology
    }

    pub fn client_ip(&self) -> &'static str {
        match self.topology {
            Topology::Routed => "10.72.0.2",
            Topology::Bridged => "10.71.0.3",
        }
    }

    pub fn client_ip6(&self) -> &'static str {
        match self.topology {
            Topology::Routed => "fd72::2",
            Topology::Bridged => "fd71::3",
        }
    }

    /// Runs a shell command in the host's namespace.
    pub fn on_host(&self, command: &str) -> String {
        let host = self.host();
        in_namespace(&host, || run(command))
    }

    /// How many packets came to the rules that queue. `nft` also shows those of iptables-nft.
    pub fn came_to_queue_rules(&self) -> u64 {
        let listed = self.on_host("nft list ruleset");
        let queueing = listed.lines().filter(|line| line.contains(" queue "));
        queueing
            .filter_map(|line| line.split_once("counter packets ")?.1.split(' ').next())
            .map(|packets| packets.parse::<u64>().expect("a count"))
            .sum()
    }

    /// Sends the marker to the client from the host, past the gate.
    pub fn send_marker(&self, port: u16) {
        let socket = udp(&self.host(), "0.0.0.0:0");
        socket.send_to(MARKER, (self.client_ip(), port)).expect("the host reaches the client");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in [self.guest(), self.host(), self.client()] {
            quiet(&["ip", "netns", "del", &name]);
        }
    }
}

/// Runs something in a namespace; what it opens or starts stays there.
pub fn in_namespace<T: Send>(name: &str, what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let namespace = File::open(format!("/run/netns/{name}")).expect("a namespace");
            // SAFETY: the descriptor is open; only this thread changes its namespace.
            let result = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(result, 0, "setns: {}", std::io::Error::last_os_error());
            what()
        });
        match thread.join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// A UDP socket in a namespace.
pub fn udp(namespace: &str, address: &str) -> UdpSocket {
    let socket = in_namespace(namespace, || UdpSocket::bind(address)).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
}

/// An MPTCP socket in a namespace, if the kernel has that.
pub fn mptcp(namespace: &str) -> Option<OwnedFd> {
    in_namespace(namespace, || {
        // SAFETY: socket takes no memory.
        let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
        // SAFETY: the call has just made it, and nobody else has it.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    })
}

/// Gives a socket its address, and lets it listen.
pub fn bind(socket: &OwnedFd, ip: [u8; 4], port: u16) {
    let (address, len) = socket_address(ip, port);
    // SAFETY: the descriptor is open, and the address is as long as is said.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
    // SAFETY: the descriptor is open.
    let listens = bound == 0 && unsafe { libc::listen(socket.as_raw_fd(), 1) } == 0;
    assert!(listens, "{}", std::io::Error::last_os_error());
}

pub fn connect(socket: &OwnedFd, ip: [u8; 4], port: u16) {
    let (address, len) = socket_address(ip, port);
    // SAFETY: the descriptor is open, and the address is as long as is said.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
    assert_eq!(connected, 0, "{}", std::io::Error::last_os_error());
}

fn socket_address(ip: [u8; 4], port: u16) -> (libc::sockaddr_in, libc::socklen_t) {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip) },
        sin_zero: [0; 8],
    };
    (address, size_of::<libc::sockaddr_in>() as libc::socklen_t)
}

/// The next datagram.
pub fn next(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = [0; 8192];
    loop {
        match socket.recv(&mut buffer) {
            Ok(len) => return buffer[..len].to_vec(),
            // A wait with a time limit is not taken up again by itself.
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => panic!("no datagram: {e}"),
        }
    }
}

/// Nothing has come so far.
pub fn nothing_came(socket: &UdpSocket) {
    socket.set_nonblocking(true).expect("a socket");
    let mut buffer = [0; 2048];
    match socket.recv(&mut buffer) {
        Err(e) if e.kind() == ErrorKind::WouldBlock => {}
        other => panic!("{other:?} came: {:?}", &buffer[..16]),
    }
    socket.set_nonblocking(false).expect("a socket");
}
