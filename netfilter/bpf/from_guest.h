/* SPDX-License-Identifier: GPL-2.0-only */
/* From the guest: to a member with a tag, to the outside if covered, else to the queue. Part of tag.bpf.c. */
#ifndef TIDELOCK_FROM_GUEST_H
#define TIDELOCK_FROM_GUEST_H

ALWAYS int ipv4_from_guest(struct __sk_buff *skb)
{
	struct pending *p, *beside;
	struct committed *c;
	struct cpu *s;
	__u32 header, total, headers, at, why, kind, room = TAG4_BYTES;
	int is_tcp, later;
	struct way way;
	struct ipv4 h;
	struct tcp tcp = {};
	struct walk *w;
	__s64 flags;

	if (!find_maps(&p, &c, &s))
		return drop(DROPPED_FAILED);
	w = &s->walk;
	if (load(skb, NET, &h, sizeof(h)))
		return gate(GATED_UNREADABLE);
	header = (h.version_ihl & 0x0f) * 4;
	total = bpf_ntohs(h.total);
	if (h.version_ihl >> 4 != 4 || header < IPV4_MIN_BYTES || total < header ||
	    !ends_where_it_says(skb, total))
		return gate(GATED_UNREADABLE);
	if (header > IPV4_MIN_BYTES) {
		walk_ipv4(skb, w, header, 0);
		if (w->found)
			return drop(DROPPED_GUESTS_OWN);
		if (w->bad || w->routed)
			return gate(GATED_UNREADABLE);
	}
	way.source = from_ipv4(h.source);
	way.destination = from_ipv4(h.destination);
	kind = kind_of(s, &way);
	if (!kind)
		return gate(COUNTERS);

	at = NET + header;
	later = (bpf_ntohs(h.fragment) & 0x1fff) != 0;
	is_tcp = h.protocol == IPPROTO_TCP && !later;
	headers = h.protocol == IPPROTO_UDP ? header + UDP_BYTES : 0;
	if (is_tcp) {
		if (load(skb, at, &tcp, sizeof(tcp)))
			return gate(GATED_UNREADABLE);
		if (header == IPV4_MIN_BYTES && !(bpf_ntohs(h.fragment) & 0x3fff) &&
		    is_pure_ack(skb, &tcp, at, total - header))
			return let_pass(UNTAGGED_ACKS);
		headers = header + (tcp.offset >> 4) * 4;
	}
	if (CONFIG.off)
		return let_pass(UNTAGGED_FOR_A_DEMONSTRATION);
	beside = kind == WAY_HERE ? neighbour(&way.destination) : 0;
	if (beside)
		return hand_over(p, c, beside);
	if (is_tcp && (tcp.flags & FLAG_SYN))
		lower_mss(skb, &tcp, at, IPV4_MIN_BYTES + room);
	if (!is_complete(p, c))
		return gate(GATED_INCOMPLETE);
	if (is_covered(p, c))
		return let_pass(UNTAGGED_COVERED);
	if (CONFIG.path_strips_options)
		return gate(GATED_PATH);
	if (header + room > IPV4_MAX_BYTES)
		return gate(GATED_NO_ROOM);
	if (!is_trusted(c, now_by_tick(s)) || !is_believable(p, c))
		return gate(GATED_UNTRUSTED);
	flags = room_flags(skb, total, headers, room, is_tcp, bpf_ntohs(h.fragment) & 0x3fff, &why);
	if (flags < 0)
		return gate(why);
	/* Opens the gap behind the first 20 bytes: ours comes before the guest's own options. */
	if (bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_NET, flags))
		return gate(GATED_REFUSED);

	s->tag[0] = CONFIG.ipv4_option;
	s->tag[1] = room;
	write_body(s->tag + 2, &way, p, c);
	s->header = h;
	s->header.version_ihl += room / 4;
	s->header.total = bpf_htons(total + room);
	s->header.check = new_checksum(&h, &s->header, sum_of(s->tag, room));
	if (bpf_skb_store_bytes(skb, NET, &s->header, IPV4_MIN_BYTES + room, BPF_F_RECOMPUTE_CSUM))
		return drop(DROPPED_FAILED);
	return let_pass(TAGGED);
}

