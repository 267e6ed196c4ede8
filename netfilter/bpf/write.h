/* SPDX-License-Identifier: GPL-2.0-only */
/* Writing a tag: its bytes, the lengths and sums around it, and the room that TCP must leave for it. Part of tag.bpf.c. */
#ifndef TIDELOCK_WRITE_H
#define TIDELOCK_WRITE_H

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LE64(x) (x)
#define LE32(x) (x)
#else
#define LE64(x) __builtin_bswap64(x)
#define LE32(x) __builtin_bswap32(x)
#endif
#define TURNED(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define SIP_ROUND                                                                                \
	do {                                                                                     \
		v0 += v1, v1 = TURNED(v1, 13), v1 ^= v0, v0 = TURNED(v0, 32);                    \
		v2 += v3, v3 = TURNED(v3, 16), v3 ^= v2;                                         \
		v0 += v3, v3 = TURNED(v3, 21), v3 ^= v0;                                         \
		v2 += v1, v1 = TURNED(v1, 17), v1 ^= v2, v2 = TURNED(v2, 32);                    \
	} while (0)
#define SIP_WORD(of)                                                                             \
	do {                                                                                     \
		word = (of);                                                                     \
		v3 ^= word;                                                                      \
		SIP_ROUND;                                                                       \
		SIP_ROUND;                                                                       \
		v0 ^= word;                                                                      \
	} while (0)

/*
 * What nobody can write who has not the group's key: SipHash-2-4 of form, context and length of the entries (8 bytes), both
 * addresses, and the entries. `body`: form, context, entries. `place`: of the key.
 */
APART __u64 seal_of(const __u8 *body, const struct way *way, const struct committed *c, __u64 place)
{
	const __u64 *key = c->tag_keys[place & (KEYS - 1)];
	__u64 k0 = NOW_OR_LATER(key[0]), k1 = NOW_OR_LATER(key[1]), word;
	__u64 v0 = k0 ^ 0x736f6d6570736575, v1 = k1 ^ 0x646f72616e646f6d;
	__u64 v2 = k0 ^ 0x6c7967656e657261, v3 = k1 ^ 0x7465646279746573;
	__u32 i, half = 0;

	SIP_WORD(body[0] | (__u64)body[1] << 8 | (__u64)ENTRIES_BYTES << 16);
	SIP_WORD(LE64(way->source.words[0]));
	SIP_WORD(LE64(way->source.words[1]));
	SIP_WORD(LE64(way->destination.words[0]));
	SIP_WORD(LE64(way->destination.words[1]));
	AS_A_LOOP
	for (i = 0; i < WRITERS_MAX / 2; i++) {
		if (8 * i + 8 > ENTRIES_BYTES)
			break;
		__builtin_memcpy(&word, body + 2 + 8 * i, 8);
		SIP_WORD(LE64(word));
	}
	/* The last word has the length of it all, and what is left of the entries: nothing or 4 bytes. */
	if (ENTRIES_BYTES & 4)
		__builtin_memcpy(&half, body + 2 + (ENTRIES_BYTES & ~7u), 4);
	SIP_WORD((__u64)(40 + ENTRIES_BYTES) << 56 | LE32(half));
	v2 ^= 0xff;
	SIP_ROUND;
	SIP_ROUND;
	SIP_ROUND;
	SIP_ROUND;
	return v0 ^ v1 ^ v2 ^ v3;
}

/*
 * Form, context, entries and seal at `body`: max(P, C), so that an entry is never so old that the
 * receiver would take its low bits for those of a newer one.
 */
ALWAYS void write_body(__u8 *body, const struct way *way, const struct pending *p, const struct committed *c)
{
	__u64 entry, covered, seal;
	__u32 i, low;

	body[0] = CONFIG.is_hlc ? FORM_HLC : FORM_VECTOR;
	body[1] = CONFIG.context;
	if (CONFIG.is_hlc) {
		entry = bpf_cpu_to_be64(NOW_OR_LATER(p->hlc));
		__builtin_memcpy(body + 2, &entry, 8);
	} else {
		AS_A_LOOP
		for (i = 0; i < WRITERS_MAX - 1; i++) {
			if (i >= CONFIG.writers)
				break;
			entry = NOW_OR_LATER(p->entries[i]);
			covered = NOW_OR_LATER(c->entries[i]);
			if (entry < covered)
				entry = covered;
			low = bpf_htonl((__u32)entry);
			__builtin_memcpy(body + 2 + 4 * i, &low, 4);
		}
	}
	seal = bpf_cpu_to_be64(seal_of(body, way, c, NOW_OR_LATER(c->key_in_use)));
	__builtin_memcpy(body + 2 + ENTRIES_BYTES, &seal, SEAL_BYTES);
}

