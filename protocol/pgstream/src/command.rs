//! Commands of a replication client.

use crate::terms::SlotName;
use tidelock_wal::{Lsn, TimelineId};

/// A command that is understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    IdentifySystem,
    Show(String),
    TimelineHistory(TimelineId),
    ReadSlot(SlotName),
    CreateSlot(SlotName),
    Start { slot: Option<SlotName>, at: Lsn, timeline: Option<TimelineId> },
}

/// A command that is not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A command that PostgreSQL has and a standby never sends.
    NotOffered(&'static str),
    /// A text that is no command.
    Syntax,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// Letters, digits and the signs of positions and settings, as they stand.
    Word(String),
    Quoted(String),
    Sign(char),
}

const NOT_OFFERED: [&str; 6] = [
    "BASE_BACKUP",
    "UPLOAD_MANIFEST",
    "DROP_REPLICATION_SLOT",
    "ALTER_REPLICATION_SLOT",
    "SELECT",
    "BEGIN",
];

/// Reads a command.
pub(crate) fn parse(text: &str) -> Result<Command, Refused> {
    let mut tokens = tokens(text).ok_or(Refused::Syntax)?;
    if tokens.last() == Some(&Token::Sign(';')) {
        tokens.pop();
    }
    let mut words = Words(&tokens);
    let name = words.keyword().ok_or(Refused::Syntax)?;
    if let Some(name) = NOT_OFFERED.into_iter().find(|&other| other == name) {
        return Err(Refused::NotOffered(name));
    }
    let command = match name.as_str() {
        "IDENTIFY_SYSTEM" => Some(Command::IdentifySystem),
        "SHOW" => words.name().map(|name| Command::Show(name.to_ascii_lowercase())),
        "TIMELINE_HISTORY" => words.timeline().map(Command::TimelineHistory),
        "READ_REPLICATION_SLOT" => words.slot().map(Command::ReadSlot),
        "CREATE_REPLICATION_SLOT" => {
            let slot = words.slot().ok_or(Refused::Syntax)?;
            words.skip("TEMPORARY");
            if words.skip("LOGICAL") {
                return Err(Refused::NotOffered("logical replication"));
            }
            words.skip("PHYSICAL").then(|| words.skip_options()).map(|()| Command::CreateSlot(slot))
        }
        "START_REPLICATION" => {
            let slot =
                if words.skip("SLOT") { Some(words.slot().ok_or(Refused::Syntax)?) } else { None };
            if words.skip("LOGICAL") {
                return Err(Refused::NotOffered("logical replication"));
            }
            words.skip("PHYSICAL");
            let at = words.name().and_then(|name| name.parse().ok()).ok_or(Refused::Syntax)?;
            let timeline = if words.skip("TIMELINE") {
                Some(words.timeline().ok_or(Refused::Syntax)?)
            } else {
                None
            };
            Some(Command::Start { slot, at, timeline })
        }
        _ => None,
    };
    command.filter(|_| words.0.is_empty()).ok_or(Refused::Syntax)
}

/// Tokens that are left.
struct Words<'a>(&'a [Token]);

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<&'a Token> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn keyword(&mut self) -> Option<String> {
        match self.next()? {
            Token::Word(word) => Some(word.to_ascii_uppercase()),
            _ => None,
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        match self.next()? {
            Token::Word(name) | Token::Quoted(name) => Some(name),
            Token::Sign(_) => None,
        }
    }

    fn slot(&mut self) -> Option<SlotName> {
        match self.next()? {
            Token::Word(name) => name.to_ascii_lowercase().parse().ok(),
            Token::Quoted(name) => name.parse().ok(),
            Token::Sign(_) => None,
        }
    }

    fn timeline(&mut self) -> Option<TimelineId> {
        self.name()?.parse().ok().filter(|&id| id > 0).map(TimelineId)
    }

    /// Takes the next token if it is this word.
    fn skip(&mut self, word: &str) -> bool {
        let is_next =
            matches!(self.0.first(), Some(Token::Word(next)) if next.eq_ignore_ascii_case(word));
        if is_next {
            self.0 = &self.0[1..];
        }
        is_next
    }

    /// Takes `RESERVE_WAL`, or options in parentheses (from version 15 on). Everything is reserved anyway.
    fn skip_options(&mut self) {
        if self.0.first() == Some(&Token::Sign('(')) && self.0.last() == Some(&Token::Sign(')')) {
            self.0 = &[];
        } else {
            self.skip("RESERVE_WAL");
        }
    }
}

