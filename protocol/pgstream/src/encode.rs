//! Messages of a server.

use bytes::{BufMut, BytesMut};

/// Types of columns: number and length.
#[derive(Clone, Copy)]
pub(crate) enum Type {
    Text,
    Int8,
    Bytea,
}

impl Type {
    const fn facts(self) -> (u32, i16) {
        match self {
            Type::Text => (25, -1),
            Type::Int8 => (20, 8),
            Type::Bytea => (17, -1),
        }
    }
}

/// Severities of an error.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    Error,
    /// The connection ends.
    Fatal,
}

/// Writes a message whose body a function writes.
pub(crate) fn message(output: &mut BytesMut, tag: u8, body: impl FnOnce(&mut BytesMut)) {
    output.put_u8(tag);
    let begin = output.len();
    output.put_u32(0);
    body(output);
    // Bodies are bounded by what is served: a history file is the longest, and was a message itself.
    let length = u32::try_from(output.len() - begin).unwrap_or(u32::MAX);
    output[begin..begin + 4].copy_from_slice(&length.to_be_bytes());
}

pub(crate) fn text(output: &mut BytesMut, text: &str) {
    output.extend(text.bytes().filter(|&byte| byte != 0));
    output.put_u8(0);
}

pub(crate) fn authentication(output: &mut BytesMut, number: u32, data: &[u8]) {
    message(output, b'R', |output| {
        output.put_u32(number);
        output.put_slice(data);
    });
}

pub(crate) fn parameter(output: &mut BytesMut, name: &str, value: &str) {
    message(output, b'S', |output| {
        text(output, name);
        text(output, value);
    });
}

pub(crate) fn ready(output: &mut BytesMut) {
    message(output, b'Z', |output| output.put_u8(b'I'));
}

pub(crate) fn complete(output: &mut BytesMut, tag: &str) {
    message(output, b'C', |output| text(output, tag));
}

pub(crate) fn copy_both(output: &mut BytesMut) {
    // Format, and the number of columns.
    message(output, b'W', |output| output.put_slice(&[0, 0, 0]));
}

pub(crate) fn copy_done(output: &mut BytesMut) {
    message(output, b'c', |_| ());
}

/// Writes an answer of one row. Values in text form; `None` is NULL.
pub(crate) fn row(output: &mut BytesMut, columns: &[(&str, Type, Option<&[u8]>)]) {
    let count = u16::try_from(columns.len()).unwrap_or(0);
    message(output, b'T', |output| {
        output.put_u16(count);
        for (name, kind, _) in columns {
            let (number, length) = kind.facts();
            text(output, name);
            // No table, and no column of one.
            output.put_u32(0);
            output.put_i16(0);
            output.put_u32(number);
            output.put_i16(length);
            output.put_i32(-1);
            output.put_i16(0);
        }
    });
    message(output, b'D', |output| {
        output.put_u16(count);
        for (_, _, value) in columns {
            match value {
                None => output.put_i32(-1),
                Some(value) => {
                    output.put_u32(u32::try_from(value.len()).unwrap_or(0));
                    output.put_slice(value);
                }
            }
        }
    });
}

pub(crate) fn error(output: &mut BytesMut, severity: Severity, sqlstate: &str, words: &str) {
    let severity = if severity == Severity::Fatal { "FATAL" } else { "ERROR" };
    message(output, b'E', |output| {
        for (field, value) in [(b'S', severity), (b'V', severity), (b'C', sqlstate), (b'M', words)]
        {
            output.put_u8(field);
            text(output, value);
        }
        output.put_u8(0);
    });
}
