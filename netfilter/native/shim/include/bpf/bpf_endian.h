/* SPDX-License-Identifier: GPL-2.0-only */
/* libbpf's byte orders. */
#ifndef TIDELOCK_NATIVE_BPF_ENDIAN_H
#define TIDELOCK_NATIVE_BPF_ENDIAN_H

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define bpf_htons(x) ((__u16)__builtin_bswap16(x))
#define bpf_htonl(x) __builtin_bswap32(x)
#define bpf_cpu_to_be64(x) __builtin_bswap64(x)
#else
#define bpf_htons(x) ((__u16)(x))
#define bpf_htonl(x) ((__u32)(x))
#define bpf_cpu_to_be64(x) ((__u64)(x))
#endif
#define bpf_ntohs(x) bpf_htons(x)
#define bpf_ntohl(x) bpf_htonl(x)
#define bpf_be64_to_cpu(x) bpf_cpu_to_be64(x)

#endif
