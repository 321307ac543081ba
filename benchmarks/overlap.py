"""TPOT of both loops around a sleeping device; regime and method in stepahead.sim.overlap.

Goals: serial within 10 % of F + H, overlap at most 1.03 x max(F, H).  Prints a table and, last,
one JSON line.
"""

import json

from rich.console import Console

from stepahead.sim.overlap import measure, table

if __name__ == "__main__":
    found = measure()
    Console().print(table(found))
    print(json.dumps(found))
