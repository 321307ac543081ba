"""What the books cost, and whether they tell known times; regime and method in
stepahead.sim.recorder.

Goals: hidden and exposed within 3 % of a known H; at most 1 us an event.  Prints tables and, last,
one JSON line.
"""

import json

from rich.console import Console

from stepahead.sim.recorder import measure, tables

if __name__ == "__main__":
    found = measure()
    for table in tables(found):
        Console().print(table)
    print(json.dumps(found))
