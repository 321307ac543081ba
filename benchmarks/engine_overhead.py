"""The engine around a near-free model; regime and method in stepahead.sim.overhead.

Goals: at most 0.4 / 0.6 / 1.5 ms a step at batch 1 / 32 / 256.  Prints a table and, last, one JSON
line.
"""

from stepahead.sim.overhead import main

if __name__ == "__main__":
    main()
