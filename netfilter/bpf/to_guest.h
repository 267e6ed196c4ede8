/* SPDX-License-Identifier: GPL-2.0-only */
/* To the guest: tags of members are merged and stripped, those of others only stripped. Part of tag.bpf.c. */
#ifndef TIDELOCK_TO_GUEST_H
#define TIDELOCK_TO_GUEST_H

struct merging {
	__u32 at;		/* where the entries are in the scratch area */
	int refused;
};

/*
 * The number with these low bits that lies next to max(P, C). Returns -1 if there is none. Of a writer that was removed C
 * has the greatest seq there is, and nothing is to be learnt: the sender may not have heard of that yet.
 */
ALWAYS int whole_entry(const __u8 *bits, __u64 pending, __u64 covered, __u64 *entry)
{
	__u64 base = pending < covered ? covered : pending;
	__s32 ahead;
	__u32 low;

	if (base == SEQ_OF_REMOVED) {
		*entry = base;
		return 0;
	}
	__builtin_memcpy(&low, bits, 4);
	ahead = bpf_ntohl(low) - (__u32)base;
	*entry = base + (__u64)(__s64)ahead;
	return (ahead < 0 ? *entry > base : *entry < base) ? -1 : 0;
}

/* Whether P has all of a tag already, as after the first packet of a train. */
ALWAYS int is_merged(const __u8 *entries, const struct pending *p, const struct committed *c)
{
	__u64 entry, own;
	__u32 i;

	AS_A_LOOP
	for (i = 0; i < WRITERS_MAX - 1; i++) {
		if (i >= CONFIG.writers)
			break;
		own = NOW_OR_LATER(p->entries[i]);
		if (whole_entry(entries + 4 * i, own, NOW_OR_LATER(c->entries[i]), &entry) || entry > own)
			return 0;
	}
	return 1;
}

/* Whether a writer can be so far: what C or P has is known, and the backup tells the rest. */
ALWAYS int is_reachable(__u64 entry, __u64 pending, __u64 covered, __u64 reachable)
{
	return entry <= reachable || entry <= covered || entry <= pending;
}

static long merge_entry(__u32 i, void *context)
{
	struct merging *m = context;
	struct pending *p = bpf_map_lookup_elem(&pending, &zero);
	struct committed *c = bpf_map_lookup_elem(&committed, &zero);
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);
	__u64 entry, own, covered;

	if (!p || !c || !s || i >= WRITERS_MAX - 1) {
		m->refused = DROPPED_FAILED;
		return 1;
	}
	own = NOW_OR_LATER(p->entries[i]);
	covered = NOW_OR_LATER(c->entries[i]);
	if (whole_entry(s->tag + (m->at & 7) + 4 * i, own, covered, &entry) ||
	    !is_reachable(entry, own, covered, NOW_OR_LATER(c->reachable[i]))) {
		m->refused = DROPPED_MALFORMED;
		return 1;
	}
	if (raise(&p->entries[i], entry)) {
		m->refused = DROPPED_FAILED;
		return 1;
	}
	return 0;
}

/* What all writers have passed is this group's time, whatever this host's clock says. */
ALWAYS int is_ahead(const struct committed *c, __u64 hlc, __u64 now)
{
	__u64 now_ms = (now + NOW_OR_LATER(c->wall_minus_boot)) / 1000000;
	__u64 passed_ms = NOW_OR_LATER(c->watermark) >> 16;

	return (hlc >> 16) > (now_ms < passed_ms ? passed_ms : now_ms) + CONFIG.hlc_ahead_max_ms;
}

/* Whether a key that is in use, or was before, or will be next, has made the seal. */
ALWAYS int is_sealed(const __u8 *body, const struct way *way, const struct committed *c)
{
	__u64 place = NOW_OR_LATER(c->key_in_use), seal;
	__u32 i;

	__builtin_memcpy(&seal, body + 2 + ENTRIES_BYTES, SEAL_BYTES);
	seal = bpf_be64_to_cpu(seal);
	AS_A_LOOP
	for (i = 0; i < KEYS; i++) {
		/* What is written there is for a later period. */
		if (i != KEYS / 2 && seal == seal_of(body, way, c, place + i))
			return 1;
	}
	return 0;
}

/*
 * Merges the tag in the scratch area whose form byte is at `at`, a constant, of a packet of the way there. Returns -1, or
 * the counter of a refusal.
 */
