//! The backup site.
//!
//! | module | what it is for |
//! |---|---|
//! | [`storage`] | what is needed of a file system; files, and a disk in memory that crashes |
//! | [`journal`] | records and notes in segment files, durable before they are acknowledged |
#![forbid(unsafe_code)]

pub mod journal;
pub mod storage;
