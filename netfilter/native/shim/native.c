// SPDX-License-Identifier: GPL-2.0-only
/*
 * The kernel programs as functions of the host: netfilter/bpf/tag.bpf.c as it is, with the headers in include/ in the
 * place of libbpf's. Their maps are what the caller of RUN passes, so that each member of a simulation has its own.
 * src/call.rs says the same as struct call in Rust. RUN and CPU_BYTES are names that the build gives to each copy.
 */
#include "tag.bpf.c"

struct address_value {
	struct address address;
	__u32 value;
};

struct way_value {
	struct way way;
	__u32 value;
};

struct address_pending {
	struct address address;
	struct pending *pending;
};

/* Arguments of a call of a program. */
struct call {
	const struct config *config;
	struct pending *pending;
	struct committed *committed;
	struct crossing *crossing;
	struct cpu *cpu;
	const struct address_value *peers;
	const struct way_value *ways;
	const struct address_pending *neighbours;
	const __u32 *interfaces;
	__u64 peers_count;
	__u64 ways_count;
	__u64 neighbours_count;
	__u64 interfaces_count;
	__u64 boot_ns;
	__u8 *frame;		/* HEADROOM_BYTES lie before it; moved if the frame becomes longer or shorter */
	__u32 frame_bytes;
	__u32 interface;	/* that it came by */
	__u32 mark;		/* only out */
	__u32 has_judge;
	__u32 to_guest;
};

static __thread const struct call *current;

SEC("config") const volatile struct config *config_of_member(void)
{
	return current->config;
}

static inline __u64 bpf_ktime_get_boot_ns(void)
{
	return current->boot_ns;
}

/* 250 ticks a second. */
static inline __u64 bpf_jiffies64(void)
{
	return current->boot_ns / 4000000 + 1;
}

static inline int has_judge(void)
{
	return current->has_judge;
}

#define LOOK_UP(IN, COUNT, MEMBER, RESULT)                                                                         \
	do {                                                                                                       \
		for (i = 0; i < COUNT; i++)                                                                        \
			if (!memcmp(&IN[i].MEMBER, key, sizeof(IN[i].MEMBER)))                                     \
				return (void *)RESULT;                                                             \
		return 0;                                                                                          \
	} while (0)

static inline void *bpf_map_lookup_elem(const void *map, const void *key)
{
	const struct call *c = current;
	__u64 i;

	if (map == &pending)
		return c->pending;
	if (map == &committed)
		return c->committed;
	if (map == &crossing)
		return c->crossing;
	if (map == &cpus)
		return c->cpu;
	if (map == &peers)
		LOOK_UP(c->peers, c->peers_count, address, &c->peers[i].value);
	if (map == &ways)
		LOOK_UP(c->ways, c->ways_count, way, &c->ways[i].value);
	if (map == &neighbours)
		LOOK_UP(c->neighbours, c->neighbours_count, address, c->neighbours[i].pending);
	if (map == &interfaces) {
		for (i = 0; i < c->interfaces_count; i++)
			if (c->interfaces[i] == *(const __u32 *)key)
				return (void *)&c->interfaces[i];
		return 0;
	}
	/* An inner map of the map of maps is its only value. */
	return (void *)map;
}

__u64 CPU_BYTES(void)
{
	return sizeof(struct cpu);
}

/* Returns the program's verdict. */
__s32 RUN(struct call *call)
{
	struct __sk_buff skb = {
		.len = call->frame_bytes,
		.ingress_ifindex = call->interface,
		.data = (__u64)call->frame,
		.data_end = (__u64)call->frame + call->frame_bytes,
	};
	__u16 protocol;
	int verdict;

	memcpy(&protocol, call->frame + 12, sizeof(protocol));
	skb.protocol = protocol;
	current = call;
	verdict = call->to_guest ? to_guest(&skb) : from_guest(&skb);
	current = 0;
	call->frame = (__u8 *)skb.data;
	call->frame_bytes = skb.len;
	call->mark = skb.mark;
	return verdict;
}
