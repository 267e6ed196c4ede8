"""`make bench`: how fast Tidelock is beside others, measured in one run on one machine.

Machines differ and are noisy, so every claim is a ratio: the things that are compared take turns (A B A B ...),
each turn of one is divided by the turn of the other beside it, and a table shows the least, the middle and the
greatest of these ratios.
"""
