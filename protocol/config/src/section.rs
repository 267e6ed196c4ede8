//! One table of the file: what is asked for is typed and checked, what is left over is an error.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use crate::diagnostic::{Diagnostic, Diagnostics, Located, Place, Source};
use crate::value::{FromToml, Value, Wrong};

/// How like a known key a misspelt one must be to be meant (Jaro-Winkler, 0 to 1).
const ALIKE_MIN: f64 = 0.82;

pub(crate) struct Context {
    pub(crate) source: Arc<Source>,
    pub(crate) found: RefCell<Diagnostics>,
}

/// One table of a configuration file.
///
/// Each key that is asked for becomes known. When the section ends, the keys that nobody asked
/// for are reported, so ask for all keys before deciding anything.
pub struct Section<'d> {
    context: &'d Context,
    table: &'d DeTable<'d>,
    /// As it stands in the file: `[host]`, `[[group.disk]]`; empty for the root.
    title: String,
    path: String,
    header: Range<usize>,
    known: Vec<&'static str>,
}

impl<'d> Section<'d> {
    pub(crate) fn root(context: &'d Context, table: &'d DeTable<'d>) -> Self {
        let (title, path) = (String::new(), String::new());
        Self { context, table, title, path, header: 0..0, known: Vec::new() }
    }