APART int ipv6_from_guest(struct __sk_buff *skb)
{
	struct pending *p, *beside;
	struct committed *c;
	struct cpu *s;
	__u32 total, headers, why, kind, room = TAG6_BYTES;
	struct extensions *e;
	struct tcp tcp = {};
	struct way way;
	struct ipv6 h;
	__u8 icmp = 0;
	__s64 flags;
	int is_tcp;

	if (!find_maps(&p, &c, &s))
		return drop(DROPPED_FAILED);
	e = &s->extensions;
	if (load(skb, NET, &h, sizeof(h)))
		return gate(GATED_UNREADABLE);
	total = IPV6_BYTES + bpf_ntohs(h.payload);
	/* A payload of length 0 is a jumbogram, or nothing at all. */
	if ((bpf_ntohl(h.version_class_flow) >> 28) != 6 || !h.payload ||
	    !ends_where_it_says(skb, total))
		return gate(GATED_UNREADABLE);
	if (h.next == NEXT_ICMPV6 && !bpf_skb_load_bytes(skb, NET + IPV6_BYTES, &icmp, 1) &&
	    icmp >= ROUTER_SOLICITATION && icmp <= DISCOVERY_LAST)
		return discovery_from_guest(skb, &h, icmp);
	walk_ipv6(skb, e, &h, 0);
	if (e->found)
		return drop(DROPPED_GUESTS_OWN);
	if (e->bad || e->routed)
		return gate(GATED_UNREADABLE);
	way.source = h.source;
	way.destination = h.destination;
	kind = kind_of(s, &way);
	if (!kind)
		return gate(COUNTERS);

	is_tcp = e->next == IPPROTO_TCP && !e->later_fragment;
	headers = e->next == IPPROTO_UDP ? e->at - NET + UDP_BYTES : 0;
	if (is_tcp) {
		if (bpf_skb_load_bytes(skb, e->at, &tcp, sizeof(tcp)))
			return gate(GATED_UNREADABLE);
		if (h.next == IPPROTO_TCP && is_pure_ack(skb, &tcp, e->at, e->end - e->at))
			return let_pass(UNTAGGED_ACKS);
		headers = e->at - NET + (tcp.offset >> 4) * 4;
	}
	if (CONFIG.off)
		return let_pass(UNTAGGED_FOR_A_DEMONSTRATION);
	beside = kind == WAY_HERE ? neighbour(&way.destination) : 0;
	if (beside)
		return hand_over(p, c, beside);
	if (is_tcp && (tcp.flags & FLAG_SYN))
		lower_mss(skb, &tcp, e->at, IPV6_BYTES + room);
	if (!is_complete(p, c))
		return gate(GATED_INCOMPLETE);
	if (is_covered(p, c))
		return let_pass(UNTAGGED_COVERED);
	if (CONFIG.path_strips_options)
		return gate(GATED_PATH);
	/* A hop-by-hop header must stay the first. */
	if (h.next == NEXT_HOP_BY_HOP)
		return gate(GATED_NO_ROOM);
	if (!is_trusted(c, now_by_tick(s)) || !is_believable(p, c))
		return gate(GATED_UNTRUSTED);
	flags = room_flags(skb, total, headers, room, is_tcp, e->fragment, &why);
	if (flags < 0)
		return gate(why);
	if (bpf_skb_adjust_room(skb, room, BPF_ADJ_ROOM_NET, flags))
		return gate(GATED_REFUSED);

	s->tag[0] = h.next;
	s->tag[1] = room / 8 - 1;
	s->tag[2] = CONFIG.ipv6_option;
	s->tag[3] = BODY_BYTES;
	write_body(s->tag + 4, &way, p, c);
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
	return let_pass(TAGGED);
}

/* A bridge takes these for itself: what has such an address comes to the host past the rules. 01:80:c2:00:00:00 to 0f. */
ALWAYS int is_for_the_bridge(struct __sk_buff *skb)
{
	__u8 to[6];

	return load(skb, 0, to, sizeof(to)) ||
	       (to[0] == 1 && to[1] == 0x80 && to[2] == 0xc2 && !to[3] && !to[4] && to[5] < 16);
}

SEC("tc/ingress")
int from_guest(struct __sk_buff *skb)
{
	int verdict = go_on();

	/* Whatever was there before us has no say in what passes. */
	skb->mark &= ~CONFIG.mark_mask;
	/* A member talks to others on its own network. The rules judge the rest. */
	if (CONFIG.is_bridged && is_for_the_bridge(skb))
		verdict = drop(DROPPED_SHUT);
	else if (skb->protocol == bpf_htons(ETH_P_ARP))
		verdict = arp_from_guest(skb);
	else if (skb->vlan_present)
		verdict = leave_to_queue();
	else if (skb->protocol == bpf_htons(ETH_P_IP))
		verdict = ipv4_from_guest(skb);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		verdict = ipv6_from_guest(skb);
	if (ACTION(verdict) == GATE) {
		count(COUNTER(verdict));
		bpf_tail_call(skb, &judges, 0);
		/* Nobody is there to judge, nor to hold it. */
		verdict = drop(DROPPED_UNJUDGED);
	}
	return carry_out(skb, verdict);
}

#endif
