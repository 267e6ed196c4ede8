"""Torture: real processes under random faults from a seed, over and over, and the rules checked in each round.

Kinds of rounds take turns. In a *disk round* (`disk_round.py`) and in a *failback round* (`failback_round.py`), which
goes to the other site and home, the test itself is the guest and remembers, byte by byte, what the disk may hold, also
at points in time (`marks.py`). In a *client round* (`client_round.py`) guests with databases serve clients, and what
these were told is compared with what views of the past and a recovery bring back (`past_rows.py`).

Invariant: a round is decided by its seed, as far as the machine's timing lets it; a violation is reported with the
command that runs it again.
"""
