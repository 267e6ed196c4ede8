/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * An ICMP error quotes the packet that it is about as that was on the way: with its tag. The guest that sent it gets the
 * quote without. Nothing is merged: what is quoted is the guest's own. Part of tag.bpf.c.
 */
#ifndef TIDELOCK_QUOTES_H
#define TIDELOCK_QUOTES_H

#define UNREACHABLE 3
#define SOURCE_QUENCH 4
#define REDIRECT 5
#define TIME_EXCEEDED 11
#define PARAMETER_PROBLEM 12
#define UNREACHABLE6 1
#define TOO_BIG6 2
#define TIME_EXCEEDED6 3
#define PARAMETER_PROBLEM6 4
#define REDIRECT6 137

#define ICMP_BYTES 8
/* What a redirect names before its options: the better hop, and to where. */
#define BETTER_BYTES 32
#define REDIRECTED_HEADER 4
#define REDIRECT_OPTIONS_MAX 8
/* RFC 4884: a quote that something follows is at least this long. */
#define FOLLOWED_MIN_BYTES 128
#define PIECE_BYTES 64
#define PIECES_MAX (TOTAL_MAX_BYTES / PIECE_BYTES + 1)

/* What is taken out of a quote, behind its fixed header. */
struct cut {
	__u32 at;
	__u32 bytes;	/* fewer than the tag has if the quote ends in it */
	__u32 end;	/* of the quote */
	int keeps_length;	/* it does not end with the packet */
};

struct pulling {
	struct __sk_buff *skb;
	__u32 from;
	__u32 left;
	__u32 by;
	int failed;
};

static long pull_piece(__u32 step, void *context)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	struct pulling *p = context;
	__u32 bytes = p->left;

	if (!s || !bytes)
		return 1;
	if (bytes > PIECE_BYTES)
		bytes = PIECE_BYTES;
	if (bpf_skb_load_bytes(p->skb, p->from, s->blank, bytes) ||
	    bpf_skb_store_bytes(p->skb, p->from - p->by, s->blank, bytes, BPF_F_RECOMPUTE_CSUM)) {
		p->failed = 1;
		return 1;
	}
	p->from += bytes;
	p->left -= bytes;
	return 0;
}

/*
 * A quote ends with the packet, or before what follows it: then the ICMP header has its length (RFC 4884). A length that
 * cannot be one is none.
 */
ALWAYS void find_end(struct cut *cut, __u32 quote_at, __u32 named, __u32 packet_end)
{
	cut->keeps_length = named >= FOLLOWED_MIN_BYTES && quote_at + named <= packet_end;
	cut->end = cut->keeps_length ? quote_at + named : packet_end;
}

/* The tag comes into the scratch area, with zeros for what is not there. Returns 0 if it is to be taken out. */
ALWAYS long find_cut(struct __sk_buff *skb, struct cpu *s, struct cut *cut, __u32 size)
{
	cut->bytes = cut->end - cut->at;
	if (cut->bytes > size)
		cut->bytes = size;
	if (!cut->bytes || cut->bytes > sizeof(s->tag))
		return -1;
	__builtin_memset(s->tag, 0, sizeof(s->tag));
	return bpf_skb_load_bytes(skb, cut->at, s->tag, cut->bytes);
}

/*
 * The packet becomes shorter. But a quote that is followed stays as long as it was, with zeros at its end: it is seldom
 * longer than it must be for what follows to be found. So does an option, whose length goes by 8 bytes.
 */
ALWAYS long take_out(struct __sk_buff *skb, struct cpu *s, const struct cut *cut)
{
	__u32 bytes = cut->bytes, from = cut->at + bytes;
	struct pulling p = { .skb = skb, .from = from, .left = cut->end - from, .by = bytes };

	bpf_loop(PIECES_MAX, pull_piece, &p, 0);
	if (p.failed || p.left)
		return -1;
	if (!cut->keeps_length)
		return bpf_skb_change_tail(skb, cut->end - bytes, 0);
	__builtin_memset(s->tag, 0, sizeof(s->tag));
	return bpf_skb_store_bytes(skb, cut->end - bytes, s->tag, bytes, BPF_F_RECOMPUTE_CSUM);
}

/* What the sum of ICMP and quote changes by. `old`, `new`: the sums of their headers, with the old checksum in both. */
ALWAYS __u64 change_of(__u32 old, __u32 new, __u32 taken_out)
{
	return (__u64)(__u32)~old + new + (__u32)~taken_out;
}