/// Cuts a command into tokens. `None` if something is in it that no command has.
fn tokens(text: &str) -> Option<Vec<Token>> {
    let mut tokens = vec![];
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '.');
        let end = match first {
            '"' | '\'' => {
                let end = rest[1..].find(first)? + 1;
                tokens.push(Token::Quoted(rest[1..end].into()));
                end + 1
            }
            '(' | ')' | ',' | ';' => {
                tokens.push(Token::Sign(first));
                1
            }
            c if is_word(c) => {
                let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                tokens.push(Token::Word(rest[..end].into()));
                end
            }
            _ => return None,
        };
        rest = rest[end..].trim_start();
    }
    Some(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(name: &str) -> SlotName {
        name.parse().unwrap()
    }

    #[test]
    fn commands_of_stock_clients_are_understood() {
        let start = |slot, timeline| Command::Start { slot, at: Lsn(0x300_0000), timeline };
        let some = Some(TimelineId(2));
        for (text, command) in [
            ("IDENTIFY_SYSTEM", Command::IdentifySystem),
            ("SHOW wal_segment_size", Command::Show("wal_segment_size".into())),
            ("TIMELINE_HISTORY 2", Command::TimelineHistory(TimelineId(2))),
            // The walreceivers of 14 and 15, and pg_receivewal.
            (
                "CREATE_REPLICATION_SLOT \"pg_walreceiver_7\" TEMPORARY PHYSICAL RESERVE_WAL",
                Command::CreateSlot(slot("pg_walreceiver_7")),
            ),
            (
                "CREATE_REPLICATION_SLOT \"a\" TEMPORARY PHYSICAL (RESERVE_WAL)",
                Command::CreateSlot(slot("a")),
            ),
            ("CREATE_REPLICATION_SLOT a PHYSICAL", Command::CreateSlot(slot("a"))),
            ("READ_REPLICATION_SLOT \"a\"", Command::ReadSlot(slot("a"))),
            ("START_REPLICATION SLOT \"a\" 0/3000000 TIMELINE 2", start(Some(slot("a")), some)),
            ("START_REPLICATION 0/3000000 TIMELINE 2", start(None, some)),
            ("start_replication slot A physical 0/3000000 ;", start(Some(slot("a")), None)),
        ] {
            assert_eq!(parse(text), Ok(command), "{text}");
        }
    }

    #[test]
    fn other_commands_are_refused_by_name() {
        for (text, name) in [
            ("BASE_BACKUP (LABEL 'x', PROGRESS)", "BASE_BACKUP"),
            ("DROP_REPLICATION_SLOT a WAIT", "DROP_REPLICATION_SLOT"),
            ("SELECT 1", "SELECT"),
            ("CREATE_REPLICATION_SLOT a LOGICAL test_decoding", "logical replication"),
            ("START_REPLICATION SLOT a LOGICAL 0/0 (a 'b')", "logical replication"),
        ] {
            assert_eq!(parse(text), Err(Refused::NotOffered(name)), "{text}");
        }
        for text in [
            "",
            ";",
            "IDENTIFY_SYSTEM 1",
            "TIMELINE_HISTORY 0",
            "TIMELINE_HISTORY -1",
            "START_REPLICATION",
            "START_REPLICATION SLOT",
            "START_REPLICATION 0",
            "START_REPLICATION 0/1 TIMELINE",
            "START_REPLICATION SLOT \"A b\" 0/1",
            "START_REPLICATION SLOT \"a 0/1",
            "CREATE_REPLICATION_SLOT a",
            "SHOW \u{e4}",
            "\u{1f600}",
        ] {
            assert_eq!(parse(text), Err(Refused::Syntax), "{text}");
        }
    }
}
