"""What the pages say around their tables."""

PAGE = """# How fast

Measured by `make bench`, which wrote this page, the charts and the JSON files beside it. Machines differ, so what is
compared took turns in one run, and each claim is a ratio of turns that stood beside each other: the median, and in
brackets the least and the greatest. Both sites, the clients and the WAN share the cores of this one machine.
"""

ALONE = """Each part can be measured alone: `make bench ONLY=a,c`. `make bench QUICK=1` tries everything in a few
minutes and writes to `out/bench-quick/`.
"""

NBD = """## (a) The NBD path without replication

`tidelock` here is the daemon's tap, sequencer and local disk (`daemon/examples/unreplicated.rs`), whose records count
as replicated at once. fio's `nbd` engine asks all servers the same on the same image, one server at a time. The ratio
is tidelock's operations per second over those of the best of the others **that do the same work**: nbdkit has no
`O_DIRECT`, so on a disk it answers a write when the page cache has it (also with `cache=none`, which writes out and
drops behind itself). There its figures are in brackets, and it is compared where each write or batch is flushed, and
where it reads from the disk. With the image in memory (tmpfs) nobody waits for a disk and all are compared: what is
left is the path itself.
"""

NBD_PROFILES = """What bounds those that are short, from `perf record` on tidelock's server. Where it takes much less
than a core, it waits: for the disk, for the client, and for being woken.
"""

QEMU_AIO = """qemu-nbd was quicker with `--aio=native` in {native} and with `--aio=io_uring` in {uring} of these
workloads; both are measured, and the better one counts.

One owner thread serves all connections of a VM's disks: it is what keeps the order of writes without locks. So several
connections at once are bound by one core, while nbdkit, which keeps no order, uses a thread for each request. QEMU uses
one connection for each disk.
"""

REPLICATION = """## (b) With replication

The same path, `pipelined`, with a backup server at the other end of a WAN of {rtt_ms} ms RTT (TLS, journal, image),
beside the path without. A far site has a disk of its own and this machine has only one, so the backup's files are in
memory here; see below for everything on one disk. After each turn the backup is waited for. `cores` is what each
program kept busy in a turn; the machine's cores are shared by fio, the daemon, the backup server and, where the kernel
has no netem, the program that delays the packets, which a real WAN does not cost.

The first copy of the disk ran at {initial_copy_mib_per_s:,.0f} MiB/s.
"""

ONE_DISK = """
With the backup's journal and images on the same disk as the guest's image, each write goes to that disk three times.
The first copy ran at {initial_copy_mib_per_s:,.0f} MiB/s.
"""

HALF_LOAD = """
Where the ratio is short of 0.95, the same workload held to half of the plain path's speed, so that there are cores for
both sites:
"""

COMMITS = """## (c) PostgreSQL

PostgreSQL 15 with `fsync = on` runs on this machine's kernel in a guest's network namespace, its files on ext4 on the
protected disk (through FUSE and a loop device, `bench/postgres.py`), and pgbench in the clients' namespace asks it
through the gate. *unprotected* is a second database on the same stack without a backup and without a gate. A client
sends its next transaction when the last was answered, so with few clients a mode that holds replies is bound by clients
per round trip; that is the reply time's price, not the server's. RTTs are the WAN's; clients are near.
"""

GATE = """## (d) The gate

Real packets between namespaces of guest, host and client (`netfilter/examples/gate-bench.rs`): 64-byte datagrams as
fast as the guest can send them, one TCP stream, round trips. *covered*: queued, and let out at once because C covers
the stamp. *uncovered*: held until C has risen; what the gate adds is the time from the moment that C is told to the
packet's arrival at the client. Packet filter: {packet_filter}.
"""

MEMORY = """## (e) Memory

Resident memory of both processes in {seconds:.0f} s at full speed over {rtt_ms} ms. The daemon holds what the backup
has not acknowledged, up to the configured backlog; beyond it guests' writes wait.
"""
