//! Known faults in the programs, to show that the simulator's checkers find them. Each is a copy of the program text
//! with replacements in it. The build fails if a text that is to be replaced does not stand there exactly once.

/// A fault in a copy of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A tag is read and not merged.
    MergeForgotten,
    /// A packet goes to a member on the same host, whose P stays as it was.
    HandingOverForgotten,
    /// A tag is taken away before anybody has read it.
    StripBeforeMerge,
    /// A packet gets no tag as soon as C has the entries of all writers but the last one.
    LastEntryForgotten,
    /// A stranger's tag is merged: neither its address nor its seal nor its entries are looked at.
    OutsiderMerged,
    /// The upper half of a tag's entries is rebuilt next to P, which may know nothing of a writer.
    RebuiltNextToPending,
    /// A tag's entries have no upper half.
    WrapForgotten,
}

/// A text of the programs, and the text in its place.
pub type Replacement = (&'static str, &'static str);

impl Planted {
    /// All of them.
    pub const ALL: [Planted; 7] = [
        Planted::MergeForgotten,
        Planted::HandingOverForgotten,
        Planted::StripBeforeMerge,
        Planted::LastEntryForgotten,
        Planted::OutsiderMerged,
        Planted::RebuiltNextToPending,
        Planted::WrapForgotten,
    ];

    /// Name of the copy's object.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Planted::MergeForgotten => "merge_forgotten",
            Planted::HandingOverForgotten => "handing_over_forgotten",
            Planted::StripBeforeMerge => "strip_before_merge",
            Planted::LastEntryForgotten => "last_entry_forgotten",
            Planted::OutsiderMerged => "outsider_merged",
            Planted::RebuiltNextToPending => "rebuilt_next_to_pending",
            Planted::WrapForgotten => "wrap_forgotten",
        }
    }

    /// The difference to the programs.
    #[must_use]
    pub fn replacements(self) -> &'static [Replacement] {
        match self {
            Planted::MergeForgotten => &[(
                "\tif (!is_sealed(body, &s->way, c))\n\t\treturn DROPPED_MALFORMED;\n",
                "\tif (is_sealed(body, &s->way, c))\n\t\treturn -1;\n",
            )],
            Planted::HandingOverForgotten => &[
                (".to = to, .from = p };", ".to = to, .from = to };"),
                ("raise(&to->hlc, NOW_OR_LATER(p->hlc))", "raise(&to->hlc, 0)"),
            ],
            Planted::StripBeforeMerge => &[(
                "\t\ts->last_peer_kind = found ? *found : 0;\n",
                "\t\ts->last_peer_kind = found && 0;\n",
            )],
            Planted::LastEntryForgotten => &[(
                "\t\t\tbreak;\n\t\tif (NOW_OR_LATER(entries[i]) < NOW_OR_LATER(wanted[i]))\n",
                "\t\t\tbreak;\n\t\tif (i + 1 < CONFIG.writers && NOW_OR_LATER(entries[i]) < NOW_OR_LATER(wanted[i]))\n",
            )],
            Planted::OutsiderMerged => &[
                (
                    "\t\ts->last_peer_kind = found ? *found : 0;\n",
                    "\t\ts->last_peer_kind = found ? *found : WAY_ELSEWHERE;\n",
                ),
                ("\tif (!is_sealed(body, &s->way, c))\n", "\tif (0)\n"),
                (
                    "\treturn entry <= reachable || entry <= covered || entry <= pending;\n",
                    "\treturn 1;\n",
                ),
            ],
            Planted::RebuiltNextToPending => &[(
                "\t__u64 base = pending < covered ? covered : pending;\n",
                "\t__u64 base = pending;\n",
            )],
            Planted::WrapForgotten => {
                &[("\t*entry = base + (__u64)(__s64)ahead;\n", "\t*entry = bpf_ntohl(low);\n")]
            }
        }
    }
}
