"""Steps a second of 1, 2 and 3 sleeping stages, by depth; regime in stepahead.sim.pipeline.

Goal: at the default depth, stages + 1, at least 0.9 of 1 / max(F, H).  Prints a table and, last,
one JSON line.
"""

import json

from rich.console import Console

from stepahead.sim.pipeline import measure, table

if __name__ == "__main__":
    found = measure()
    Console().print(table(found))
    print(json.dumps(found))
