//! What a backup keeps of a group: the journal of its records, the images of its disks, and views of both together.
//! Nothing here knows whose records these are, or why they may be recovered.
//!
//! | module | what it is for |
//! |---|---|
//! | [`journal`] | records and notes in segment files, durable before they are acknowledged |
//! | [`image`] | what was folded of a disk, with checksums |
//! | [`fold`] | the journal's records go into disk images, outside the acknowledgement path |
//! | [`view`] | a disk with what is not folded yet |
//! | [`damage`] | what was acknowledged and cannot be read any more |
//! | [`extents`] | parts of disks, and what stands for them |
//! | [`window_log`] | a past for other stores, by key and value |
#![forbid(unsafe_code)]

pub mod damage;
pub mod extents;
pub mod fold;
pub mod image;
pub mod journal;
pub mod view;
pub mod window_log;

/// The version of all that is in a group's directory: the journal, the images and the small files beside them.
pub const FORMAT: u32 = 1;
