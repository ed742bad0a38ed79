"""Attacks on the package: damaged files, strange texts, kills, full disks, threads."""
