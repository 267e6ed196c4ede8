// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tags in the packets between two members of a group (PipeCloud 4.2), on the host's side of a
 * member's interface. The bytes of a tag are described in protocol/src/tag.rs.
 *
 * from_guest (ingress of the interface)
 *   to a member:   tag, then pass. What cannot be tagged goes the way of a packet to the outside.
 *                  One on this host needs no tag: its P rises at once (neighbours.h). Nor does what
 *                  is covered: there is nothing that its receiver could come to depend on.
 *   to outside:    covered: pass. Not covered: left to the packet filter's rules, which queue it.
 * to_guest (egress)
 *   from a member: merge the tag into P, strip it.
 *   from outside:  strip it, never merge.
 *   in a quote:    the guest's own, of a packet that did not arrive: take it out (quotes.h).
 *
 * "Pass" is a value in some bits of the packet's mark. It is random, and the first rules that a packet meets look at it
 * and clear it: before connections are tracked, so that no rule can have saved or restored it. Covered
 * packets are judged by a program of its own (judge), which is reached through a map that user
 * space holds and does not pin: the kernel empties it when the process ends, however it ends, and
 * then nothing is covered any more. Tagging, merging and stripping go on.
 *
 * P is read after the packet was taken up: a late stamp is safe, an early one is not.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "tag.h"

#define NET ETH_HLEN
#define IPV4_MIN_BYTES 20
#define IPV4_MAX_BYTES 60
#define IPV6_BYTES 40
#define JUMBO_BYTES 8		/* the header that a jumbo option is in */
#define TCP_MIN_BYTES 20
#define TCP_OPTIONS_MAX_BYTES 40
#define UDP_BYTES 8
#define ETHERNET_PAYLOAD_MIN_BYTES 46
#define TOTAL_MAX_BYTES 65535
/* The longest extension header that a tag of 61 writers, or of any form, can be in. */
#define SUMMED_MAX_BYTES 264

#define FORM_VECTOR 0x11
#define FORM_HLC 0x12

#define FLAG_FIN 0x01
#define FLAG_SYN 0x02
#define FLAG_RST 0x04
#define FLAG_ACK 0x10
#define FLAG_URG 0x20

#define NEXT_HOP_BY_HOP 0
#define NEXT_ROUTING 43
#define NEXT_FRAGMENT 44
#define NEXT_AUTHENTICATION 51
#define NEXT_ICMPV6 58
#define NEXT_DESTINATION 60

/* Loose and strict source route: the packet goes elsewhere than its destination says. */
#define IPV4_COPIED 0x80	/* in the number of an option that every fragment has */
#define IPV4_LOOSE_ROUTE 131
#define IPV4_STRICT_ROUTE 137

/* The other number for experiments (RFC 4727) that is skipped by whoever does not know it. */
#define IPV6_SAYS_NOTHING 0x3e

#define MSS_KIND 2
#define MSS_BYTES 4
/* Below this a segment is all header. */
#define GSO_MIN_BYTES 256

#define EXTENSION_HEADERS_MAX 8
/* The longest extension header is 2048 bytes; none that is in use is longer than this. */
#define EXTENSION_MAX_BYTES 512
/* Each failed try means that somebody else has raised the entry in the nanoseconds before. */
#define RAISE_TRIES 16

const volatile struct config CONFIG SEC(".rodata.config");

struct pending_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pending);
} pending SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct committed);
} committed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct crossing);
} crossing SEC(".maps");

struct address {
	union {
		__u8 bytes[16];
		__u64 words[2];
	};
};

/* The other members', and whether that member is here (WAY_..). IPv4 addresses as IPv6 ones (::ffff:a.b.c.d). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ADDRESSES_MAX);
	__type(key, struct address);
	__type(value, __u32);
} peers SEC(".maps");

struct way {
	struct address source;
	struct address destination;
};

/* From the member's own addresses to the others': one look tells what two would. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, WAYS_MAX);
	__type(key, struct way);
	__type(value, __u32);
} ways SEC(".maps");

/* The interfaces of the group's members on this host, by their indices. The members share it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, INTERFACES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} interfaces SEC(".maps");

/* P of each member on this host, by each of its addresses. The group's members share it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, ADDRESSES_MAX);
	__type(key, struct address);
	__array(values, struct pending_map);
} neighbours SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} judges SEC(".maps");

enum style { IPV4_STYLE, IPV6_STYLE };

/* A walk through options: of an IPv4, TCP or IPv6 extension header. */
struct walk {
	__u32 at;
	__u32 end;
	__u32 style;
	__u32 wanted;
	__u32 blanks;		/* turn each one that is wanted into what says nothing */
	__u32 found;
	__u32 found_at;		/* the first one */
	__u32 found_bytes;
	__u32 routed;		/* by the sender, and so to somewhere else */
	__u32 bad;
	__u32 ended;
};

