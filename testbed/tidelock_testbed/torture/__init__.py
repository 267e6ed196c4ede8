"""Torture: real processes under random faults from a seed, over and over, with the rules checked after each round.

Two kinds of rounds take turns. In a *disk round* (`disk_round.py`) the test itself is the guest and remembers, byte by
byte, what the disk may hold. In a *client round* (`client_round.py`) a guest with a database serves clients, and what
these were told is compared with what a recovery brings back.

Invariant: a round is decided by its seed, as far as the machine's timing lets it; a violation is reported with the
command that runs it again.
"""
