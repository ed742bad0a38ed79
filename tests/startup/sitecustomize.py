"""Runs at the start of each process that a test starts: PYTHONPATH has this folder, see tests/conftest.py."""

import gc

# Graphs and programs are made of many small objects, which live long. To look for garbage among them as often as Python
# does would be a sixth of all work.
gc.set_threshold(50_000, 20, 100)
