//! A WAN between two network namespaces, for kernels that are built without `sch_netem`.
//!
//! A TAP device in each namespace is one end of a cable. Frames that enter at one end leave at the
//! other after a delay, with the jitter, rate, loss and duplication that were asked for. It works on
//! Ethernet frames, so IPv4, IPv6, ARP and neighbour discovery pass alike, and it takes 64 KiB
//! segmentation-offload frames whole, so that one flow can fill several Gb/s.
//!
//! Invariant: what a direction does with a frame depends only on its parameters, its seed and the
//! times at which frames came in ([`line::Line`] does no I/O and reads no clock).

pub mod control;
pub mod line;
pub mod pump;
pub mod sys;