APART int ipv4_error_to_guest(struct __sk_buff *skb, const struct ipv4 *header)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	__u32 at = NET + (header->version_ihl & 0x0f) * 4, total = bpf_ntohs(header->total);
	struct cut cut = { .at = at + sizeof(struct ipv4_error) };
	__u32 size, old, new, tag, named = 0;
	struct ipv4 shorter = *header, quoted;
	struct ipv4_error *e;
	__u8 head[2] = {};

	if (!s)
		return drop(DROPPED_FAILED);
	e = &s->error.four;
	if (bpf_skb_load_bytes(skb, at, e, sizeof(*e)))
		return go_on();
	switch (e->icmp.type) {
	case UNREACHABLE:
	case TIME_EXCEEDED:
	case PARAMETER_PROBLEM:
		named = e->icmp.rest.bytes[1] * 4;
		break;
	case SOURCE_QUENCH:
	case REDIRECT:
		break;
	default:
		return go_on();
	}
	quoted = e->quoted;
	/* Nobody sends an error in fragments. */
	if (bpf_ntohs(header->fragment) & 0x3fff || total > skb->len - NET ||
	    NET + total < cut.at + sizeof(head) || bpf_skb_load_bytes(skb, cut.at, head, sizeof(head)))
		return go_on();
	size = head[1];
	if (quoted.version_ihl >> 4 != 4 || head[0] != CONFIG.ipv4_option || size < 4 || size & 3 ||
	    IPV4_MIN_BYTES + size > (quoted.version_ihl & 0x0f) * 4)
		return go_on();
	find_end(&cut, at + ICMP_BYTES, named, NET + total);
	if (find_cut(skb, s, &cut, size))
		return go_on();

	old = sum_of((void *)e, sizeof(*e));
	tag = sum_of(s->tag, sizeof(s->tag));
	e->quoted.version_ihl -= size / 4;
	e->quoted.total = bpf_htons(bpf_ntohs(quoted.total) - size);
	if (cut.bytes == size) {
		e->quoted.check = new_checksum(&quoted, &e->quoted, (__u32)~tag);
	} else {
		/* What the missing bytes were is not known. */
		e->quoted.check = 0;
		e->quoted.check = renewed(0xffff, sum_of((void *)&e->quoted, IPV4_MIN_BYTES));
	}
	if (e->icmp.type == PARAMETER_PROBLEM && e->icmp.rest.bytes[0] >= IPV4_MIN_BYTES + size)
		e->icmp.rest.bytes[0] -= size;
	new = sum_of((void *)e, sizeof(*e));
	e->icmp.check = renewed(e->icmp.check, change_of(old, new, tag));
	if (!cut.keeps_length) {
		shorter.total = bpf_htons(total - cut.bytes);
		shorter.check = new_checksum(header, &shorter, 0);
	}
	if (take_out(skb, s, &cut) ||
	    bpf_skb_store_bytes(skb, at, e, sizeof(*e), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, NET, &shorter, sizeof(shorter), BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return go_on();
}

/* Where the quote in a redirect is, which is one of its options (RFC 4861 4.6.3), behind 8 bytes of that. 0: there is none. */
ALWAYS __u32 find_redirected(struct __sk_buff *skb, struct cut *cut, __u32 at, __u32 packet_end)
{
	__u32 i, bytes;
	__u8 head[2];

	AS_A_LOOP
	for (i = 0; i < REDIRECT_OPTIONS_MAX; i++) {
		if (bpf_skb_load_bytes(skb, at, head, sizeof(head)))
			return 0;
		bytes = head[1] * 8;
		if (!bytes || at + bytes > packet_end)
			return 0;
		if (head[0] == REDIRECTED_HEADER) {
			cut->end = at + bytes;
			cut->keeps_length = 1;
			return at + 8;
		}
		at += bytes;
	}
	return 0;
}

/* `at`: of the ICMP header, behind whatever other headers there are. */
APART int ipv6_error_to_guest(struct __sk_buff *skb, const struct ipv6 *header, __u32 at)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	__u32 payload = bpf_ntohs(header->payload), packet_end = NET + IPV6_BYTES + payload;
	__u32 size, old, new, tag, pointer, named = 0, quote_at = at + ICMP_BYTES;
	struct ipv6 shorter = *header;
	struct ipv6_error *e;
	struct cut cut = {};
	__u8 head[4] = {};
	__u64 changed;

	if (!s)
		return drop(DROPPED_FAILED);
	e = &s->error.six;
	if (bpf_skb_load_bytes(skb, at, &e->icmp, sizeof(e->icmp)))
		return go_on();
	switch (e->icmp.type) {
	case UNREACHABLE6:
	case TIME_EXCEEDED6:
		named = e->icmp.rest.bytes[0] * 8;
		break;
	case TOO_BIG6:
	case PARAMETER_PROBLEM6:
	case REDIRECT6:
		break;
	default:
		return go_on();
	}
	if (e->icmp.type == REDIRECT6)
		quote_at = find_redirected(skb, &cut, quote_at + BETTER_BYTES, packet_end);
	else
		find_end(&cut, quote_at, named, packet_end);
	if (!quote_at || bpf_skb_load_bytes(skb, quote_at, &e->quoted, sizeof(e->quoted)))
		return go_on();
	cut.at = quote_at + IPV6_BYTES;
	if (cut.end < cut.at + sizeof(head) || bpf_skb_load_bytes(skb, cut.at, head, sizeof(head)))
		return go_on();
	/* Only our option, as members write it. */
	size = (head[1] + 1) * 8;
	if (bpf_ntohl(e->quoted.version_class_flow) >> 28 != 6 || e->quoted.next != NEXT_DESTINATION ||
	    head[2] != CONFIG.ipv6_option || size != ((4 + head[3] + 7) & ~7u) ||
	    find_cut(skb, s, &cut, size))
		return go_on();

	old = sum_of((void *)e, sizeof(*e));
	tag = sum_of(s->tag, sizeof(s->tag));
	e->quoted.next = head[0];
	e->quoted.payload = bpf_htons(bpf_ntohs(e->quoted.payload) - size);
	pointer = bpf_ntohl(e->icmp.rest.all);
	if (e->icmp.type == PARAMETER_PROBLEM6 && pointer >= IPV6_BYTES + size)
		e->icmp.rest.all = bpf_htonl(pointer - size);
	new = sum_of((void *)e, sizeof(*e));
	changed = change_of(old, new, tag);
	if (!cut.keeps_length) {
		/* Its checksum is also over the length of all that it is over. */
		changed += (__u32)~bpf_htonl(packet_end - at) + (__u64)bpf_htonl(packet_end - at - cut.bytes);
		shorter.payload = bpf_htons(payload - cut.bytes);
	}
	e->icmp.check = renewed(e->icmp.check, changed);
	if (take_out(skb, s, &cut) ||
	    bpf_skb_store_bytes(skb, at, &e->icmp, sizeof(e->icmp), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, quote_at, &e->quoted, sizeof(e->quoted), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, NET, &shorter, 8, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return go_on();
}

#endif
