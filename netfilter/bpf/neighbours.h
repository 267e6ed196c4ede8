/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * P of the receiver, raised: by a tag (to_guest.h), or, where the receiver is on this host, by the sender's P when the
 * packet leaves the sender. That is sooner than a tag would come, and so says no less (docs/causality.md). The packet
 * is left as it is. Part of tag.bpf.c.
 */
#ifndef TIDELOCK_NEIGHBOURS_H
#define TIDELOCK_NEIGHBOURS_H

/* Entries never fall. Returns 0, or -1 if the others never let us. */
ALWAYS int raise(__u64 *entry, __u64 to)
{
	__u64 old, seen;
	int i;

	old = NOW_OR_LATER(*entry);
	for (i = 0; i < RAISE_TRIES; i++) {
		if (old >= to)
			return 0;
		seen = __sync_val_compare_and_swap(entry, old, to);
		if (seen == old)
			return 0;
		old = seen;
	}
	return -1;
}

/*
 * P of the member on this host that has this address. While a daemon takes over from an earlier one, the programs of
 * both are here, and may write in different forms: then they talk by tags, which name theirs.
 */
ALWAYS struct pending *neighbour(const struct address *address)
{
	void *map = bpf_map_lookup_elem(&neighbours, address);
	struct pending *p = map ? bpf_map_lookup_elem(map, &zero) : 0;

	return p && NOW_OR_LATER(p->run) == CONFIG.run ? p : 0;
}

struct handing {
	struct pending *to;
	const struct pending *from;
	int failed;
};

static long hand_entry(__u32 i, void *context)
{
	struct handing *h = context;

	if (i >= WRITERS_MAX)
		return 1;
	h->failed |= raise(&h->to->entries[i], NOW_OR_LATER(h->from->entries[i]));
	return 0;
}

/* To a member on this host. Called after the packet was taken up. */
ALWAYS int hand_over(const struct pending *p, const struct committed *c, struct pending *to)
{
	struct handing h = { .to = to, .from = p };

	if (!is_complete(p, c))
		return gate(GATED_INCOMPLETE);
	if (CONFIG.is_hlc)
		h.failed = raise(&to->hlc, NOW_OR_LATER(p->hlc));
	else if (CONFIG.writers && !reaches(to->entries, p->entries))
		bpf_loop(CONFIG.writers, hand_entry, &h, 0);
	if (h.failed)
		return drop(DROPPED_FAILED);
	return let_pass(MERGED_HERE);
}

#endif
