"""What a steady step costs the host, by rows; regime and method in stepahead.sim.host_cost.

Goals: at most 60 us at 256 rows and 120 us at 1,024; at most 0.08 us more a row; a wave of 256
arrivals or finishes at most 5 ms; planning a repeat takes as long for 1,024 rows as for one.
Prints a table and, last, one JSON line.
"""

import json

from rich.console import Console

from stepahead.sim.host_cost import measure, table

if __name__ == "__main__":
    found = measure()
    Console().print(table(found))
    print(json.dumps(found))
