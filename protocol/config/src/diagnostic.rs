//! Where something stands in a file, and what is wrong with it.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The text of one configuration file, shared by everything that points into it.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: String,
    pub(crate) text: String,
}

/// Where something stands in a configuration file.
#[derive(Clone, Debug)]
pub struct Place {
    source: Arc<Source>,
    span: Range<usize>,
}

impl Place {
    pub(crate) fn new(source: &Arc<Source>, span: Range<usize>) -> Self {
        let end = source.text.len();
        let start = floor_char_boundary(&source.text, span.start.min(end));
        let stop = floor_char_boundary(&source.text, span.end.clamp(start, end));
        Self { source: Arc::clone(source), span: start..stop.max(start) }
    }

    /// The file's name as it was given to [`read`](crate::read).
    #[must_use]
    pub fn file(&self) -> &str {
        &self.source.file
    }

    /// The line, from 1.
    #[must_use]
    pub fn line(&self) -> usize {
        self.before().matches('\n').count() + 1
    }

    /// The column in characters, from 1.
    #[must_use]
    pub fn column(&self) -> usize {
        self.before().chars().rev().take_while(|c| *c != '\n').count() + 1
    }

    fn before(&self) -> &str {
        &self.source.text[..self.span.start]
    }

    /// The line's text and the part of it that is meant, in characters.
    fn excerpt(&self) -> (&str, usize, usize) {
        let text = &self.source.text;
        let start = text[..self.span.start].rfind('\n').map_or(0, |newline| newline + 1);
        let end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let meant = &text[self.span.start..self.span.end.min(end).max(self.span.start)];
        (text[start..end].trim_end_matches('\r'), self.column() - 1, meant.chars().count().max(1))
    }
}

fn floor_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// `file:line:column`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file(), self.line(), self.column())
    }
}

/// A value and where it stands, so that a later check can point at it.
#[derive(Clone, Debug)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// Where it stands; where it would belong if it is a default.
    pub place: Place,
}

impl<T> Deref for Located<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Located<T> {
    /// The same place with another value.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Located<U> {
        Located { value: f(self.value), place: self.place }
    }
}

/// One thing that is wrong with a configuration file.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// Where.
    pub place: Place,
    /// What is wrong.
    pub what: String,
    /// What to write or do instead.
    pub instead: String,
}

impl Diagnostic {
    /// A diagnostic.
    pub fn new(place: &Place, what: impl Into<String>, instead: impl Into<String>) -> Self {
        Self { place: place.clone(), what: what.into(), instead: instead.into() }
    }
}

/// `file:line:column: what`, the line itself, and what to write instead.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, what, instead } = self;
        writeln!(f, "{place}: {what}")?;
        let (line, column, len) = place.excerpt();
        if !line.trim().is_empty() {
            // Tabs are kept so that the marks stand under what they mean.
            let indent: String =
                line.chars().take(column).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
            writeln!(f, "    {line}\n    {indent}{}", "^".repeat(len))?;
        }
        writeln!(f, "  write instead: {instead}")
    }
}

/// Everything that is wrong with a configuration, in the order of the file. Never empty when it
/// is returned as an error.
#[derive(Clone, Debug, Default)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostics {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One more.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        let at = |d: &Diagnostic| d.place.span.start;
        let index = self.0.partition_point(|d| at(d) <= at(&diagnostic));
        self.0.insert(index, diagnostic);
    }

    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Diagnostic> {
        self.0.iter()
    }

    /// The value, if nothing is wrong.
    pub fn into_result<T>(self, value: T) -> Result<T, Diagnostics> {
        if self.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|diagnostic| diagnostic.fmt(f))
    }
}

impl std::error::Error for Diagnostics {}