/* The extension headers of an IPv6 packet, and tags in any of them. */
struct extensions {
	__u32 at;		/* of the next header */
	__u32 end;
	__u32 next;
	__u32 found;
	__u32 found_at;
	__u32 found_bytes;
	__u32 routed;
	__u32 bad;
	__u32 fragment;
	__u32 later_fragment;
	__u32 blanks;
};

struct ipv4 {
	__u8 version_ihl;
	__u8 tos;
	__be16 total;
	__be16 id;
	__be16 fragment;
	__u8 ttl;
	__u8 protocol;
	__u16 check;
	__be32 source;
	__be32 destination;
};

struct ipv6 {
	__be32 version_class_flow;
	__be16 payload;
	__u8 next;
	__u8 hop_limit;
	struct address source;
	struct address destination;
};

struct icmp {
	__u8 type;
	__u8 code;
	__u16 check;
	union {
		__u8 bytes[4];
		__be32 all;
	} rest;
};

/* An ICMP error, and the header of what it quotes. */
union error {
	struct ipv4_error {
		struct icmp icmp;
		struct ipv4 quoted;
	} four;
	struct ipv6_error {
		struct icmp icmp;
		struct ipv6 quoted;
	} six;
};

/*
 * What a CPU has for itself: counters, what it has last looked up, and room to work in, which would be too large for the
 * stack. What loops leave here the verifier takes for any number, so that it looks at each loop once instead of in every
 * state that the loop can get into.
 */
struct cpu {
	__u64 counters[COUNTERS];	/* first: user space reads them */
	/* Packets come in trains. Addresses do not change while programs are there, so no answer gets old. */
	struct way last_way;
	struct address last_peer;
	__u32 last_way_kind;
	__u32 last_peer_kind;
	__u64 tick;		/* what `now` was read in */
	__u64 now;
	struct walk walk;
	struct extensions extensions;
	struct way way;		/* of the packet whose seal is judged */
	struct ipv4 header;	/* and the tag that follows it: one store writes both */
	__u8 tag[SUMMED_MAX_BYTES];
	__u8 new[IPV4_MAX_BYTES - IPV4_MIN_BYTES];
	__u8 blank[256];
	union error error;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu);
} cpus SEC(".maps");

struct tcp {
	__be16 source;
	__be16 destination;
	__be32 seq;
	__be32 ack;
	__u8 offset;
	__u8 flags;
	__be16 window;
	__u16 check;
	__be16 urgent;
};

static const __u32 zero;

#define ALWAYS static __attribute__((always_inline)) inline
/* What few packets need stays out of the way of the others: after a large packet all code is read from memory. */
#define APART static __attribute__((noinline))
/* Of the verifier each step is known; as many copies of the code as there may be writers are not needed. */
#define AS_A_LOOP _Pragma("clang loop unroll(disable)")

#define ENTRIES_BYTES (CONFIG.is_hlc ? 8 : 4 * CONFIG.writers)
/* Form and context before the entries, the seal behind them. */
#define SEAL_BYTES 8
#define BODY_BYTES (2 + ENTRIES_BYTES + SEAL_BYTES)
#define TAG4_BYTES (2 + BODY_BYTES)
#define TAG6_BYTES ((2 + 2 + BODY_BYTES + 7) & ~7u)

#define GROW_FLAGS BPF_F_ADJ_ROOM_NO_CSUM_RESET
#define FIXED_FLAGS (BPF_F_ADJ_ROOM_NO_CSUM_RESET | BPF_F_ADJ_ROOM_FIXED_GSO)

/*
 * What is to be done with a packet, and the counter of it (COUNTERS: none). It is done in one place (carry_out), so that
 * the code that finds it is short.
 */
