"""TPOT of both loops around a sleeping device; regime and method in stepahead.sim.overlap.

Goals: serial within 10 % of F + H, overlap at most 1.03 x max(F, H).  Prints a table and, last,
one JSON line.
"""

from stepahead.sim.overlap import main

if __name__ == "__main__":
    main()
