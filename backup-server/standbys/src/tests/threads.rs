use super::*;
use crate::{Standbys, socket_in};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use tidelock_storage::memory::MemoryFile;

/// A store whose thread is the test's, and its standbys.
struct Served {
    store: Store,
    standbys: Standbys<MemoryFile>,
    wakes: Receiver<()>,
    endings: Receiver<String>,
}

impl Served {
    fn new(connections_max: usize) -> Self {
        let (wake, wakes) = channel();
        let (end, endings) = channel();
        let standbys = Standbys::new(
            connections_max,
            move || {
                let _ = wake.send(());
            },
            move |_, _, event| {
                if let Event::Ended(failure) = event {
                    let _ = end.send(failure.kind().to_owned());
                }
            },
        );
        let store = Store::new();
        standbys.set_wal(SHARD, shard_wal(1, None));
        standbys.tend(&store.log);
        Self { store, standbys, wakes, endings }
    }
}

/// A standby that blocks.
struct Client {
    stream: UnixStream,
    heard: Heard,
}

impl Client {
    fn new(dir: &Path) -> Self {
        let mut stream = UnixStream::connect(socket_in(dir)).unwrap();
        stream.write_all(&startup()).unwrap();
        stream.write_all(&start(BEGIN, 1)).unwrap();
        Self { stream, heard: Heard::default() }
    }

    /// Reads until it has the log up to a position, while the store's thread answers. False: the connection has ended.
    fn read_to(&mut self, served: &Served, end: u64) -> bool {
        self.stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut bytes = [0; 4096];
        while self.heard.end() < end {
            while served.wakes.try_recv().is_ok() {
                served.standbys.tend(&served.store.log);
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(count) => self.heard.take(&bytes[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        true
    }
}

#[test]
fn several_standbys_are_served_at_once_and_one_that_does_not_read_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (all, view) = (dir.path().join("all"), dir.path().join("view"));
    let mut served = Served::new(4);
    let cut = BEGIN + 70_000;
    let listening = served.standbys.listen(SHARD, None, &all, None).unwrap();
    let at_cut = served.standbys.listen(SHARD, Some(Lsn(cut)), &view, None).unwrap();
    let deaf = Client::new(&all);
    let mut clients = [Client::new(&all), Client::new(&all)];
    let mut viewer = Client::new(&view);
    for _ in 0..40 {
        served.store.append(70_000);
        let end = served.store.end;
        served.store.allow(end);
        served.standbys.tend(&served.store.log);
        for client in &mut clients {
            assert!(client.read_to(&served, end));
            client.heard.check(BEGIN, end);
        }
    }
    assert!(viewer.read_to(&served, cut));
    assert_eq!(viewer.heard.end(), cut, "a view has its cut, however far apply-to has come");
    let crowded = UnixStream::connect(socket_in(&all)).unwrap();
    assert_eq!(served.endings.recv().unwrap(), "crowded");
    drop((deaf, crowded));
    drop(at_cut);
    assert!(!viewer.read_to(&served, cut + 1), "the view is withdrawn");
    viewer.heard.check(BEGIN, cut);
    drop(listening);
    for client in &mut clients {
        assert!(!client.read_to(&served, u64::MAX));
    }
    assert!(!all.exists());
}

#[test]
fn nothing_is_served_before_it_is_known_whose_log_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let standbys: Standbys<MemoryFile> = Standbys::new(4, || {}, |_, _, _| {});
    let _listening = standbys.listen(SHARD, None, &dir.path().join("s"), None).unwrap();
    let mut stream = UnixStream::connect(socket_in(&dir.path().join("s"))).unwrap();
    let _ = stream.write_all(&startup());
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    assert!(bytes.is_empty(), "{bytes:?}");
}
