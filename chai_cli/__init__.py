"""chai: a file of prompts into videos, reusing what related prompts already rendered."""

import os

# Threads that spin while they wait for each other take twenty times as long when a second such program wants the same cores.
# Read by GNU's OpenMP library when torch is imported; an own setting counts.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
