/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The TCP options that a pure acknowledgement may have: none of them carries anything of the guest's state but the clock
 * of its TCP and what it has received. Everything else, known or not, makes a segment one that waits: MPTCP ends a connection
 * in an option (DATA_FIN). END and NO-OPERATION (kinds 0 and 1) may be there, too; END only with zeros behind it.
 *
 * This is the only place that has the numbers: the kernel programs include it, and build.rs of netfilter/tagging makes Rust
 * of it. kind, length of the shortest, of the longest, and the step between lengths.
 */
ACK_OPTION(5, 10, 34, 8)	/* SACK (RFC 2018), one to four blocks */
ACK_OPTION(8, 10, 10, 1)	/* timestamps (RFC 7323) */
