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

#define ICMP_BYTES 8
/* RFC 4884: a quote that something follows is at least this long. */
#define FOLLOWED_MIN_BYTES 128
#define PIECE_BYTES 64
/* Its length is named in up to 255 units of 8 bytes. */
#define PIECES_MAX (255 * 8 / PIECE_BYTES + 1)

/* What is taken out of a quote, behind its fixed header. */
struct cut {
	__u32 at;
	__u32 bytes;	/* fewer than the tag has if the quote ends in it */
	__u32 end;	/* of the quote */
	int is_followed;
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
 * cannot be one is none. The tag comes into the scratch area, with zeros for what is not there. Returns 0 if it is to be
 * taken out.
 */
ALWAYS long find_cut(struct __sk_buff *skb, struct cpu *s, struct cut *cut, __u32 quote_at, __u32 named,
		     __u32 packet_end, __u32 size)
{
	cut->is_followed = named >= FOLLOWED_MIN_BYTES && quote_at + named <= packet_end;
	cut->end = cut->is_followed ? quote_at + named : packet_end;
	cut->bytes = cut->end - cut->at;
	if (cut->bytes > size)
		cut->bytes = size;
	if (!cut->bytes || cut->bytes > sizeof(s->tag))
		return -1;
	__builtin_memset(s->tag, 0, sizeof(s->tag));
	return bpf_skb_load_bytes(skb, cut->at, s->tag, cut->bytes);
}

/*
 * The packet becomes shorter, and the headers before the cut have to be written again. But a quote that is followed stays
 * as long as it was, with zeros at its end: it is seldom longer than it must be for what follows to be found. ICMP's
 * checksum is never left to a network card, which would look for it where it was.
 */
ALWAYS long take_out(struct __sk_buff *skb, struct cpu *s, const struct cut *cut)
{
	__u32 bytes = cut->bytes, from = cut->at + bytes;
	struct pulling p = { .skb = skb, .from = from, .left = cut->end - from, .by = bytes };

	if (!cut->is_followed)
		return bpf_skb_adjust_room(skb, -(__s32)bytes, BPF_ADJ_ROOM_NET, FIXED_FLAGS);
	bpf_loop(PIECES_MAX, pull_piece, &p, 0);
	if (p.failed)
		return -1;
	__builtin_memset(s->tag, 0, sizeof(s->tag));
	return bpf_skb_store_bytes(skb, cut->end - bytes, s->tag, bytes, BPF_F_RECOMPUTE_CSUM);
}

/* `old`: the sum of ICMP and quoted header as they were; `new`: as they are, with the old checksum. */
ALWAYS __u64 change_of(__u32 old, __u32 new, __u32 taken_out)
{
	return (__u64)(__u32)~old + new + (__u32)~taken_out;
}

APART int ipv4_error_to_guest(struct __sk_buff *skb)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	struct cut cut = { .at = NET + sizeof(struct ipv4_error) };
	__u32 total, size, old, new, tag, named = 0;
	struct ipv4 header, quoted;
	struct ipv4_error *e;
	__u8 head[2] = {};

	if (!s)
		return drop(DROPPED_FAILED);
	e = &s->error.four;
	if (load(skb, NET, e, sizeof(*e)))
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
	header = e->header;
	quoted = e->quoted;
	total = bpf_ntohs(header.total);
	/* Nobody sends an error in fragments. */
	if (bpf_ntohs(header.fragment) & 0x3fff || total > skb->len - NET ||
	    total < sizeof(*e) + sizeof(head) || bpf_skb_load_bytes(skb, cut.at, head, sizeof(head)))
		return go_on();
	size = head[1];
	if (quoted.version_ihl >> 4 != 4 || head[0] != CONFIG.ipv4_option || size < 4 || size & 3 ||
	    IPV4_MIN_BYTES + size > (quoted.version_ihl & 0x0f) * 4 ||
	    find_cut(skb, s, &cut, NET + IPV4_MIN_BYTES + ICMP_BYTES, named, NET + total, size))
		return go_on();

	old = sum_of((void *)&e->icmp, ICMP_BYTES + IPV4_MIN_BYTES);
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
	new = sum_of((void *)&e->icmp, ICMP_BYTES + IPV4_MIN_BYTES);
	e->icmp.check = renewed(e->icmp.check, change_of(old, new, tag));
	if (!cut.is_followed) {
		e->header.total = bpf_htons(total - cut.bytes);
		e->header.check = new_checksum(&header, &e->header, 0);
	}
	if (take_out(skb, s, &cut) || bpf_skb_store_bytes(skb, NET, e, sizeof(*e), BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return go_on();
}

APART int ipv6_error_to_guest(struct __sk_buff *skb)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	struct cut cut = { .at = NET + sizeof(struct ipv6_error) };
	__u32 payload, size, old, new, tag, pointer, named = 0;
	struct ipv6_error *e;
	__u8 head[4] = {};
	__u64 changed;

	if (!s)
		return drop(DROPPED_FAILED);
	e = &s->error.six;
	if (load(skb, NET, e, sizeof(*e)))
		return go_on();
	switch (e->icmp.type) {
	case UNREACHABLE6:
	case TIME_EXCEEDED6:
		named = e->icmp.rest.bytes[0] * 8;
		break;
	case TOO_BIG6:
	case PARAMETER_PROBLEM6:
		break;
	default:
		return go_on();
	}
	payload = bpf_ntohs(e->header.payload);
	if (IPV6_BYTES + payload < sizeof(*e) + sizeof(head) ||
	    bpf_skb_load_bytes(skb, cut.at, head, sizeof(head)))
		return go_on();
	/* Only our option, as members write it. */
	size = (head[1] + 1) * 8;
	if (bpf_ntohl(e->quoted.version_class_flow) >> 28 != 6 || e->quoted.next != NEXT_DESTINATION ||
	    head[2] != CONFIG.ipv6_option || size != ((4 + head[3] + 7) & ~7u) ||
	    find_cut(skb, s, &cut, NET + IPV6_BYTES + ICMP_BYTES, named, NET + IPV6_BYTES + payload, size))
		return go_on();

	old = sum_of((void *)&e->icmp, ICMP_BYTES + IPV6_BYTES);
	tag = sum_of(s->tag, sizeof(s->tag));
	e->quoted.next = head[0];
	e->quoted.payload = bpf_htons(bpf_ntohs(e->quoted.payload) - size);
	pointer = bpf_ntohl(e->icmp.rest.all);
	if (e->icmp.type == PARAMETER_PROBLEM6 && pointer >= IPV6_BYTES + size)
		e->icmp.rest.all = bpf_htonl(pointer - size);
	new = sum_of((void *)&e->icmp, ICMP_BYTES + IPV6_BYTES);
	changed = change_of(old, new, tag);
	if (!cut.is_followed) {
		/* Its checksum is also over the length. */
		changed += (__u32)~bpf_htonl(payload);
		payload -= cut.bytes;
		changed += bpf_htonl(payload);
		e->header.payload = bpf_htons(payload);
	}
	e->icmp.check = renewed(e->icmp.check, changed);
	if (take_out(skb, s, &cut) || bpf_skb_store_bytes(skb, NET, e, sizeof(*e), BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return go_on();
}

#endif
