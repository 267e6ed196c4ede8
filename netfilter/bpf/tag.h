/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the programs share with user space: src/layout.rs of netfilter/tagging says the same in Rust.
 */
#ifndef TIDELOCK_TAG_H
#define TIDELOCK_TAG_H

#define WRITERS_MAX 64
#define SEQ_OF_REMOVED (~0ull)	/* C's entry of a writer that was removed */
#define KEYS 4
#define ADDRESSES_MAX 4096
#define INTERFACES_MAX 4096
#define WAYS_MAX 16384

/* Fixed when the programs are loaded, so that the verifier sees what is left of them. */
struct config {
	__u64 hlc_ahead_max_ms;
	__u64 run;		/* whose programs these are */
	__u32 pass_mark;	/* random: others who write marks do not know it */
	__u32 mark_mask;	/* the bits that it is in */
	__u32 path_mtu;
	__u32 writers;		/* 0 in HLC form */
	__u32 is_hlc;
	__u32 path_strips_options;
	__u32 is_bridged;	/* frames of the guest come to others as they are */
	__u32 off;		/* no tag is written and none merged: for a demonstration */
	__u8 context;
	__u8 ipv4_option;
	__u8 ipv6_option;
	__u8 filling[5];
};

/*
 * P of one member. It is pinned: a daemon that starts again finds it. A large packet leaves little in a core's cache, so
 * what each one is judged by comes first, here and in C: for a group of few writers it is one line.
 */
struct pending {
	__u64 hlc;
	__u64 incomplete;	/* not 0: the guest may know what P does not name */
	__u64 run;		/* of the daemon that guards it: only programs of the same one raise it without a tag */
	__u64 entries[WRITERS_MAX];
};

/* C of the group and what goes with it. Written by user space alone. Times: CLOCK_BOOTTIME, ns. */
struct committed {
	__u64 open_until;	/* covered packets may leave until then; 0: shut */
	__u64 trusted_until;	/* C is recent enough to write and to read tags; 0: never heard */
	__u64 is_async;		/* everything may leave until open_until */
	__u64 watermark;
	__u64 entries[WRITERS_MAX];
	__u64 wall_minus_boot;	/* what turns CLOCK_BOOTTIME into the wall clock that is believed */
	__u64 key_in_use;	/* the place of the key that tags are sealed with */
	__u64 tag_keys[KEYS][2];	/* of SipHash, each in the place that its period has modulo KEYS; zeros: not known yet */
	__u64 reachable[WRITERS_MAX];	/* the greatest entry that a tag is believed of */
	__u64 rules_gone;	/* not 0: what would be left to the packet filter's rules is dropped */
};

/* How far user space has got with the packets that were sent to its queue. */
struct crossing {
	__u64 queued;		/* packets that were left to the queue */
	__u64 filling[7];
	__u64 decided;		/* the value of queued at which the queue was last seen empty */
	__u64 waiting;		/* packets wait in the queue */
};

/* From one of the member's addresses to one of another member: values of the map of ways. */
#define WAY_ELSEWHERE 1
#define WAY_HERE 2		/* that member is on this host */

enum counter {
	/* from the guest */
	TAGGED,
	MERGED_HERE,
	TAGGED_GSO_LOWERED,
	UNTAGGED_ACKS,
	UNTAGGED_COVERED,
	COVERED,
	LEFT_TO_QUEUE,
	GATED_NO_ROOM,
	GATED_FRAGMENT,
	GATED_MTU,
	GATED_PATH,
	GATED_UNREADABLE,
	GATED_REFUSED,
	GATED_UNTRUSTED,
	GATED_INCOMPLETE,
	DROPPED_GUESTS_OWN,
	DROPPED_UNJUDGED,
	DROPPED_NO_RULES,
	DROPPED_SHUT,
	MSS_LOWERED,
	UNTAGGED_FOR_A_DEMONSTRATION,
	/* to the guest */
	MERGED,
	STRIPPED_FOREIGN,
	DROPPED_MALFORMED,
	DROPPED_WRONG_WAY,
	DROPPED_UNREADABLE,
	DROPPED_AHEAD,
	DROPPED_UNTRUSTED,
	DROPPED_FAILED,
	COUNTERS
};

#endif
