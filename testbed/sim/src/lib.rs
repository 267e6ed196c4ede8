//! The seeded simulator.
//!
//! It runs production's state machines, single-threaded, on simulated time, disks, network and
//! guests, breaks everything that can break, and checks the rules of DESIGN 3 after every step. A
//! failing seed is the bug report: the same seed gives the same run.
//!
//! | production's | simulated |
//! |---|---|
//! | the owner loop with sequencer, copies, activity log and backlog on disk, the NBD tap, the driver around them | the ring, the local disks, the guest and its NBD client |
//! | the link of a host, with its members and senders | connections: delay, partitions, cuts at any byte, damage |
//! | the loop of a group on a host: mode, policy, planned switch | what is on record of it |
//! | the gate's release queue, its state and lease, P | the kernel's queue, the gate's thread |
//! | tags, encoded and decoded | the network between members, what kernel programs do with tags |
//! | the loop of a group at the backup, with journal, attachment, fold, views and recovery | its disk (live and durable kept apart), the threads and sockets of its server |
//!
//! | module | what it is for |
//! |---|---|
//! | [`scenario`] | what a seed is made of |
//! | [`world`] | everything, and the loop |
//! | [`host`], [`owner`], [`sequencing`], `ring`, [`local`], [`logging`], `tap`, `nbd`, [`link`], [`gate`], [`beating`], `contact`, [`spilling`], [`verifying`] | the daemon |
//! | `around` | a host, as the loop of one of its groups sees it |
//! | [`backup`], `group_driver`, [`told`], [`server`] | the backup server |
//! | [`guest`], [`disk`], [`files`], [`net`], [`lan`], [`frames`] | what is simulated |
//! | [`programs`] | the kernel programs on the interfaces of members |
//! | [`faults`], `lying`, `lying_clients`, [`change`], `growing`, `homing`, [`narrow`] | what goes wrong, what the operator does, and links that carry about as much as guests write |
//! | [`oracle`], [`probe`], [`past`], `rot`, `repairing`, `status`, `host_status`, `travelling`, `snapshots`, [`failure`] | the checkers |
//! | [`plant`] | bugs that the checkers must catch |
//! | [`run`] | one seed from beginning to end |

#![forbid(unsafe_code)]

pub mod around;
pub mod backup;
pub mod beating;
pub mod change;
mod contact;
pub mod counts;
pub mod degrade;
pub mod disk;
mod ending;
pub mod failure;
pub mod faults;
pub mod files;
pub mod frames;
pub mod gate;
pub(crate) mod group_driver;
mod growing;
pub mod guest;
pub mod hearsay;
mod homing;
pub mod host;
mod host_status;
pub mod lan;
pub mod link;
pub mod local;
pub mod logging;
mod lying;
mod lying_clients;
mod marks;
pub mod narrow;
mod nbd;
pub mod net;
mod operators;
pub mod oracle;
pub mod owner;
pub mod past;
pub mod plant;
pub mod probe;
pub mod programs;
mod repairing;
mod ring;
pub mod rng;
mod rot;
pub mod run;
pub mod scenario;
pub mod schedule;
pub mod sequencing;
pub mod server;
mod shards;
mod snapshots;
pub mod spilling;
mod status;
pub mod switching;
mod tap;
pub mod told;
pub mod trace;
mod travelling;
pub mod verifying;
pub mod world;

pub use run::{Options, Outcome, run};
