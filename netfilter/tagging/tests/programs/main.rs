//! The kernel programs against the Rust codec, by the kernel's own test facility: no interface,
//! no packet leaves.

mod believed;
mod case;
mod fragments;
mod frames;
mod ipv6;
mod member;
mod neighbours;
mod outside;
mod quotes;
mod random;
mod reference;
mod sending;
