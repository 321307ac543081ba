"""What the CPU computes in machine code of its own: written in Python, compiled by numba for the
machine that runs it.  Each kernel has a twin in plain torch or numpy, in the tests.

It knows addresses, numbers and threads; it must not know models, plans or requests.
"""
