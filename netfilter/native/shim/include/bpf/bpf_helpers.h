/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The helpers that the programs call, on a frame in memory, with the kernel's rules for lengths and errors
 * (net/core/filter.c). native.c has those that depend on the maps.
 */
#ifndef TIDELOCK_NATIVE_BPF_HELPERS_H
#define TIDELOCK_NATIVE_BPF_HELPERS_H

#include <errno.h>
#include <limits.h>
#include <string.h>

/* The program text is compiled several times, with and without planted faults: all its names stay in its object. */
#define SEC(name) __attribute__((internal_linkage, used))

#define __uint(name, value) int(*name)[value]
#define __type(name, value) value *name
#define __array(name, value) value *name[]

/*
 * Makes the definition of CONFIG, which the loader fills in once for each member, a declaration of this function, and
 * each use of CONFIG a call of it.
 */
struct config;
SEC("config") const volatile struct config *config_of_member(void);
#define CONFIG (*config_of_member())

static inline void *bpf_map_lookup_elem(const void *map, const void *key);
static inline __u64 bpf_ktime_get_boot_ns(void);
static inline __u64 bpf_jiffies64(void);
static inline int has_judge(void);

/* Does not return if it finds a program. */
#define bpf_tail_call(skb, map, index)                                                                             \
	do {                                                                                                       \
		(void)(map);                                                                                       \
		if (has_judge())                                                                                   \
			return judge(skb);                                                                         \
	} while (0)

static inline long bpf_loop(__u32 times, long (*step)(__u32, void *), void *context, __u64 flags)
{
	__u32 i;

	for (i = 0; i < times; i++)
		if (step(i, context))
			return i + 1;
	return i;
}

static inline __u8 *bytes_of(const struct __sk_buff *skb)
{
	return (__u8 *)skb->data;
}

static inline int is_within(const struct __sk_buff *skb, __u32 at, __u32 bytes)
{
	return at <= INT_MAX && bytes && (__u64)at + bytes <= skb->len;
}

static inline long bpf_skb_load_bytes(const struct __sk_buff *skb, __u32 at, void *to, __u32 bytes)
{
	if (!is_within(skb, at, bytes)) {
		memset(to, 0, bytes);
		return -EFAULT;
	}
	memcpy(to, bytes_of(skb) + at, bytes);
	return 0;
}

static inline long bpf_skb_store_bytes(struct __sk_buff *skb, __u32 at, const void *from, __u32 bytes, __u64 flags)
{
	if (!is_within(skb, at, bytes))
		return -EFAULT;
	memcpy(bytes_of(skb) + at, from, bytes);
	return 0;
}

/* A 16-bit sum in a packet, after two bytes that it is about have changed. `flags`: their number. */
static inline long bpf_l4_csum_replace(struct __sk_buff *skb, __u32 at, __u64 old, __u64 new, __u64 flags)
{
	__u16 check;
	__u32 sum;

	if (flags != 2 || at > 0xffff || at & 1 || !is_within(skb, at, sizeof(check)))
		return -EFAULT;
	memcpy(&check, bytes_of(skb) + at, sizeof(check));
	sum = (__u16)~check + (__u16)~old + (__u16)new;
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	check = ~sum;
	memcpy(bytes_of(skb) + at, &check, sizeof(check));
	return 0;
}

static inline long bpf_skb_change_tail(struct __sk_buff *skb, __u32 len, __u64 flags)
{
	/* Only shorter: the programs make no packet longer at its end. */
	if (flags || len > skb->len || len < 14)
		return -EINVAL;
	skb->len = len;
	skb->data_end = skb->data + len;
	return 0;
}

/* Bytes in front of a frame, for what is added to it. */
#define HEADROOM_BYTES 320

/* Makes or closes a gap behind the fixed network header. Frames of offloads are not in this model. */
static inline long bpf_skb_adjust_room(struct __sk_buff *skb, __s32 by, __u32 mode, __u64 flags)
{
	__u32 network = skb->protocol == bpf_htons(0x0800) ? 20 : 40, before = 14 + network;
	__u32 size = by < 0 ? -by : by;

	if (mode != BPF_ADJ_ROOM_NET || size > HEADROOM_BYTES)
		return -EFAULT;
	if (skb->protocol != bpf_htons(0x0800) && skb->protocol != bpf_htons(0x86dd))
		return -ENOTSUP;
	if (by < 0 ? skb->len < before + size : skb->len < before)
		return -ENOTSUP;
	memmove(bytes_of(skb) - by, bytes_of(skb), before);
	skb->data -= (__s64)by;
	skb->len += by;
	if (by > 0)
		memset(bytes_of(skb) + before, 0, size);
	return 0;
}

#endif
