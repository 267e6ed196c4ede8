/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * ARP and neighbour discovery of the guest. A link does not work without them, so they are not held while the gate is open. They
 * say that the guest is there, so while it is shut nobody hears them: somebody else may be there in the guest's place. Where the
 * host routes, they come to the host alone, in any case. On a bridge a member that is known goes on being known: what goes to its
 * link-layer address and asks for it, or answers it, passes. Nothing else of the guest's choice passes but addresses. Part of
 * tag.bpf.c.
 */
#ifndef TIDELOCK_DISCOVERY_H
#define TIDELOCK_DISCOVERY_H

#define LINK_BYTES 6
#define LINK_SOURCE 6		/* in an Ethernet header */
#define ARP_BYTES 28
/* linux/if_arp.h, which does not compile here. */
#define ARPHRD_ETHER 1
#define ARPOP_REQUEST 1
#define ARPOP_REPLY 2
#define ARP_SENDER 8		/* its link-layer address, then the IPv4 one */
#define ARP_TARGET 18
#define ARP_TARGET_IP 24

#define ROUTER_SOLICITATION 133
#define SOLICITATION 135
#define ADVERTISEMENT 136
#define DISCOVERY_LAST 137
#define SOLICITATION_BYTES 24	/* an advertisement, too: what is asked for lies in it behind 8 bytes */
#define LINK_OPTION_BYTES 8
#define SOURCE_LINK 1
#define TARGET_LINK 2
#define HOPS_OF_A_NEIGHBOUR 255

ALWAYS int is_same_link(const __u8 *one, const __u8 *other)
{
	__u16 a[3], b[3];

	__builtin_memcpy(a, one, LINK_BYTES);
	__builtin_memcpy(b, other, LINK_BYTES);
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

/* Whether it may pass: to one link-layer address, about this IP address. */
ALWAYS int may_be_heard(const __u8 *ethernet, const struct address *about)
{
	struct cpu *s = bpf_map_lookup_elem(&cpus, &zero);

	if (!CONFIG.is_bridged || is_open())
		return 1;
	return s && !(ethernet[0] & 1) && peer_kind(s, about);
}

/* It is written anew: without what was behind it, and with nothing in it where nothing is to be said. */
APART int arp_from_guest(struct __sk_buff *skb)
{
	static const __u8 head[] = { 0, ARPHRD_ETHER, 8, 0, LINK_BYTES, 4, 0 };
	__u8 ethernet[2 * LINK_BYTES], arp[ARP_BYTES], target[LINK_BYTES] = {};
	struct address about;
	__be32 ip;
	__u32 i;

	if (bpf_skb_load_bytes(skb, 0, ethernet, sizeof(ethernet)) ||
	    bpf_skb_load_bytes(skb, NET, arp, sizeof(arp)))
		return drop(DROPPED_SHUT);
	for (i = 0; i < sizeof(head); i++)
		if (arp[i] != head[i])
			return drop(DROPPED_SHUT);
	if ((arp[7] != ARPOP_REQUEST && arp[7] != ARPOP_REPLY) ||
	    !is_same_link(arp + ARP_SENDER, ethernet + LINK_SOURCE))
		return drop(DROPPED_SHUT);
	__builtin_memcpy(&ip, arp + ARP_TARGET_IP, sizeof(ip));
	about = from_ipv4(ip);
	if (!may_be_heard(ethernet, &about))
		return drop(DROPPED_SHUT);
	if (arp[7] == ARPOP_REPLY)
		__builtin_memcpy(target, ethernet, LINK_BYTES);
	if (bpf_skb_store_bytes(skb, NET + ARP_TARGET, target, LINK_BYTES, 0))
		return drop(DROPPED_FAILED);
	/* Who sends it on fills it up with zeros. */
	if (skb->len > NET + ARP_BYTES && bpf_skb_change_tail(skb, NET + ARP_BYTES, 0))
		return drop(DROPPED_FAILED);
	return go_on();
}

/*
 * A message of neighbour discovery, whose type is `type`. What has more than it must, or what a router would say, waits like
 * any other packet: it is left to the queue, which knows the same messages (netfilter/src/packet.rs).
 */
APART int discovery_from_guest(struct __sk_buff *skb, const struct ipv6 *h, __u32 type)
{
	__u32 bytes = bpf_ntohs(h->payload), plain = type == ROUTER_SOLICITATION ? 8 : SOLICITATION_BYTES;
	__u8 ethernet[2 * LINK_BYTES], m[SOLICITATION_BYTES] = {}, option[LINK_OPTION_BYTES];
	struct address about = {};
	int is_near;

	if (type != ROUTER_SOLICITATION && type != SOLICITATION && type != ADVERTISEMENT)
		return gate(COUNTERS);
	if (bpf_ntohl(h->version_class_flow) != 6u << 28 || h->hop_limit != HOPS_OF_A_NEIGHBOUR ||
	    (bytes != plain && bytes != plain + LINK_OPTION_BYTES) || skb->len != NET + IPV6_BYTES + bytes)
		return gate(COUNTERS);
	if (bpf_skb_load_bytes(skb, 0, ethernet, sizeof(ethernet)) ||
	    bpf_skb_load_bytes(skb, NET + IPV6_BYTES, m, 8) ||
	    (plain > 8 && bpf_skb_load_bytes(skb, NET + IPV6_BYTES, m, SOLICITATION_BYTES)))
		return gate(COUNTERS);
	/* The flags of an advertisement are three bits. */
	if (m[1] || (type == ADVERTISEMENT ? m[4] & 0x1f : m[4]) || m[5] || m[6] || m[7])
		return gate(COUNTERS);
	if (bytes > plain &&
	    (bpf_skb_load_bytes(skb, NET + IPV6_BYTES + plain, option, sizeof(option)) ||
	     option[0] != (type == ADVERTISEMENT ? TARGET_LINK : SOURCE_LINK) || option[1] != 1 ||
	     !is_same_link(option + 2, ethernet + LINK_SOURCE)))
		return gate(COUNTERS);
	/* An answer is about the guest itself: who gets it counts. */
	if (type == ADVERTISEMENT)
		about = h->destination;
	else
		__builtin_memcpy(&about, m + 8, sizeof(about));
	/* A router sends these no further: ff02::/16 and fe80::/10. */
	is_near = (h->destination.bytes[0] == 0xff && h->destination.bytes[1] == 2) ||
		  (h->destination.bytes[0] == 0xfe && (h->destination.bytes[1] & 0xc0) == 0x80);
	if ((is_near || CONFIG.is_bridged) && may_be_heard(ethernet, &about))
		return VERDICT(PASS, COUNTERS);
	return leave_to_queue();
}

#endif