ALWAYS int merge(struct cpu *s, __u32 at, struct pending *p, const struct committed *c)
{
	struct merging m = { .at = at + 2, .refused = -1 };
	const __u8 *body = s->tag + at;
	__u64 hlc, now;

	if (body[0] != (CONFIG.is_hlc ? FORM_HLC : FORM_VECTOR) || body[1] != CONFIG.context)
		return DROPPED_MALFORMED;
	now = now_by_tick(s);
	if (!is_trusted(c, now))
		return DROPPED_UNTRUSTED;
	if (!is_sealed(body, &s->way, c))
		return DROPPED_MALFORMED;
	if (!CONFIG.is_hlc) {
		/* Without writers the verifier would find that the step is never taken, and remove it. */
		if (CONFIG.writers && !is_merged(body + 2, p, c))
			bpf_loop(CONFIG.writers, merge_entry, &m, 0);
		return m.refused;
	}
	__builtin_memcpy(&hlc, body + 2, 8);
	hlc = bpf_be64_to_cpu(hlc);
	if (is_ahead(c, hlc, now) && is_ahead(c, hlc, bpf_ktime_get_boot_ns()))
		return DROPPED_AHEAD;
	return raise(&p->hlc, hlc) ? DROPPED_FAILED : -1;
}

/* Only the first option is ours, and nothing follows it: as members send it. */
ALWAYS int is_tag_alone(const struct cpu *s, __u32 options)
{
	return options == TAG4_BYTES && s->tag[0] == CONFIG.ipv4_option && s->tag[1] == TAG4_BYTES;
}

/*
 * A tag by another number: from a member of a host where another one is configured, or still was. What such a packet
 * depends on would remain unknown, so it must not pass for one that depends on nothing.
 */
ALWAYS int is_tag_by_another_number(const struct cpu *s)
{
	return s->tag[0] & IPV4_COPIED && s->tag[0] != CONFIG.ipv4_option &&
	       (s->tag[2] == FORM_VECTOR || s->tag[2] == FORM_HLC);
}

ALWAYS int ipv4_without_tag(struct __sk_buff *skb, const struct ipv4 *h)
{
	return h->protocol == IPPROTO_ICMP ? ipv4_error_to_guest(skb, h) : go_on();
}

