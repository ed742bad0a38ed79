"""Families of checkpoints: a file has those that differ by their config alone. `registry.py` knows them all."""
