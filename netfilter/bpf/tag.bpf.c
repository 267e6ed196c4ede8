// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tags in the packets between two members of a group (PipeCloud 4.2), on the host's side of a
 * member's interface. The bytes of a tag are described in protocol/src/tag.rs.
 *
 * from_guest (ingress of the interface)
 *   to a member:   tag, then pass. What cannot be tagged goes the way of a packet to the outside.
 *   to outside:    covered: pass. Not covered: left to the packet filter's rules, which queue it.
 * to_guest (egress)
 *   from a member: merge the tag into P, strip it.
 *   from outside:  strip it, never merge.
 *
 * "Pass" is a bit of the packet's mark that the rules in front of the queue look at. Covered
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
#define TCP_MIN_BYTES 20
#define UDP_BYTES 8
#define ETHERNET_PAYLOAD_MIN_BYTES 46
#define TOTAL_MAX_BYTES 65535

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
#define IPV4_LOOSE_ROUTE 131
#define IPV4_STRICT_ROUTE 137

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

struct {
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
	__u8 bytes[16];
};

/* IPv4 addresses as IPv6 ones (::ffff:a.b.c.d). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ADDRESSES_MAX);
	__type(key, struct address);
	__type(value, __u32);
} addresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

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
	__u32 blanks;		/* turn each one that is wanted into filling */
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

/*
 * Too large for the stack; and what loops leave here the verifier takes for any number, so that
 * it looks at each loop once instead of in every state that the loop can get into.
 */
struct scratch {
	struct walk walk;
	struct extensions extensions;
	__u8 tag[264];
	__u8 old[IPV4_MAX_BYTES - IPV4_MIN_BYTES];
	__u8 blank[256];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratch SEC(".maps");

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

#define ENTRIES_BYTES (CONFIG.is_hlc ? 8 : 4 * CONFIG.writers)
/* Form and check. */
#define BODY_BYTES (2 + ENTRIES_BYTES)
#define TAG4_BYTES (2 + BODY_BYTES)
#define TAG6_BYTES ((2 + 2 + BODY_BYTES + 7) & ~7u)

#define GROW_FLAGS BPF_F_ADJ_ROOM_NO_CSUM_RESET
#define FIXED_FLAGS (BPF_F_ADJ_ROOM_NO_CSUM_RESET | BPF_F_ADJ_ROOM_FIXED_GSO)

ALWAYS void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);

	if (counter)
		*counter += 1;
}

ALWAYS int drop(__u32 why)
{
	count(why);
	return TC_ACT_SHOT;
}

/* Other filters may still have their say: TC_ACT_OK would end the classification. */
ALWAYS int go_on(void)
{
	return TC_ACT_UNSPEC;
}

ALWAYS int let_pass(struct __sk_buff *skb, __u32 why)
{
	skb->mark |= CONFIG.pass_mark;
	count(why);
	return go_on();
}

/* The packet goes on without the mark, so the rules will queue it. */
ALWAYS int leave_to_queue(void)
{
	struct crossing *c = bpf_map_lookup_elem(&crossing, &zero);

	if (c)
		__sync_fetch_and_add(&c->queued, 1);
	count(LEFT_TO_QUEUE);
	return go_on();
}

/* Returns only if nobody is there to judge. */
ALWAYS int ask_judge(struct __sk_buff *skb)
{
	bpf_tail_call(skb, &judges, 0);
	return leave_to_queue();
}

ALWAYS int gate(struct __sk_buff *skb, __u32 why)
{
	count(why);
	return ask_judge(skb);
}

#define NOW_OR_LATER(p) (*(volatile typeof(p) *)&(p))

ALWAYS int is_trusted(const struct committed *c)
{
	return bpf_ktime_get_boot_ns() < NOW_OR_LATER(c->trusted_until);
}

/* Whether this member's P is covered by C. Called after the packet was taken up. */
ALWAYS int is_covered(const struct pending *p, const struct committed *c)
{
	__u32 i;

	if (CONFIG.is_hlc)
		return NOW_OR_LATER(p->hlc) <= NOW_OR_LATER(c->watermark);
	for (i = 0; i < WRITERS_MAX; i++) {
		if (i >= CONFIG.writers)
			break;
		if (NOW_OR_LATER(p->entries[i]) > NOW_OR_LATER(c->entries[i]))
			return 0;
	}
	return 1;
}

