/* SPDX-License-Identifier: GPL-2.0-only */
/* Finding our option among others, in IPv4 options and IPv6 extension headers. Part of tag.bpf.c. */
#ifndef TIDELOCK_OPTIONS_H
#define TIDELOCK_OPTIONS_H

/* What the loops are told; a pointer to a packet cannot be kept in a map. */
struct subject {
	struct __sk_buff *skb;
};

static long walk_step(__u32 step, void *context)
{
	struct __sk_buff *skb = ((struct subject *)context)->skb;
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
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
				/*
				 * Of the same length, of zeros. Not PadN: Linux drops a packet with
				 * more than 7 bytes of filling in a row.
				 */
				head[0] = IPV6_SAYS_NOTHING;
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

APART void walk_ipv4(struct __sk_buff *skb, struct walk *w, __u32 header, __u32 blanks)
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
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
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

/*
 * A GSO packet can be longer than its header can say (BIG TCP): then that says 0, and a jumbo option comes first, or with
 * newer kernels nothing.
 */
ALWAYS int is_jumbo(const struct __sk_buff *skb, const struct ipv6 *h)
{
	return !h->payload && skb->gso_size;
}

ALWAYS __u32 payload_of(const struct __sk_buff *skb, const struct ipv6 *h)
{
	return is_jumbo(skb, h) ? skb->len - NET - IPV6_BYTES : bpf_ntohs(h->payload);
}

APART void walk_ipv6(struct __sk_buff *skb, struct extensions *e, const struct ipv6 *h,
		      __u32 blanks)
{
	struct subject subject = { skb };

	__builtin_memset(e, 0, sizeof(*e));
	e->at = NET + IPV6_BYTES;
	e->end = e->at + payload_of(skb, h);
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

#endif