enum action { DROP, GO_ON, PASS, GATE, LEAVE };
#define VERDICT(action, counter) ((action) << 8 | (counter))
#define ACTION(verdict) ((verdict) >> 8)
#define COUNTER(verdict) ((verdict) & 0xff)

ALWAYS void count(__u32 which)
{
	struct cpu *own = bpf_map_lookup_elem(&cpus, &zero);

	if (own && which < COUNTERS)
		own->counters[which] += 1;
}

ALWAYS int drop(__u32 why)
{
	return VERDICT(DROP, why);
}

ALWAYS int go_on(void)
{
	return VERDICT(GO_ON, COUNTERS);
}

ALWAYS int let_pass(__u32 why)
{
	return VERDICT(PASS, why);
}

/* The judge is asked, as for a packet to the outside. */
ALWAYS int gate(__u32 why)
{
	return VERDICT(GATE, why);
}

#define NOW_OR_LATER(p) (*(volatile typeof(p) *)&(p))

/* The packet goes on without the mark, so the rules will queue it, unless somebody has taken them away. */
ALWAYS int leave_to_queue(void)
{
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);

	if (!c || NOW_OR_LATER(c->rules_gone))
		return drop(DROPPED_NO_RULES);
	return VERDICT(LEAVE, LEFT_TO_QUEUE);
}

ALWAYS int carry_out(struct __sk_buff *skb, __u32 verdict)
{
	struct crossing *c;

	/* Else the compiler may work out the address of the mark beforehand, which the verifier refuses. */
	asm volatile("" : "+r"(skb));
	count(COUNTER(verdict));
	switch (ACTION(verdict)) {
	case DROP:
		return TC_ACT_SHOT;
	case PASS:
		skb->mark |= CONFIG.pass_mark;
		break;
	case LEAVE:
		c = bpf_map_lookup_elem(&crossing, &zero);
		if (c)
			__sync_fetch_and_add(&c->queued, 1);
	}
	/* Other filters may still have their say: TC_ACT_OK would end the classification. */
	return TC_ACT_UNSPEC;
}

/*
 * CLOCK_BOOTTIME as the first packet of this timer tick has found it: what goes by minutes need not read the clock for
 * each packet. A tick does pass between the last packet before a suspend and the first one after it: interfaces stop
 * before the clock does, and start after it. What the lease allows is not judged by this: ticks may be late.
 */
ALWAYS __u64 now_by_tick(struct cpu *s)
{
	__u64 tick = bpf_jiffies64();

	if (s->tick != tick) {
		s->tick = tick;
		s->now = bpf_ktime_get_boot_ns();
	}
	return s->now;
}

ALWAYS int is_trusted(const struct committed *c, __u64 now)
{
	const __u64 *key = c->tag_keys[NOW_OR_LATER(c->key_in_use) & (KEYS - 1)];

	return now < NOW_OR_LATER(c->trusted_until) && (NOW_OR_LATER(key[0]) | NOW_OR_LATER(key[1]));
}

/* Whether P names all that the guest may know. In mode async nothing waits for that: a tag that
 * says less than it should still says something to the receiver's records. */
ALWAYS int is_complete(const struct pending *p, const struct committed *c)
{
	return !NOW_OR_LATER(p->incomplete) || NOW_OR_LATER(c->is_async);
}

/* Whether a vector is at least as large as another one, in each writer's entry. */
ALWAYS int reaches(const __u64 *entries, const __u64 *wanted)
{
	__u32 i;

	AS_A_LOOP
	for (i = 0; i < WRITERS_MAX; i++) {
		if (i >= CONFIG.writers)
			break;
		if (NOW_OR_LATER(entries[i]) < NOW_OR_LATER(wanted[i]))
			return 0;
	}
	return 1;
}

/* Whether others will believe this P in a tag. */
ALWAYS int is_believable(const struct pending *p, const struct committed *c)
{
	__u64 entry;
	__u32 i;

	if (CONFIG.is_hlc)
		return 1;
	AS_A_LOOP
	for (i = 0; i < WRITERS_MAX; i++) {
		if (i >= CONFIG.writers)
			break;
		entry = NOW_OR_LATER(p->entries[i]);
		if (entry > NOW_OR_LATER(c->reachable[i]) && entry > NOW_OR_LATER(c->entries[i]))
			return 0;
	}
	return 1;
}

