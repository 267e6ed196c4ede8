"""Two sites on one machine: namespaces, an emulated WAN, real guests, clients that keep a ledger, drills."""
