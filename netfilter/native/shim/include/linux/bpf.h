/* SPDX-License-Identifier: GPL-2.0-only */
/* The kernel's header, with a packet whose addresses have the host's width. */
#ifndef TIDELOCK_NATIVE_BPF_H
#define TIDELOCK_NATIVE_BPF_H

#define __sk_buff kernels_sk_buff
#include_next <linux/bpf.h>
#undef __sk_buff

/* Only the members that the programs use. A frame lies in one piece, as headers nearly always do in the kernel. */
struct __sk_buff {
	__u32 len;
	__u32 mark;
	__u32 protocol;
	__u32 vlan_present;
	__u32 ingress_ifindex;
	__u32 gso_size;
	__u64 data;
	__u64 data_end;
};

#endif
