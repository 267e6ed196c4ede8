//! Sessions byte by byte, as properties, and against real clients.

mod clients;
mod common;
mod negotiation;
mod replies;
mod requests;
mod stream;
