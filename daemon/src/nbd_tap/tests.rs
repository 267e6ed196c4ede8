//! Handshakes of clients whose sockets are numbers. Their requests: `clients`.

mod clients;

use super::*;
use tidelock_daemon_core::owner::no_file::NoFile;
use tidelock_protocol::ids::DiskId;

/// Sockets on which nothing arrives.
#[derive(Debug, Default)]
struct Silent {
    hung_up: Vec<usize>,
    looks: usize,
}

impl Network for Silent {
    type Socket = usize;

    fn accept(&mut self, _: usize) {}
    fn receive(&mut self, _: ConnectionId, _: &usize, _: AlignedBuf, _: Range<usize>, _: bool) {}
    fn send(&mut self, _: ConnectionId, _: &usize, _: SendBufs) {}

    fn look_after(&mut self, _: Duration) {
        self.looks += 1;
    }

    fn has_hung_up(&self, _: &usize) -> bool {
        false
    }

    fn hang_up(&mut self, socket: usize) {
        self.hung_up.push(socket);
    }
}

/// A tap of two disks that takes requests.
fn tap(network: &mut Silent) -> NbdTap<usize, NoFile> {
    let disk = |id| {
        let spec = DiskSpec { id: DiskId(id), name: format!("disk{id}"), size_bytes: 1 << 20 };
        TapDisk::new(spec, NoFile::default(), 512, 1).unwrap()
    };
    let disks = vec![disk(0), disk(1)];
    let (pool, stats) = (BufPool::new(0), Arc::default());
    let mut tap = NbdTap::new("web".into(), disks, pool, Limits::OF_DISK, stats, MonoNanos(1));
    tap.set_taking(network, Taking::All);
    tap
}

#[test]
fn the_oldest_of_too_many_handshakes_of_a_disk_gives_way() {
    let mut network = Silent::default();
    let mut tap = tap(&mut network);
    tap.accepted(&mut network, 1, Ok(Some(100)));
    for socket in 0..HANDSHAKES_MAX {
        tap.accepted(&mut network, 0, Ok(Some(socket)));
    }
    assert!(network.hung_up.is_empty(), "{:?}", network.hung_up);
    tap.accepted(&mut network, 0, Ok(Some(HANDSHAKES_MAX)));
    tap.accepted(&mut network, 1, Ok(Some(101)));
    assert_eq!(network.hung_up, [0]);
}

#[test]
fn a_handshake_that_takes_too_long_is_ended() {
    let mut network = Silent::default();
    let mut tap = tap(&mut network);
    tap.accepted(&mut network, 0, Ok(Some(0)));
    tap.set_now(MonoNanos(2));
    tap.accepted(&mut network, 0, Ok(Some(1)));
    assert_eq!(network.looks, 1, "a single timer for all of them");
    for (after_ns, hung_up) in [(0, vec![]), (1, vec![0]), (2, vec![0, 1])] {
        tap.set_now(MonoNanos(1 + HANDSHAKE_MAX.as_nanos() as u64 + after_ns));
        let looks = network.looks;
        tap.look(&mut network);
        assert_eq!((network.hung_up.clone(), network.looks), (hung_up, looks + 1));
    }
    tap.look(&mut network);
    assert_eq!(network.looks, 4, "no handshake is left to look at");
}

#[test]
fn a_disk_knows_how_many_clients_may_have_it_open() {
    for connections in [1, 4] {
        let spec = DiskSpec { id: DiskId(0), name: "disk".into(), size_bytes: 1 << 20 };
        let disk = TapDisk::new(spec, NoFile::default(), 512, connections).unwrap();
        assert_eq!(disk.connections_max(), connections);
        assert!(disk.has_place());
        let features = disk.exports.as_slice()[0].features;
        assert_eq!(features.multi_conn, connections > 1, "a second one is asked for by this");
    }
}