/*
 * Whether the segments of a GSO packet, or the packet itself, still fit into the path with `room` more bytes. headers:
 * network and transport header of each segment, 0 where they are not known: what is cut lies deeper, in a tunnel. Returns
 * the flags for the helper, or a negative value. A TCP segment may be made smaller, a datagram may not.
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
	if (!headers)
		return -1;
	segment = headers + skb->gso_size + room;
	if (segment <= CONFIG.path_mtu)
		return FIXED_FLAGS;
	if (is_tcp && skb->gso_size > GSO_MIN_BYTES + room) {
		count(TAGGED_GSO_LOWERED);
		return GROW_FLAGS;
	}
	return -1;
}

/*
 * The other side must leave room for the tag. `at`: the TCP header of a SYN, left alone if it ends behind the packet;
 * `before`: the bytes of headers and tag before it.
 */
APART void lower_mss(struct __sk_buff *skb, const struct tcp *tcp, __u32 at, __u32 before)
{
	__u32 bytes = (tcp->offset >> 4) * 4, most = before + TCP_MIN_BYTES;
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	__be16 old, new;
	struct walk *w;

	if (!s || bytes <= TCP_MIN_BYTES || at + bytes > skb->len || CONFIG.path_mtu <= most)
		return;
	w = &s->walk;
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

/* One of the options that a pure acknowledgement may have, or of the zeros behind their end. */
static long ack_option_step(__u32 step, void *context)
{
	struct __sk_buff *skb = ((struct subject *)context)->skb;
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	__u32 size, is_listed = 0;
	__u8 head[2] = {};
	struct walk *w;

	if (!s)
		return 1;
	w = &s->walk;
	if (w->at >= w->end) {
		w->ended = 1;
		return 1;
	}
	if (bpf_skb_load_bytes(skb, w->at, head, 1))
		return 1;
	if (head[0] == 0) {
		w->found = 1;
		w->at++;
		return 0;
	}
	if (w->found)
		return 1;
	if (head[0] == 1) {
		w->at++;
		return 0;
	}
	if (w->at + 2 > w->end || bpf_skb_load_bytes(skb, w->at, head, 2))
		return 1;
	size = head[1];
#define ACK_OPTION(KIND, LEAST, MOST, STEP)                                                                        \
	is_listed |= head[0] == KIND && size >= LEAST && size <= MOST && (size - LEAST) % STEP == 0;
#include "ack_options.h"
#undef ACK_OPTION
	if (!is_listed || w->at + size > w->end)
		return 1;
	w->at += size;
	return 0;
}

/* `at`: of the TCP header, which is `bytes` long. */
APART int has_only_ack_options(struct __sk_buff *skb, __u32 at, __u32 bytes)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	struct subject subject = { skb };
	struct walk *w;

	if (!s)
		return 0;
	w = &s->walk;
	__builtin_memset(w, 0, sizeof(*w));
	w->at = at + TCP_MIN_BYTES;
	w->end = at + bytes;
	bpf_loop(TCP_OPTIONS_MAX_BYTES + 1, ack_option_step, &subject, 0);
	return w->ended;
}

/* `at`: of a TCP header that lies right behind an IP header without options. `segment`: header and payload. */
ALWAYS int is_pure_ack(struct __sk_buff *skb, const struct tcp *tcp, __u32 at, __u32 segment)
{
	return (tcp->offset >> 4) * 4 == segment && segment >= TCP_MIN_BYTES &&
	       (tcp->flags & FLAG_ACK) && !(tcp->flags & (FLAG_SYN | FLAG_FIN | FLAG_RST | FLAG_URG)) &&
	       (segment == TCP_MIN_BYTES || has_only_ack_options(skb, at, segment));
}

/* Bytes behind the end that the header names would travel without being looked at. */
ALWAYS int ends_where_it_says(const struct __sk_buff *skb, __u32 total)
{
	__u32 len = skb->len - NET;

	return total <= len &&
	       (len == total || (total < ETHERNET_PAYLOAD_MIN_BYTES && len <= ETHERNET_PAYLOAD_MIN_BYTES));
}

/* A checksum after the sum that it is about has changed by this (RFC 1624): what was wrong stays wrong. */
ALWAYS __u16 renewed(__u16 check, __u64 change)
{
	__u64 all = change + (__u16)~check;

	all = (all & 0xffffffff) + (all >> 32);
	all = (all & 0xffff) + (all >> 16);
	all = (all & 0xffff) + (all >> 16);
	all = (all & 0xffff) + (all >> 16);
	return ~all;
}

/*
 * An IPv4 header's checksum after its first word has changed. options: the sum of those that came, or the complement of it
 * for those that went.
 */
ALWAYS __u16 new_checksum(const struct ipv4 *old, const struct ipv4 *new, __u64 options)
{
	__u32 before, after;

	__builtin_memcpy(&before, old, 4);
	__builtin_memcpy(&after, new, 4);
	return renewed(old->check, options + (__u32)~before + after);
}

/* The one's complement sum of options, or of headers: whole words. */
ALWAYS __u32 sum_of(const __u8 *from, __u32 bytes)
{
	__u64 sum = 0;
	__u32 i, word;

	AS_A_LOOP
	for (i = 0; i < SUMMED_MAX_BYTES / 4; i++) {
		if (4 * i >= bytes)
			break;
		__builtin_memcpy(&word, from + 4 * i, 4);
		sum += word;
	}
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

#endif