/* Whether this member's P is covered by C. Called after the packet was taken up. */
ALWAYS int is_covered(const struct pending *p, const struct committed *c)
{
	if (CONFIG.is_hlc)
		return NOW_OR_LATER(p->hlc) <= NOW_OR_LATER(c->watermark);
	return reaches(c->entries, p->entries);
}

/* Whether a packet to the outside may leave now. */
ALWAYS int may_leave(void)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct crossing *x = bpf_map_lookup_elem(&crossing, &zero);

	if (!p || !c || !x)
		return 0;
	if (bpf_ktime_get_boot_ns() >= NOW_OR_LATER(c->open_until))
		return 0;
	/* Nothing overtakes what waits. */
	if (NOW_OR_LATER(x->waiting) || NOW_OR_LATER(x->queued) != NOW_OR_LATER(x->decided))
		return 0;
	return is_complete(p, c) && (NOW_OR_LATER(c->is_async) || is_covered(p, c));
}

ALWAYS int is_open(void)
{
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);

	return c && bpf_ktime_get_boot_ns() < NOW_OR_LATER(c->open_until);
}

/* Reached by tail call, while a daemon holds it there. */
SEC("tc/ingress")
int judge(struct __sk_buff *skb)
{
	return carry_out(skb, may_leave() ? let_pass(COVERED) : leave_to_queue());
}

/* Copies from a packet: without a call where its bytes lie in one piece, as headers nearly always do. */
ALWAYS long load(struct __sk_buff *skb, __u32 at, void *to, __u32 bytes)
{
	const void *from = (void *)(long)skb->data + at;

	if (from + bytes > (void *)(long)skb->data_end)
		return bpf_skb_load_bytes(skb, at, to, bytes);
	__builtin_memcpy(to, from, bytes);
	return 0;
}

ALWAYS int is_same(const struct address *one, const struct address *other)
{
	return one->words[0] == other->words[0] && one->words[1] == other->words[1];
}

/* Whether another member has this address, and if so, whether it is here (WAY_..). */
ALWAYS __u32 peer_kind(struct cpu *s, const struct address *address)
{
	__u32 *found;

	if (!is_same(&s->last_peer, address)) {
		found = bpf_map_lookup_elem(&peers, address);
		s->last_peer_kind = found ? *found : 0;
		s->last_peer = *address;
	}
	return s->last_peer_kind;
}

/*
 * Whether a packet with a member's address can have come from it: from a member on this host by a member's interface, from
 * one on another host by none of those.
 */
ALWAYS int came_the_right_way(const struct __sk_buff *skb, __u32 kind)
{
	__u32 from = skb->ingress_ifindex;

	return (bpf_map_lookup_elem(&interfaces, &from) != 0) == (kind == WAY_HERE);
}

/* 0 if it leads out of the group, or if its receiver would not believe a tag: not from an address of this member. */
ALWAYS __u32 kind_of(struct cpu *s, const struct way *way)
{
	__u32 *found;

	if (!is_same(&s->last_way.destination, &way->destination) ||
	    !is_same(&s->last_way.source, &way->source)) {
		found = bpf_map_lookup_elem(&ways, way);
		s->last_way_kind = found ? *found : 0;
		s->last_way = *way;
	}
	return s->last_way_kind;
}

ALWAYS struct address from_ipv4(__be32 ipv4)
{
	struct address a = {};

	a.bytes[10] = 0xff;
	a.bytes[11] = 0xff;
	__builtin_memcpy(&a.bytes[12], &ipv4, 4);
	return a;
}

/* What every packet is judged by. They are there: only the verifier cannot know. */
ALWAYS int find_maps(struct pending **p, struct committed **c, struct cpu **s)
{
	*p = bpf_map_lookup_elem(&pending, &zero);
	*c = bpf_map_lookup_elem(&committed, &zero);
	*s = bpf_map_lookup_elem(&cpus, &zero);
	return *p && *c && *s;
}

/* One program text: each part stands on those above it. */
#include "options.h"
#include "write.h"
#include "neighbours.h"
#include "discovery.h"
#include "from_guest.h"
#include "quotes.h"
#include "to_guest.h"

char LICENSE[] SEC("license") = "GPL";
