//! The client of plain queries against a server that is played by hand.

mod common;

use common::*;
use std::time::Duration;
use tidelock_pgstream::limits::ANSWER_ROWS_MAX;
use tidelock_pgstream::{Failure, Login, Phase, Row, SqlClient, SqlEvent, Timing};

fn client() -> SqlClient {
    let settings = [("synchronous_commit", "local")];
    SqlClient::new(login(None), "postgres", &settings, Timing::default(), now(0)).unwrap()
}

fn take(client: &mut SqlClient, bytes: &[u8]) -> Vec<SqlEvent> {
    client.received(bytes);
    std::iter::from_fn(|| client.poll()).collect()
}

/// A client that has logged in.
fn idle() -> SqlClient {
    let mut client = client();
    let hello = [authentication(0, &[]), message(b'K', &[0; 8]), ready()].concat();
    assert_eq!(take(&mut client, &hello), [SqlEvent::Ready]);
    client.output().clear();
    client
}

fn words(row: &[Option<&str>]) -> Row {
    row.iter().map(|word| word.map(str::to_owned)).collect()
}

#[test]
fn a_login_names_the_database_and_settings() {
    let mut client = client();
    let text = String::from_utf8_lossy(client.output()).into_owned();
    assert!(text.contains("database\0postgres\0") && text.contains("synchronous_commit\0local\0"));
    assert!(!text.contains("replication\0true"));
    assert!(client.query("SELECT 1").is_err(), "it is not let in yet");
    let zero = Login { user: "a\0b".into(), ..login(None) };
    assert!(SqlClient::new(zero, "postgres", &[], Timing::default(), now(0)).is_err());
}

#[test]
fn one_query_at_a_time_has_rows_or_a_refusal() {
    let mut client = idle();
    client.query("SELECT 1, NULL").unwrap();
    assert_eq!(&client.output().split()[5..], b"SELECT 1, NULL\0");
    assert!(client.query("SELECT 2").is_err());
    let rows = [row(&[Some("1"), None]), row(&[Some("a"), Some("b")])].concat();
    let answer = [rows, complete(), ready()].concat();
    let (first, second) = (words(&[Some("1"), None]), words(&[Some("a"), Some("b")]));
    let half = answer.len() / 2;
    assert_eq!(take(&mut client, &answer[..half]), []);
    assert_eq!(take(&mut client, &answer[half..]), [SqlEvent::Rows(vec![first, second])]);

    client.query("SELECT x").unwrap();
    let refusal = [error("42703", "column"), ready()].concat();
    let events = take(&mut client, &refusal);
    assert!(matches!(&events[..], [SqlEvent::Refused(error)] if error.sqlstate == "42703"));
    client.query("SELECT 3").unwrap();
}

#[test]
fn ends_of_a_session_have_names() {
    let failed = |client: &mut SqlClient, bytes: &[u8]| match take(client, bytes).pop() {
        Some(SqlEvent::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    };
    let mut busy = idle();
    busy.query("SELECT 1").unwrap();
    assert_eq!(failed(&mut busy, &error("57P01", "shut down")), Failure::ServerEnded);
    assert_eq!(take(&mut busy, &ready()), [], "nothing comes behind a failure");
    let of_login = failed(&mut client(), &error("28000", "no entry in pg_hba.conf"));
    assert!(matches!(of_login, Failure::Server { phase: Phase::Login, .. }));
    assert!(matches!(failed(&mut client(), &error("28P01", "no")), Failure::PasswordWrong(_)));
    let unexpected = Failure::Unexpected { tag: 'T', phase: Phase::Idle };
    assert_eq!(failed(&mut idle(), &row(&[Some("1")])), unexpected);
    let mut endless = idle();
    endless.query("SELECT 1").unwrap();
    let rows = row(&[Some("1")]).repeat(ANSWER_ROWS_MAX + 1);
    assert!(matches!(failed(&mut endless, &rows), Failure::Malformed { tag: 'D', .. }));
    let mut closed = idle();
    closed.closed();
    assert_eq!(failed(&mut closed, &[]), Failure::Closed { phase: Phase::Idle });
}

#[test]
fn only_a_server_that_was_asked_is_silent() {
    let mut client = idle();
    client.tick(now(1000));
    assert_eq!((client.poll(), client.deadline()), (None, None));
    client.query("SELECT 1").unwrap();
    assert_eq!(client.deadline(), Some(Duration::from_secs(1060)));
    client.tick(now(1059));
    assert_eq!(client.poll(), None);
    client.tick(now(1060));
    let silent = Failure::Silent { seconds: 60 };
    assert_eq!(client.poll(), Some(SqlEvent::Failed(silent)));
}
