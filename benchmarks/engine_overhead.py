"""The engine around a near-free model; regime and method in stepahead.sim.overhead.

Goals: at most 0.4 / 0.6 / 1.5 ms a step at batch 1 / 32 / 256.  Prints a table and, last, one JSON
line.
"""

import json

from rich.console import Console

from stepahead.sim.overhead import measure, table

if __name__ == "__main__":
    found = measure()
    Console().print(table(found))
    print(json.dumps(found))