/* Reached by tail call, while a daemon holds it there. */
SEC("tc")
int judge(struct __sk_buff *skb)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct crossing *x = bpf_map_lookup_elem(&crossing, &zero);

	if (!p || !c || !x)
		return leave_to_queue();
	if (bpf_ktime_get_boot_ns() >= NOW_OR_LATER(c->open_until))
		return leave_to_queue();
	/* Nothing overtakes what waits. */
	if (NOW_OR_LATER(x->waiting) || NOW_OR_LATER(x->queued) != NOW_OR_LATER(x->decided))
		return leave_to_queue();
	if (!NOW_OR_LATER(c->is_async) && !is_covered(p, c))
		return leave_to_queue();
	return let_pass(skb, COVERED);
}

ALWAYS __u32 whose(const struct address *address)
{
	__u32 *found = bpf_map_lookup_elem(&addresses, address);

	return found ? *found : 0;
}

ALWAYS struct address from_ipv4(__be32 ipv4)
{
	struct address a = {};

	a.bytes[10] = 0xff;
	a.bytes[11] = 0xff;
	__builtin_memcpy(&a.bytes[12], &ipv4, 4);
	return a;
}

/* ---- options ---- */

/* What the loops are told; a pointer to a packet cannot be kept in a map. */
struct subject {
	struct __sk_buff *skb;
};

static long walk_step(__u32 step, void *context)
{
	struct __sk_buff *skb = ((struct subject *)context)->skb;
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	__u8 head[2] = {};
	struct walk *w;
	__u32 size;

	if (!s)
		return 1;
	w = &s->walk;
	if (w->at >= w->end) {
		w->ended = 1;
		return 1;
	}
	if (bpf_skb_load_bytes(skb, w->at, head, 1))
		goto bad;
	if (head[0] == 0 || (w->style == IPV4_STYLE && head[0] == 1)) {
		if (w->style == IPV4_STYLE && head[0] == 0) {
			w->ended = 1;
			return 1;
		}
		w->at++;
		return 0;
	}
	if (w->at + 2 > w->end || bpf_skb_load_bytes(skb, w->at, head, 2))
		goto bad;
	size = head[1];
	if (w->style == IPV6_STYLE)
		size += 2;
	if (size < 2 || w->at + size > w->end)
		goto bad;
	if (w->style == IPV4_STYLE && (head[0] == IPV4_LOOSE_ROUTE || head[0] == IPV4_STRICT_ROUTE))
		w->routed = 1;
	if (head[0] == w->wanted) {
		if (!w->found) {
			w->found_at = w->at;
			w->found_bytes = size;
		}
		w->found++;
		if (w->blanks) {
			if (w->style == IPV6_STYLE) {
				/* PadN of the same length, of zeros. */
				head[0] = 1;
				if (bpf_skb_store_bytes(skb, w->at, head, 1, BPF_F_RECOMPUTE_CSUM))
					goto bad;
				__builtin_memset(s->blank, 0, sizeof(s->blank));
				size -= 2;
				if (size > 0 && size < sizeof(s->blank) &&
				    bpf_skb_store_bytes(skb, w->at + 2, s->blank, size,
							BPF_F_RECOMPUTE_CSUM))
					goto bad;
				size += 2;
			} else {
				__builtin_memset(s->blank, 1, sizeof(s->blank));
				if (size >= sizeof(s->blank) ||
				    bpf_skb_store_bytes(skb, w->at, s->blank, size,
							BPF_F_RECOMPUTE_CSUM))
					goto bad;
			}
		}
	}
	w->at += size;
	return 0;
bad:
	w->bad = 1;
	return 1;
}

ALWAYS void walk(struct __sk_buff *skb, struct walk *w, __u32 steps_max)
{
	struct subject subject = { skb };

	bpf_loop(steps_max, walk_step, &subject, 0);
	if (!w->ended && w->at < w->end)
		w->bad = 1;
}

