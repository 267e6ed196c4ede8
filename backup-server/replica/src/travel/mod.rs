//! What an operator does with the past. Each module knows one thing, and none does I/O but the storage's.
//!
//! | module | what it is for |
//! |---|---|
//! | [`when`] | points in time as people write them |
//! | [`moment`] | points as they are told |
//! | [`disk`] | what can be read |
//! | [`scratch`] | a disk that is written to without changing what is below it |
//! | [`bisect`] | the search for the first bad instant |
//! | [`increment`] | what changed between two points, as a file |
//! | [`digest`] | digests of disks, block by block |
//! | [`copy`] | copies of disks: made, moved, several in one pass |
//! | [`snapshot`] | snapshots on record |
//! | [`making`] | snapshots that are made and moved |

pub mod bisect;
pub mod copy;
pub mod digest;
pub mod disk;
pub mod increment;
pub mod making;
pub mod moment;
pub mod scratch;
pub mod snapshot;
pub mod when;
