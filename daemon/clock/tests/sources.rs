//! The drivers against servers of their kind: ones that answer, are silent, send garbage, go and come back.

use std::net::UdpSocket;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;
use tidelock_clock::driver::{Chronyd, Ptp4l, Source, SourceError, read_clocks};
use tidelock_clock::{NoSample, Servo};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

/// Response to a request: its head, with the data that a client without a master has.
fn response(request: &[u8]) -> Vec<u8> {
    let data = match u16::from_be_bytes([request[52], request[53]]) {
        0x2004 => 26,
        0xc004 => 14,
        0x2001 => 18,
        0x2002 => 32,
        0xc000 => 50,
        other => panic!("{other:#x} is asked for"),
    };
    let mut response = request.to_vec();
    response.resize(54 + data, 0);
    response[3] = 54 + data as u8;
    response[46] = 2;
    response[51] = 2 + data as u8;
    response
}

/// A `ptp4l` that answers so many looks, each with `answer`, and then is gone.
fn ptp4l(path: &Path, looks: usize, answer: fn(&[u8]) -> Vec<u8>) -> JoinHandle<()> {
    let socket = UnixDatagram::bind(path).expect("bind");
    let path = path.to_owned();
    std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        for _ in 0..looks * 5 {
            let (bytes, asker) = socket.recv_from(&mut buffer).expect("a request");
            let asker = asker.as_pathname().expect("an address to answer to");
            // An asker that has given up is gone.
            let _ = socket.send_to(&answer(&buffer[..bytes]), asker);
        }
        drop(socket);
        std::fs::remove_file(path).expect("remove");
    })
}

fn source(run: &TempDir) -> (Ptp4l, std::path::PathBuf) {
    let server = run.path().join("ptp4l");
    (Ptp4l::new(&server, run.path(), 0, 0).expect("a directory"), server)
}

fn entries(run: &TempDir) -> usize {
    std::fs::read_dir(run.path()).expect("read").count()
}

#[test]
fn a_ptp4l_is_found_whenever_it_runs() {
    let run = TempDir::new().expect("a directory");
    let (mut source, server) = source(&run);
    for _ in 0..3 {
        let gone = source.ask(LONG).expect_err("nobody is there");
        assert!(matches!(gone, SourceError::Io { what: "ask", .. }), "{gone}");
        let runs = ptp4l(&server, 2, response);
        for _ in 0..2 {
            let answer = source.ask(LONG).expect("an answer");
            assert_eq!(
                (answer.servo, answer.sample),
                (Servo::NoMaster, Err(NoSample::NotMeasured))
            );
        }
        runs.join().expect("the server ends well");
    }
    drop(source);
    assert_eq!(entries(&run), 0, "the source's own directory is gone");
}

#[test]
fn only_the_user_itself_can_answer() {
    use std::os::unix::fs::PermissionsExt;
    let run = TempDir::new().expect("a directory");
    let (_source, _) = source(&run);
    let entry = std::fs::read_dir(run.path()).expect("read").next().expect("its directory");
    let mode = entry.expect("its directory").metadata().expect("its mode").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_silent_ptp4l_is_asked_anew_and_never_waited_for() {
    let run = TempDir::new().expect("a directory");
    let (mut source, server) = source(&run);
    // A process that stands still: its queue fills.
    let stopped = UnixDatagram::bind(&server).expect("bind");
    for _ in 0..300 {
        let silent = source.ask(Duration::from_millis(1)).expect_err("silence");
        assert!(matches!(silent, SourceError::Timeout { .. }), "{silent}");
    }
    // Whoever goes on later and answers all of it finds nobody: no queue of ours makes it wait.
    let (mut buffer, mut answered) = ([0; 1500], 0);
    stopped.set_nonblocking(true).expect("set");
    while let Ok((bytes, asker)) = stopped.recv_from(&mut buffer) {
        let asker = asker.as_pathname().expect("an address").to_owned();
        answered += usize::from(stopped.send_to(&response(&buffer[..bytes]), asker).is_ok());
    }
    assert_eq!(answered, 0);
    drop(stopped);
    std::fs::remove_file(&server).expect("remove");
    let runs = ptp4l(&server, 1, response);
    source.ask(LONG).expect("an answer");
    runs.join().expect("the server ends well");
}

#[test]
fn garbage_of_a_ptp4l_ends_one_look_and_no_more() {
    let run = TempDir::new().expect("a directory");
    let (mut source, server) = source(&run);
    let garbage = ptp4l(&server, 1, |_| b"garbage".to_vec());
    let error = source.ask(LONG).expect_err("garbage");
    assert!(matches!(error, SourceError::Ptp(_)), "{error}");
    garbage.join().expect("the server ends well");
    let runs = ptp4l(&server, 1, response);
    source.ask(LONG).expect("an answer");
    runs.join().expect("the server ends well");
}

#[test]
fn a_chronyd_is_asked_over_udp() {
    let server = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let mut source = Chronyd::new(server.local_addr().expect("its address"));
    assert!(matches!(source.ask(SHORT), Err(SourceError::Timeout { .. })));
    let answers = std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        for _ in 0..3 {
            let (bytes, asker) = server.recv_from(&mut buffer).expect("a request");
            let mut reply = buffer[..bytes].to_vec();
            reply[1] = 2;
            reply[7] = 5;
            let sequence = std::mem::take(&mut reply[11]);
            // A reply to another question, and the right one.
            for sequence in [sequence.wrapping_sub(1), sequence] {
                reply[16..20].copy_from_slice(&[0, 0, 0, sequence]);
                let _ = server.send_to(&reply, asker);
            }
        }
    });
    for _ in 0..2 {
        let answer = source.ask(LONG).expect("an answer");
        assert_eq!(answer.servo, Servo::NoMaster);
    }
    answers.join().expect("the server ends well");
    assert!(matches!(source.ask(LONG), Err(SourceError::Io { .. })), "nobody is there");
}

#[test]
fn the_clocks_of_this_host_go_on() {
    let first = read_clocks();
    let second = read_clocks();
    assert!(second.raw_ns >= first.raw_ns + first.slop_ns);
    assert!(first.wall_ns > 0);
}