ALWAYS void walk_ipv4(struct __sk_buff *skb, struct walk *w, __u32 header, __u32 blanks)
{
	__builtin_memset(w, 0, sizeof(*w));
	w->at = NET + IPV4_MIN_BYTES;
	w->end = NET + header;
	w->style = IPV4_STYLE;
	w->wanted = CONFIG.ipv4_option;
	w->blanks = blanks;
	walk(skb, w, IPV4_MAX_BYTES - IPV4_MIN_BYTES + 1);
}

static long extension_step(__u32 step, void *context)
{
	struct __sk_buff *skb = ((struct subject *)context)->skb;
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	struct extensions *e;
	struct walk *w;
	__u8 head[4];
	__u32 size;

	if (!s)
		return 1;
	e = &s->extensions;
	w = &s->walk;
	switch (e->next) {
	case NEXT_HOP_BY_HOP:
	case NEXT_DESTINATION:
	case NEXT_ROUTING:
	case NEXT_FRAGMENT:
	case NEXT_AUTHENTICATION:
		break;
	default:
		return 1;
	}
	if (e->later_fragment)
		return 1;
	if (e->at + 8 > e->end || bpf_skb_load_bytes(skb, e->at, head, 4))
		goto bad;
	if (e->next == NEXT_FRAGMENT) {
		size = 8;
		e->fragment = 1;
		e->later_fragment = (head[2] | (head[3] & 0xf8)) != 0;
	} else if (e->next == NEXT_AUTHENTICATION) {
		size = ((__u32)head[1] + 2) * 4;
	} else {
		size = ((__u32)head[1] + 1) * 8;
	}
	if (e->at + size > e->end)
		goto bad;
	if (e->next == NEXT_ROUTING)
		e->routed = 1;
	if (e->next == NEXT_HOP_BY_HOP || e->next == NEXT_DESTINATION) {
		if (size > EXTENSION_MAX_BYTES)
			goto bad;
		__builtin_memset(w, 0, sizeof(*w));
		w->at = e->at + 2;
		w->end = e->at + size;
		w->style = IPV6_STYLE;
		w->wanted = CONFIG.ipv6_option;
		w->blanks = e->blanks;
		walk(skb, w, EXTENSION_MAX_BYTES);
		if (w->bad)
			goto bad;
		if (w->found && !e->found) {
			e->found_at = w->found_at;
			e->found_bytes = w->found_bytes;
		}
		e->found += w->found;
	}
	e->next = head[0];
	e->at += size;
	return 0;
bad:
	e->bad = 1;
	return 1;
}

ALWAYS void walk_ipv6(struct __sk_buff *skb, struct extensions *e, const struct ipv6 *h,
		      __u32 blanks)
{
	struct subject subject = { skb };

	__builtin_memset(e, 0, sizeof(*e));
	e->at = NET + IPV6_BYTES;
	e->end = e->at + bpf_ntohs(h->payload);
	e->next = h->next;
	e->blanks = blanks;
	bpf_loop(EXTENSION_HEADERS_MAX, extension_step, &subject, 0);
	if (e->later_fragment)
		return;
	switch (e->next) {
	case NEXT_HOP_BY_HOP:
	case NEXT_DESTINATION:
	case NEXT_ROUTING:
	case NEXT_FRAGMENT:
	case NEXT_AUTHENTICATION:
		e->bad = 1;	/* more of them than anybody needs */
	}
}

/* ---- writing a tag ---- */

ALWAYS __u8 fold(__u32 x)
{
	x ^= x >> 16;
	x ^= x >> 8;
	return x;
}

/*
 * Form, check and entries at `body`: max(P, C), so that an entry is never so old that the
 * receiver would take its low bits for those of a newer one.
 */
ALWAYS void write_body(__u8 *body, const struct pending *p, const struct committed *c)
{
	__u32 i, low, all = 0;
	__u64 entry, covered;

	body[0] = CONFIG.is_hlc ? FORM_HLC : FORM_VECTOR;
	if (CONFIG.is_hlc) {
		entry = bpf_cpu_to_be64(NOW_OR_LATER(p->hlc));
		__builtin_memcpy(body + 2, &entry, 8);
		all = (__u32)entry ^ (__u32)(entry >> 32);
	} else {
		for (i = 0; i < WRITERS_MAX - 1; i++) {
			if (i >= CONFIG.writers)
				break;
			entry = NOW_OR_LATER(p->entries[i]);
			covered = NOW_OR_LATER(c->entries[i]);
			if (entry < covered)
				entry = covered;
			low = bpf_htonl((__u32)entry);
			__builtin_memcpy(body + 2 + 4 * i, &low, 4);
			all ^= low;
		}
	}
	body[1] = fold(all) ^ body[0] ^ CONFIG.context;
}

