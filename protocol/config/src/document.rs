//! From text to the root section: syntax first, meaning after.

use std::cell::RefCell;
use std::sync::Arc;

use toml::de::DeTable;

use crate::diagnostic::{Diagnostic, Diagnostics, Place, Source};
use crate::section::{Context, Section};

/// The largest configuration file that is looked at.
const FILE_MAX_BYTES: usize = 1 << 20;

/// Reads a configuration: `read_root` asks for what it knows and returns what it made of it, or
/// `None` after something it needs was missing or wrong (which the section has noted).
///
/// `file` is only a name for the diagnostics. A file that is not TOML at all gets its syntax
/// errors alone: what they hide is not guessed at.
///
/// # Panics
/// If `read_root` returns `None` although nothing is wrong.
pub fn read<T>(
    file: &str,
    text: &str,
    read_root: impl FnOnce(&mut Section<'_>) -> Option<T>,
) -> Result<T, Diagnostics> {
    let source = Arc::new(Source { file: file.to_owned(), text: text.to_owned() });
    let mut found = Diagnostics::new();
    if text.len() > FILE_MAX_BYTES {
        let what = format!("the file has {} bytes, more than {FILE_MAX_BYTES}", text.len());
        let start = Place::new(&source, 0..0);
        found.push(Diagnostic::new(&start, what, "a configuration file (is this one?)"));
        return Err(found);
    }
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let span = error.span().unwrap_or(0..0);
        let place = Place::new(&source, span.clone());
        let instead = syntax_hint(text, span.start, error.message());
        found.push(Diagnostic::new(&place, format!("not TOML: {}", error.message()), instead));
    }
    if !found.is_empty() {
        return Err(found);
    }
    let context = Context { source, found: RefCell::new(found) };
    let mut section = Section::root(&context, root.get_ref());
    let value = read_root(&mut section);
    section.end();
    let found = context.found.into_inner();
    match value {
        Some(value) => found.into_result(value),
        None => {
            assert!(!found.is_empty(), "a configuration was refused without a diagnostic");
            Err(found)
        }
    }
}

/// The usual slips, with the line as it should be.
fn syntax_hint(text: &str, at: usize, message: &str) -> String {
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
    let line = text[start..end].trim();
    if message.contains("duplicate") {
        return "each key once; for a second group, member or disk begin another [[...]]".into();
    }
    let bare = |value: &str| {
        !value.is_empty() && !value.contains(['"', '\'', '[', ']', '{', '}', '#', '='])
    };
    match line.split_once('=') {
        Some((key, value)) if bare(value.trim()) => {
            format!("{} = \"{}\"", key.trim(), value.trim())
        }
        None if line.starts_with('[') => "[section] or [[section]]".into(),
        None if line.contains(':') => {
            let (key, value) = line.split_once(':').unwrap_or((line, ""));
            format!("{} = \"{}\"", key.trim(), value.trim().trim_matches('"'))
        }
        _ => "key = \"text\", key = 1, key = true, [section] or [[section]]".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_syntax_errors_come_at_once_with_a_line_to_write() {
        let text = "[host]\nname = host-a\nlease = 10s\nname: \"b\"\n";
        let found = read("f.toml", text, |_| Some(())).unwrap_err();
        let lines: Vec<_> = found.iter().map(|d| d.place.line()).collect();
        assert!([2, 3, 4].iter().all(|line| lines.contains(line)), "{found}");
        let shown = found.to_string();
        assert!(shown.contains("write instead: name = \"host-a\""), "{shown}");
        assert!(shown.contains("write instead: lease = \"10s\""), "{shown}");
        assert!(shown.contains("write instead: name = \"b\""), "{shown}");
    }

    #[test]
    fn a_file_that_is_far_too_large_is_not_parsed() {
        let text = "x".repeat(FILE_MAX_BYTES + 1);
        assert_eq!(read("f", &text, |_| Some(())).unwrap_err().len(), 1);
    }

    #[test]
    fn any_bytes_are_only_diagnosed() {
        for text in
            ["\u{0}", "[[[", "a.b.c = [1,", "é = é", "\"", "a = \"\\u{110000}\"", "[a]\n[a]"]
        {
            let found = read("f", text, |_| Some(())).unwrap_err();
            assert!(!found.to_string().is_empty());
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_diagnosed(text in "[a-z\\[\\]=\".,#{}\\\\é\n\t 0-9-]{0,60}") {
            let read_root = |root: &mut Section<'_>| {
                root.or("a", 1u16);
                root.tables("b", |b| b.required::<String>("c", "c = \"x\"").map(drop));
                Some(())
            };
            if let Err(found) = read("f", &text, read_root) {
                proptest::prop_assert!(!found.to_string().is_empty());
            }
        }
    }
}