ALWAYS int ipv4_to_guest(struct __sk_buff *skb)
{
	struct pending *p;
	struct committed *c;
	struct cpu *s;
	__u32 header, options, total, size, kind, is_believed;
	struct ipv4 h, shrunk;
	struct walk *w;
	__u64 changed;
	int refused;

	if (!find_maps(&p, &c, &s))
		return drop(DROPPED_FAILED);
	w = &s->walk;
	if (load(skb, NET, &h, sizeof(h)))
		return drop(DROPPED_UNREADABLE);
	header = (h.version_ihl & 0x0f) * 4;
	total = bpf_ntohs(h.total);
	if (h.version_ihl >> 4 != 4 || header < IPV4_MIN_BYTES)
		return drop(DROPPED_UNREADABLE);
	if (header == IPV4_MIN_BYTES)
		return ipv4_without_tag(skb, &h);
	if (total < header || total > skb->len - NET)
		return drop(DROPPED_UNREADABLE);
	options = header - IPV4_MIN_BYTES;
	if (options < 4 || options > sizeof(s->new))
		return drop(DROPPED_UNREADABLE);
	if (bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->tag, options))
		return drop(DROPPED_UNREADABLE);
	if (is_tag_alone(s, options)) {
		__builtin_memset(w, 0, sizeof(*w));
		w->found = 1;
		w->found_at = NET + IPV4_MIN_BYTES;
		w->found_bytes = TAG4_BYTES;
	} else {
		walk_ipv4(skb, w, header, 0);
	}
	if (w->bad)
		return drop(DROPPED_UNREADABLE);
	if (!w->found && !is_tag_by_another_number(s))
		return ipv4_without_tag(skb, &h);
	s->way.source = from_ipv4(h.source);
	kind = peer_kind(s, &s->way.source);
	is_believed = kind && !CONFIG.off;
	if (is_believed && !came_the_right_way(skb, kind))
		return drop(DROPPED_WRONG_WAY);
	if (!w->found)
		return is_believed ? drop(DROPPED_MALFORMED) : ipv4_without_tag(skb, &h);
	if (is_believed) {
		if (w->found != 1 || w->found_at != NET + IPV4_MIN_BYTES || w->found_bytes != TAG4_BYTES)
			return drop(DROPPED_MALFORMED);
		s->way.destination = from_ipv4(h.destination);
		refused = merge(s, 2, p, c);
		if (refused >= 0)
			return drop(refused);
	}
	shrunk = h;
	if (w->found == 1 && w->found_at == NET + IPV4_MIN_BYTES && !(w->found_bytes & 3)) {
		size = w->found_bytes;
		if (size < 4 || size > options)
			return drop(DROPPED_UNREADABLE);
		if (bpf_skb_adjust_room(skb, -(__s32)size, BPF_ADJ_ROOM_NET, FIXED_FLAGS))
			return drop(DROPPED_FAILED);
		shrunk.version_ihl -= size / 4;
		shrunk.total = bpf_htons(total - size);
		changed = (__u32)~sum_of(s->tag, size);
	} else {
		/* Not where ours are: the place stays, as filling. */
		walk_ipv4(skb, w, header, 1);
		if (w->bad || bpf_skb_load_bytes(skb, NET + IPV4_MIN_BYTES, s->new, options))
			return drop(DROPPED_FAILED);
		changed = (__u64)(__u32)~sum_of(s->tag, options) + sum_of(s->new, options);
	}
	shrunk.check = new_checksum(&h, &shrunk, changed);
	if (bpf_skb_store_bytes(skb, NET, &shrunk, sizeof(shrunk), BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return VERDICT(GO_ON, is_believed ? MERGED : STRIPPED_FOREIGN);
}

APART int ipv6_to_guest(struct __sk_buff *skb)
{
	struct pending *p;
	struct committed *c;
	struct cpu *s;
	struct extensions *e;
	__u8 head[2] = {};
	struct ipv6 h;
	__u32 total, kind;
	int refused;

	if (!find_maps(&p, &c, &s))
		return drop(DROPPED_FAILED);
	e = &s->extensions;
	if (load(skb, NET, &h, sizeof(h)) ||
	    (bpf_ntohl(h.version_class_flow) >> 28) != 6)
		return drop(DROPPED_UNREADABLE);
	total = IPV6_BYTES + payload_of(skb, &h);
	if (total > skb->len - NET)
		return drop(DROPPED_UNREADABLE);
	walk_ipv6(skb, e, &h, 0);
	if (e->bad)
		return drop(DROPPED_UNREADABLE);
	/* GRO writes the jumbo option over the beginning of other headers, so over a tag's (ipv6_gro_complete of Linux 6.18). */
	if (is_jumbo(skb, &h) && (e->next != IPPROTO_TCP || e->at > NET + IPV6_BYTES + JUMBO_BYTES))
		return drop(DROPPED_UNREADABLE);
	if (!e->found)
		return e->next == NEXT_ICMPV6 && !e->fragment ? ipv6_error_to_guest(skb, &h, e->at) : go_on();
	kind = peer_kind(s, &h.source);
	if (!kind || CONFIG.off) {
		walk_ipv6(skb, e, &h, 1);
		if (e->bad)
			return drop(DROPPED_FAILED);
		return VERDICT(GO_ON, STRIPPED_FOREIGN);
	}
	if (!came_the_right_way(skb, kind))
		return drop(DROPPED_WRONG_WAY);
	if (bpf_skb_load_bytes(skb, NET + IPV6_BYTES, head, 2))
		return drop(DROPPED_FAILED);
	if (e->found != 1 || h.next != NEXT_DESTINATION || head[1] != TAG6_BYTES / 8 - 1 ||
	    e->found_at != NET + IPV6_BYTES + 2 || e->found_bytes != 2 + BODY_BYTES)
		return drop(DROPPED_MALFORMED);
	if (bpf_skb_load_bytes(skb, NET + IPV6_BYTES, s->tag, TAG6_BYTES))
		return drop(DROPPED_FAILED);
	s->way.source = h.source;
	s->way.destination = h.destination;
	refused = merge(s, 4, p, c);
	if (refused >= 0)
		return drop(refused);
	if (bpf_skb_adjust_room(skb, -(__s32)TAG6_BYTES, BPF_ADJ_ROOM_NET, FIXED_FLAGS))
		return drop(DROPPED_FAILED);
	h.next = head[0];
	h.payload = bpf_htons(total - IPV6_BYTES - TAG6_BYTES);
	if (bpf_skb_store_bytes(skb, NET, &h, 8, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return VERDICT(GO_ON, MERGED);
}

SEC("tc/egress")
int to_guest(struct __sk_buff *skb)
{
	int verdict = go_on();

	if (skb->protocol == bpf_htons(ETH_P_IP))
		verdict = ipv4_to_guest(skb);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		verdict = ipv6_to_guest(skb);
	return carry_out(skb, verdict);
}

#endif
