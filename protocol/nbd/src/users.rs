//! Clients that have an export open, on all connections together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many clients may have an export open at once. Two guests that do not know of each other
/// destroy a file system, so the usual number is one.
#[derive(Debug)]
pub struct Users {
    max: usize,
    open: AtomicUsize,
    refusal: String,
}

impl Users {
    /// Nobody yet. `refusal` is what a client hears that finds no place.
    pub fn new(max: usize, refusal: String) -> Arc<Self> {
        Arc::new(Self { max, open: AtomicUsize::new(0), refusal })
    }

    /// Clients that have it open.
    pub fn count(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// How many may.
    pub fn max(&self) -> usize {
        self.max
    }

    /// One more client, until the place is dropped. `None`: there is no place.
    pub fn enter(self: &Arc<Self>) -> Option<Place> {
        let next = |open| (open < self.max).then_some(open + 1);
        let entered = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        entered.is_ok().then(|| Place(Arc::clone(self)))
    }

    /// Why a client was refused, and what to do.
    pub fn refusal(&self) -> &str {
        &self.refusal
    }
}

/// A client's place; it is free again when this is dropped.
#[derive(Debug)]
pub struct Place(Arc<Users>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}