    /// Where the section's header stands.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place_of(self.header.clone())
    }

    /// Notes an error.
    pub fn fail(&self, place: &Place, what: impl Into<String>, instead: impl Into<String>) {
        self.context.found.borrow_mut().push(Diagnostic::new(place, what, instead));
    }

    /// Whether the section has this key. Does not make the key known.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.entry(key).is_some()
    }

    /// A key that may be missing. `None` also after a wrong value, which has been noted.
    pub fn optional<T: FromToml>(&mut self, key: &'static str) -> Option<Located<T>> {
        self.convert(key, T::wanted().as_ref(), |value| T::from_toml(value))
    }

    /// A key that must be there; `example` is a whole line.
    pub fn required<T: FromToml>(
        &mut self,
        key: &'static str,
        example: &str,
    ) -> Option<Located<T>> {
        if !self.has(key) {
            self.known.push(key);
            self.missing(key, example);
            return None;
        }
        self.optional(key)
    }

    /// A key with a default.
    pub fn or<T: FromToml>(&mut self, key: &'static str, default: T) -> Located<T> {
        let place = self.place();
        self.optional(key).unwrap_or(Located { value: default, place })
    }

    /// A key whose value is one of a few words. `None` if it is missing or wrong.
    pub fn choice<T: Clone>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Option<Located<T>> {
        let wanted = one_of(choices);
        self.convert(key, &wanted, |value| choose(value, choices))
    }

    /// A list of a few words. `None` if it is missing or wrong.
    pub fn choices<T: Clone>(
        &mut self,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Option<Located<Vec<T>>> {
        let wanted = format!("a list of {}", one_of(choices));
        self.convert(key, &wanted, |value| match value {
            Value::Array(items) => items.iter().map(|item| choose(item, choices)).collect(),
            other => Err(other.is_not(&wanted)),
        })
    }

    /// A subsection `[key]` that may be missing.
    pub fn optional_table<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Section<'_>) -> Option<T>,
    ) -> Option<T> {
        self.known.push(key);
        let (span, value) = self.entry(key)?;
        let DeValue::Table(table) = value else {
            let what = format!("`{key}` must be a section, not {}", Value::new(value).kind());
            let instead = format!("[{}] on a line of its own", self.child_path(key));
            self.fail(&self.place_of(span), what, instead);
            return None;
        };
        let title = format!("[{}]", self.child_path(key));
        self.child(key, title, table, span, read)
    }

    /// A subsection `[key]` that must be there.
    pub fn table<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Section<'_>) -> Option<T>,
    ) -> Option<T> {
        if !self.has(key) {
            self.known.push(key);
            let title = format!("[{}]", self.child_path(key));
            let what = format!("missing section {title}{}", self.inside());
            self.fail(&self.place(), what, format!("{title} and its keys"));
            return None;
        }
        self.optional_table(key, read)
    }

    /// All subsections `[[key]]`, in order. What was wrong in one leaves it out, noted.
    pub fn tables<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&mut Section<'_>) -> Option<T>,
    ) -> Vec<T> {
        self.known.push(key);
        let title = format!("[[{}]]", self.child_path(key));
        let Some((span, value)) = self.entry(key) else { return Vec::new() };
        let mut all = Vec::new();
        let wrong = |span: Range<usize>, value: &DeValue<'_>| {
            let what =
                format!("`{key}` must be a list of sections, not {}", Value::new(value).kind());
            self.fail(&self.place_of(span), what, format!("{title} on a line of its own"));
        };
        match value {
            DeValue::Array(items) => {
                for item in items.iter() {
                    match item.get_ref() {
                        DeValue::Table(table) => {
                            let title = title.clone();
                            all.extend(self.child(key, title, table, item.span(), &mut read));
                        }
                        other => wrong(item.span(), other),
                    }
                }
            }
            other => wrong(span, other),
        }
        all
    }

    /// Notes that a key is missing; `example` is a whole line.
    pub fn missing(&self, key: &str, example: &str) {
        self.fail(&self.place(), format!("missing key `{key}`{}", self.inside()), example);
    }

    /// Ends the section: what nobody asked for is an error.
    pub(crate) fn end(self) {
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if self.known.contains(&name) {
                continue;
            }
            let what = format!("unknown key `{name}`{}", self.inside());
            self.fail(&self.place_of(key.span()), what, self.did_you_mean(name));
        }
    }

    fn did_you_mean(&self, name: &str) -> String {
        let lower = name.to_lowercase().replace('-', "_");
        let alike = |known: &&str| strsim::jaro_winkler(&lower, known);
        let nearest = self.known.iter().map(|known| (alike(known), *known));
        match nearest.max_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((alike, known)) if alike >= ALIKE_MIN => known.to_owned(),
            _ if self.known.is_empty() => "nothing: remove it".into(),
            _ => {
                let mut known = self.known.clone();
                known.sort_unstable();
                known.dedup();
                format!("one of {}, or remove it", known.join(", "))
            }
        }
    }

    fn convert<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        make: impl FnOnce(&Value<'_>) -> Result<T, Wrong>,
    ) -> Option<Located<T>> {
        self.known.push(key);
        let (span, value) = self.entry(key)?;
        let place = self.place_of(span);
        match make(&Value::new(value)) {
            Ok(value) => Some(Located { value, place }),
            Err(Wrong { what, instead }) => {
                let instead = instead.unwrap_or_else(|| wanted.to_owned());
                self.fail(&place, format!("`{key}`{}: {what}", self.inside()), instead);
                None
            }
        }
    }

    fn child<T>(
        &self,
        key: &str,
        title: String,
        table: &'d DeTable<'d>,
        header: Range<usize>,
        read: impl FnOnce(&mut Section<'_>) -> Option<T>,
    ) -> Option<T> {
        let path = self.child_path(key);
        let mut section =
            Section { context: self.context, table, title, path, header, known: Vec::new() };
        let value = read(&mut section);
        section.end();
        value
    }

    fn entry(&self, key: &str) -> Option<(Range<usize>, &'d DeValue<'d>)> {
        let value = self.table.get(key)?;
        Some((value.span(), value.get_ref()))
    }

    fn child_path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn inside(&self) -> String {
        if self.title.is_empty() { String::new() } else { format!(" in {}", self.title) }
    }

    fn place_of(&self, span: Range<usize>) -> Place {
        Place::new(&self.context.source, span)
    }
}

fn one_of<T>(choices: &[(&str, T)]) -> String {
    let words: Vec<_> = choices.iter().map(|(word, _)| format!("\"{word}\"")).collect();
    words.join(" or ")
}

fn choose<T: Clone>(value: &Value<'_>, choices: &[(&str, T)]) -> Result<T, Wrong> {
    let Value::String(word) = value else { return Err(value.is_not("a string")) };
    let chosen = choices.iter().find(|(name, _)| name == word);
    chosen.map(|(_, choice)| choice.clone()).ok_or_else(|| Wrong {
        what: format!("\"{word}\" is none of the choices"),
        instead: Some(one_of(choices)),
    })
}