/*
 * Whether the segments of a GSO packet, or the packet itself, still fit into the path with `room`
 * more bytes. headers: network and transport header. Returns the flags for the helper, or a
 * negative value. A TCP segment may be made smaller, a datagram may not.
 */
ALWAYS __s64 room_flags(struct __sk_buff *skb, __u32 total, __u32 headers, __u32 room, int is_tcp,
			__u32 fragment, __u32 *why)
{
	__u32 segment;

	*why = GATED_NO_ROOM;
	if (total + room > TOTAL_MAX_BYTES)
		return -1;
	*why = fragment ? GATED_FRAGMENT : GATED_MTU;
	if (!skb->gso_size)
		return total + room > CONFIG.path_mtu ? -1 : (__s64)GROW_FLAGS;
	segment = headers + skb->gso_size + room;
	if (segment <= CONFIG.path_mtu)
		return FIXED_FLAGS;
	if (is_tcp && skb->gso_size > GSO_MIN_BYTES + room) {
		count(TAGGED_GSO_LOWERED);
		return GROW_FLAGS;
	}
	return -1;
}

/* The other side must leave room for the tag. `at`: the TCP header of a SYN. */
ALWAYS void lower_mss(struct __sk_buff *skb, struct walk *w, const struct tcp *tcp, __u32 at,
		      __u32 network_bytes, __u32 room)
{
	__u32 bytes = (tcp->offset >> 4) * 4, most = network_bytes + TCP_MIN_BYTES + room;
	__be16 old, new;

	if (bytes <= TCP_MIN_BYTES || CONFIG.path_mtu <= most)
		return;
	most = CONFIG.path_mtu - most;
	__builtin_memset(w, 0, sizeof(*w));
	w->at = at + TCP_MIN_BYTES;
	w->end = at + bytes;
	w->style = IPV4_STYLE;
	w->wanted = MSS_KIND;
	walk(skb, w, 41);
	if (w->bad || w->found != 1 || w->found_bytes != MSS_BYTES || ((w->found_at - at) & 1))
		return;
	if (bpf_skb_load_bytes(skb, w->found_at + 2, &old, 2) || bpf_ntohs(old) <= most)
		return;
	new = bpf_htons(most);
	if (bpf_l4_csum_replace(skb, at + 16, old, new, 2) ||
	    bpf_skb_store_bytes(skb, w->found_at + 2, &new, 2, BPF_F_RECOMPUTE_CSUM))
		return;
	count(MSS_LOWERED);
}

ALWAYS int is_pure_ack(const struct tcp *tcp, __u32 segment)
{
	return (tcp->offset >> 4) * 4 == segment && segment >= TCP_MIN_BYTES &&
	       (tcp->flags & FLAG_ACK) &&
	       !(tcp->flags & (FLAG_SYN | FLAG_FIN | FLAG_RST | FLAG_URG));
}

/* Bytes behind the end that the header names would travel without being looked at. */
ALWAYS int ends_where_it_says(const struct __sk_buff *skb, __u32 total)
{
	__u32 len = skb->len - NET;

	return total <= len &&
	       (len == total || (total < ETHERNET_PAYLOAD_MIN_BYTES && len <= ETHERNET_PAYLOAD_MIN_BYTES));
}

