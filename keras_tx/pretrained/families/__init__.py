"""Families of checkpoints. Models that differ only by their config share a file. `registry.py` lists all of them."""
