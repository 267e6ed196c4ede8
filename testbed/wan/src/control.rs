//! The control socket: one JSON object on a line in, one out.
//!
//! `{"set": {"delay_ms": 25}, "direction": "both"}` changes what is named and keeps the rest;
//! `{"stats": true}` reports. A request that is wrong is answered with `{"error": ...}` and changes nothing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::line::Params;
use crate::pump::Handle;

/// The longest request that is read.
const REQUEST_BYTES_MAX: u64 = 64 << 10;

/// Which way: frames that enter at the left end, at the right end, or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Both directions.
    #[default]
    Both,
    /// What enters at the left end.
    LeftToRight,
    /// What enters at the right end.
    RightToLeft,
}

/// A request on the control socket.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Parameters to change, by name.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub set: Map<String, Value>,
    /// Which direction `set` is for.
    pub direction: Direction,
    /// Whether to report parameters and counters.
    pub stats: bool,
}

/// The two directions, as the control socket reaches them.
pub struct Controls {
    /// What enters at the left end.
    pub left_to_right: Handle,
    /// What enters at the right end.
    pub right_to_left: Handle,
}

/// Answers connections one after another, until the listener fails.
pub fn serve(listener: &UnixListener, controls: &mut Controls) -> io::Result<()> {
    for stream in listener.incoming() {
        // What goes wrong with one asker is no matter of the others.
        let _ = serve_one(&stream?, controls);
    }
    Ok(())
}

fn serve_one(stream: &UnixStream, controls: &mut Controls) -> io::Result<()> {
    let mut lines = BufReader::new(stream.take(REQUEST_BYTES_MAX));
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        let answer = match answer(&line, controls) {
            Ok(answer) => answer,
            Err(error) => json!({ "error": error }),
        };
        writeln!(&mut &*stream, "{answer}")?;
        line.clear();
        lines.get_mut().set_limit(REQUEST_BYTES_MAX);
    }
    Ok(())
}

fn answer(line: &str, controls: &mut Controls) -> Result<Value, String> {
    let request: Request = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let (left, left_counters) =
        controls.left_to_right.report().map_err(|error| error.to_string())?;
    let (right, right_counters) =
        controls.right_to_left.report().map_err(|error| error.to_string())?;
    if !request.set.is_empty() {
        // Both are checked before either changes.
        let (new_left, new_right) = (
            merge(left, &request, Direction::LeftToRight)?,
            merge(right, &request, Direction::RightToLeft)?,
        );
        controls.left_to_right.set(new_left).map_err(|error| error.to_string())?;
        controls.right_to_left.set(new_right).map_err(|error| error.to_string())?;
    }
    if request.stats {
        return Ok(json!({
            "left_to_right": { "params": left, "counters": left_counters },
            "right_to_left": { "params": right, "counters": right_counters },
        }));
    }
    Ok(json!({ "ok": true }))
}

fn merge(params: Params, request: &Request, direction: Direction) -> Result<Params, String> {
    if request.direction != Direction::Both && request.direction != direction {
        return Ok(params);
    }
    let mut fields = serde_json::to_value(params).map_err(|error| error.to_string())?;
    if let Value::Object(fields) = &mut fields {
        fields.extend(request.set.clone());
    }
    let params: Params = serde_json::from_value(fields).map_err(|error| error.to_string())?;
    params.check()?;
    Ok(params)
}

/// Sends one request and returns the answer.
pub fn ask(stream: &UnixStream, request: &Request) -> io::Result<Value> {
    writeln!(&mut &*stream, "{}", serde_json::to_string(request)?)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Request {
        serde_json::from_str(text).expect("a request")
    }

    #[test]
    fn set_changes_what_it_names_in_its_direction_only() {
        let before = Params { delay_ms: 5.0, ..Params::default() };
        let set = request(r#"{"set": {"cut": true}, "direction": "left_to_right"}"#);
        let left = merge(before, &set, Direction::LeftToRight).expect("valid");
        assert_eq!(left, Params { cut: true, ..before });
        assert_eq!(merge(before, &set, Direction::RightToLeft), Ok(before));
    }

    #[test]
    fn unknown_names_and_bad_values_are_refused() {
        for text in
            [r#"{"set": {"dealy_ms": 3}}"#, r#"{"set": {"loss": 2}}"#, r#"{"set": {"cut": 1}}"#]
        {
            assert!(
                merge(Params::default(), &request(text), Direction::LeftToRight).is_err(),
                "{text}"
            );
        }
        assert!(serde_json::from_str::<Request>(r#"{"stat": true}"#).is_err());
    }
}