ALWAYS __u16 fold_checksum(__s64 sum)
{
	__u32 s = sum;

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

/* ---- from the guest ---- */

ALWAYS int ipv4_from_guest(struct __sk_buff *skb)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	__u32 header, total, headers, at, why, room = TAG4_BYTES;
	int is_tcp, later;
	struct address source, destination;
	struct ipv4 h, grown;
	struct tcp tcp = {};
	struct walk *w;
	__s64 flags, sum;

	if (!p || !c || !s)
		return drop(DROPPED_FAILED);
	w = &s->walk;
	if (bpf_skb_load_bytes(skb, NET, &h, sizeof(h)))
		return gate(skb, GATED_UNREADABLE);
	header = (h.version_ihl & 0x0f) * 4;
	total = bpf_ntohs(h.total);
	if (h.version_ihl >> 4 != 4 || header < IPV4_MIN_BYTES || total < header ||
	    !ends_where_it_says(skb, total))
		return gate(skb, GATED_UNREADABLE);
	if (header > IPV4_MIN_BYTES) {
		walk_ipv4(skb, w, header, 0);
		if (w->found)
			return drop(DROPPED_GUESTS_OWN);
		if (w->bad || w->routed)
			return gate(skb, GATED_UNREADABLE);
	}
	destination = from_ipv4(h.destination);
	if (whose(&destination) != ADDRESS_PEER)
		return ask_judge(skb);
	/* Its receiver would not believe the tag: not an address of this member. */
	source = from_ipv4(h.source);
	if (whose(&source) != ADDRESS_OWN)
		return ask_judge(skb);

	at = NET + header;
	later = (bpf_ntohs(h.fragment) & 0x1fff) != 0;
	is_tcp = h.protocol == IPPROTO_TCP && !later;
	headers = header + UDP_BYTES;
	if (is_tcp) {
		if (bpf_skb_load_bytes(skb, at, &tcp, sizeof(tcp)))
			return gate(skb, GATED_UNREADABLE);
		if (!(bpf_ntohs(h.fragment) & 0x3fff) && is_pure_ack(&tcp, total - header))
			return let_pass(skb, UNTAGGED_ACKS);
		headers = header + (tcp.offset >> 4) * 4;
		if ((tcp.flags & FLAG_SYN) && !CONFIG.off)
			lower_mss(skb, &s->walk, &tcp, at, IPV4_MIN_BYTES, room);
	}
	if (CONFIG.off)
		return let_pass(skb, UNTAGGED_FOR_A_DEMONSTRATION);
	if (CONFIG.path_strips_options)
		return gate(skb, GATED_PATH);
	if (header + room > IPV4_MAX_BYTES)
		return gate(skb, GATED_NO_ROOM);
	if (!is_trusted(c))
		return gate(skb, GATED_UNTRUSTED);
	flags = room_flags(skb, total, headers, room, is_tcp, bpf_ntohs(h.fragment) & 0x3fff, &why);
	if (flags < 0)
		return gate(skb, why);
	/* Opens the gap behind the first 20 bytes: ours comes before the guest's own options. */
	if (bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_NET, flags))
		return gate(skb, GATED_REFUSED);

	s->tag[0] = CONFIG.ipv4_option;
	s->tag[1] = room;
	write_body(s->tag + 2, p, c);
	grown = h;
	grown.version_ihl += room / 4;
	grown.total = bpf_htons(total + room);
	/* By what has changed: a header that was wrong stays wrong. */
	sum = bpf_csum_diff((__be32 *)&h, 4, (__be32 *)&grown, 4, (__u16)~h.check);
	sum = bpf_csum_diff(0, 0, (__be32 *)s->tag, room, sum);
	grown.check = fold_checksum(sum);
	if (bpf_skb_store_bytes(skb, NET, &grown, sizeof(grown), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, NET + IPV4_MIN_BYTES, s->tag, room, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return let_pass(skb, TAGGED);
}

ALWAYS int ipv6_from_guest(struct __sk_buff *skb)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	__u32 total, headers, why, room = TAG6_BYTES;
	struct extensions *e;
	struct tcp tcp = {};
	struct ipv6 h;
	__u8 icmp = 0;
	__s64 flags;
	int is_tcp;

	if (!p || !c || !s)
		return drop(DROPPED_FAILED);
	e = &s->extensions;
	if (bpf_skb_load_bytes(skb, NET, &h, sizeof(h)))
		return gate(skb, GATED_UNREADABLE);
	total = IPV6_BYTES + bpf_ntohs(h.payload);
	/* A payload of length 0 is a jumbogram, or nothing at all. */
	if ((bpf_ntohl(h.version_class_flow) >> 28) != 6 || !h.payload ||
	    !ends_where_it_says(skb, total))
		return gate(skb, GATED_UNREADABLE);
	/* The link does not work without neighbour discovery; the rules know it. */
	if (h.next == NEXT_ICMPV6 && !bpf_skb_load_bytes(skb, NET + IPV6_BYTES, &icmp, 1) &&
	    icmp >= 133 && icmp <= 137)
		return go_on();
	walk_ipv6(skb, e, &h, 0);
	if (e->found)
		return drop(DROPPED_GUESTS_OWN);
	if (e->bad || e->routed)
		return gate(skb, GATED_UNREADABLE);
	if (whose(&h.destination) != ADDRESS_PEER || whose(&h.source) != ADDRESS_OWN)
		return ask_judge(skb);

	is_tcp = e->next == IPPROTO_TCP && !e->later_fragment;
	headers = e->at - NET + UDP_BYTES;
	if (is_tcp) {
		if (bpf_skb_load_bytes(skb, e->at, &tcp, sizeof(tcp)))
			return gate(skb, GATED_UNREADABLE);
		if (!e->fragment && is_pure_ack(&tcp, e->end - e->at))
			return let_pass(skb, UNTAGGED_ACKS);
		headers = e->at - NET + (tcp.offset >> 4) * 4;
		if ((tcp.flags & FLAG_SYN) && !CONFIG.off)
			lower_mss(skb, &s->walk, &tcp, e->at, IPV6_BYTES, room);
	}
	if (CONFIG.off)
		return let_pass(skb, UNTAGGED_FOR_A_DEMONSTRATION);
	if (CONFIG.path_strips_options)
		return gate(skb, GATED_PATH);
	/* A hop-by-hop header must stay the first. */
	if (h.next == NEXT_HOP_BY_HOP)
		return gate(skb, GATED_NO_ROOM);
	if (!is_trusted(c))
		return gate(skb, GATED_UNTRUSTED);
	flags = room_flags(skb, total, headers, room, is_tcp, e->fragment, &why);
	if (flags < 0)
		return gate(skb, why);
	if (bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_NET, flags))
		return gate(skb, GATED_REFUSED);

	s->tag[0] = h.next;
	s->tag[1] = room / 8 - 1;
	s->tag[2] = CONFIG.ipv6_option;
	s->tag[3] = BODY_BYTES;
	write_body(s->tag + 4, p, c);
	if (room > 4 + BODY_BYTES) {
		s->tag[4 + BODY_BYTES] = 1;
		s->tag[5 + BODY_BYTES] = room - (6 + BODY_BYTES);
		if (room > 6 + BODY_BYTES)
			__builtin_memset(s->tag + 6 + BODY_BYTES, 0, 4);
	}
	h.next = NEXT_DESTINATION;
	h.payload = bpf_htons(total - IPV6_BYTES + room);
	if (bpf_skb_store_bytes(skb, NET, &h, 8, BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, NET + IPV6_BYTES, s->tag, room, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return let_pass(skb, TAGGED);
}

SEC("tc")
int from_guest(struct __sk_buff *skb)
{
	/* Whatever was there before us has no say in what passes. */
	skb->mark &= ~CONFIG.pass_mark;
	/* A member talks to others on its own network. The rules judge the rest. */
	if (skb->vlan_present)
		return leave_to_queue();
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return ipv4_from_guest(skb);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return ipv6_from_guest(skb);
	return go_on();
}

/* ---- to the guest ---- */

/* Entries never fall. Returns 0, or -1 if the others never let us. */
ALWAYS int raise(__u64 *entry, __u64 to)
{
	__u64 old, seen;
	int i;

	old = NOW_OR_LATER(*entry);
	for (i = 0; i < RAISE_TRIES; i++) {
		if (old >= to)
			return 0;
		seen = __sync_val_compare_and_swap(entry, old, to);
		if (seen == old)
			return 0;
		old = seen;
	}
	return -1;
}

struct merging {
	__u32 at;		/* where the entries are in the scratch area */
	int refused;
};

static long merge_entry(__u32 i, void *context)
{
	struct merging *m = context;
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	__u64 entry, covered, base;
	__u32 low;
	__s32 ahead;

	if (!p || !c || !s || i >= WRITERS_MAX - 1) {
		m->refused = DROPPED_FAILED;
		return 1;
	}
	__builtin_memcpy(&low, s->tag + (m->at & 7) + 4 * i, 4);
	low = bpf_ntohl(low);
	base = NOW_OR_LATER(p->entries[i]);
	covered = NOW_OR_LATER(c->entries[i]);
	if (base < covered)
		base = covered;
	/* The number with these low bits that lies next to the base. */
	ahead = low - (__u32)base;
	entry = base + (__u64)(__s64)ahead;
	if (ahead < 0 ? entry > base : entry < base) {
		m->refused = DROPPED_MALFORMED;
		return 1;
	}
	if (raise(&p->entries[i], entry)) {
		m->refused = DROPPED_FAILED;
		return 1;
	}
	return 0;
}

/*
 * Merges the tag in the scratch area whose form byte is at `at`, a constant. Returns -1, or the
 * counter of a refusal.
 */
ALWAYS int merge(struct scratch *s, __u32 at, struct pending *p, const struct committed *c)
{
	struct merging m = { .at = at + 2, .refused = -1 };
	const __u8 *body = s->tag + at;
	__u32 i, word, all = 0;
	__u64 hlc, wall_ms;

	if (body[0] != (CONFIG.is_hlc ? FORM_HLC : FORM_VECTOR))
		return DROPPED_MALFORMED;
	for (i = 0; i < WRITERS_MAX - 1; i++) {
		if (4 * i >= ENTRIES_BYTES)
			break;
		__builtin_memcpy(&word, body + 2 + 4 * i, 4);
		all ^= word;
	}
	if (body[1] != (__u8)(fold(all) ^ body[0] ^ CONFIG.context))
		return DROPPED_MALFORMED;
	if (!is_trusted(c))
		return DROPPED_UNTRUSTED;
	if (!CONFIG.is_hlc) {
		bpf_loop(CONFIG.writers, merge_entry, &m, 0);
		return m.refused;
	}
	__builtin_memcpy(&hlc, body + 2, 8);
	hlc = bpf_be64_to_cpu(hlc);
	wall_ms = (bpf_ktime_get_boot_ns() + NOW_OR_LATER(c->wall_minus_boot)) / 1000000;
	if ((hlc >> 16) > wall_ms + CONFIG.hlc_ahead_max_ms)
		return DROPPED_AHEAD;
	return raise(&p->hlc, hlc) ? DROPPED_FAILED : -1;
}

ALWAYS int ipv4_to_guest(struct __sk_buff *skb)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	__u32 header, total, size, is_peer;
	struct address source;
	struct ipv4 h, shrunk;
	struct walk *w;
	__s64 sum;
	int refused;

	if (!p || !c || !s)
		return drop(DROPPED_FAILED);
	w = &s->walk;
	if (bpf_skb_load_bytes(skb, NET, &h, sizeof(h)))
		return drop(DROPPED_UNREADABLE);
	header = (h.version_ihl & 0x0f) * 4;
	total = bpf_ntohs(h.total);
	if (h.version_ihl >> 4 != 4 || header < IPV4_MIN_BYTES)
		return drop(DROPPED_UNREADABLE);
	if (header == IPV4_MIN_BYTES)
		return go_on();
	if (total < header || total > skb->len - NET)
		return drop(DROPPED_UNREADABLE);
	walk_ipv4(skb, w, header, 0);
	if (w->bad)
		return drop(DROPPED_UNREADABLE);
	if (!w->found)
		return go_on();
	source = from_ipv4(h.source);
	is_peer = whose(&source) == ADDRESS_PEER && !CONFIG.off;
	if (is_peer) {
		if (w->found != 1 || w->found_at != NET + IPV4_MIN_BYTES || w->found_bytes != TAG4_BYTES)
			return drop(DROPPED_MALFORMED);
		if (bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->tag, TAG4_BYTES))
			return drop(DROPPED_FAILED);
		refused = merge(s, 2, p, c);
		if (refused >= 0)
			return drop(refused);
	}
	shrunk = h;
	if (w->found == 1 && w->found_at == NET + IPV4_MIN_BYTES && !(w->found_bytes & 3)) {
		size = w->found_bytes;
		if (size < 4 || size > IPV4_MAX_BYTES - IPV4_MIN_BYTES)
			return drop(DROPPED_UNREADABLE);
		if (bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->old, size) ||
		    bpf_skb_adjust_room(skb, -(__s32)size, BPF_ADJ_ROOM_NET, FIXED_FLAGS))
			return drop(DROPPED_FAILED);
		shrunk.version_ihl -= size / 4;
		shrunk.total = bpf_htons(total - size);
		sum = bpf_csum_diff((__be32 *)&h, 4, (__be32 *)&shrunk, 4, (__u16)~h.check);
		sum = bpf_csum_diff((__be32 *)s->old, size & ~3u, 0, 0, sum);
	} else {
		/* Not where ours are: the place stays, as filling. */
		size = header - IPV4_MIN_BYTES;
		if (size < 4 || size > IPV4_MAX_BYTES - IPV4_MIN_BYTES)
			return drop(DROPPED_UNREADABLE);
		if (bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->old, size))
			return drop(DROPPED_FAILED);
		walk_ipv4(skb, w, header, 1);
		if (w->bad || bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->tag, size))
			return drop(DROPPED_FAILED);
		sum = bpf_csum_diff((__be32 *)s->old, size & ~3u, (__be32 *)s->tag, size & ~3u,
				    (__u16)~h.check);
	}
	shrunk.check = fold_checksum(sum);
	if (bpf_skb_store_bytes(skb, NET, &shrunk, sizeof(shrunk), BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	count(is_peer ? MERGED : STRIPPED_FOREIGN);
	return go_on();
}

ALWAYS int ipv6_to_guest(struct __sk_buff *skb)
{
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct scratch *s = bpf_map_lookup_elem(&scratch, &zero);
	struct extensions *e;
	__u8 head[2] = {};
	struct ipv6 h;
	__u32 total;
	int refused;

	if (!p || !c || !s)
		return drop(DROPPED_FAILED);
	e = &s->extensions;
	if (bpf_skb_load_bytes(skb, NET, &h, sizeof(h)) ||
	    (bpf_ntohl(h.version_class_flow) >> 28) != 6)
		return drop(DROPPED_UNREADABLE);
	total = IPV6_BYTES + bpf_ntohs(h.payload);
	if (total > skb->len - NET)
		return drop(DROPPED_UNREADABLE);
	walk_ipv6(skb, e, &h, 0);
	if (e->bad)
		return drop(DROPPED_UNREADABLE);
	if (!e->found)
		return go_on();
	if (whose(&h.source) != ADDRESS_PEER || CONFIG.off) {
		walk_ipv6(skb, e, &h, 1);
		if (e->bad)
			return drop(DROPPED_FAILED);
		count(STRIPPED_FOREIGN);
		return go_on();
	}
	if (bpf_skb_load_bytes(skb, NET + IPV6_BYTES, head, 2))
		return drop(DROPPED_FAILED);
	if (e->found != 1 || h.next != NEXT_DESTINATION || head[1] != TAG6_BYTES / 8 - 1 ||
	    e->found_at != NET + IPV6_BYTES + 2 || e->found_bytes != 2 + BODY_BYTES)
		return drop(DROPPED_MALFORMED);
	if (bpf_skb_load_bytes(skb, NET + IPV6_BYTES, s->tag, TAG6_BYTES))
		return drop(DROPPED_FAILED);
	refused = merge(s, 4, p, c);
	if (refused >= 0)
		return drop(refused);
	if (bpf_skb_adjust_room(skb, -(__s32)TAG6_BYTES, BPF_ADJ_ROOM_NET, FIXED_FLAGS))
		return drop(DROPPED_FAILED);
	h.next = head[0];
	h.payload = bpf_htons(total - IPV6_BYTES - TAG6_BYTES);
	if (bpf_skb_store_bytes(skb, NET, &h, 8, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	count(MERGED);
	return go_on();
}

SEC("tc")
int to_guest(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return ipv4_to_guest(skb);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return ipv6_to_guest(skb);
	return go_on();
}

char LICENSE[] SEC("license") = "GPL";
