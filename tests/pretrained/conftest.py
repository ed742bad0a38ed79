import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A flush protects from a loss of power, which no test can cause, and takes longer than all else in saving."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
