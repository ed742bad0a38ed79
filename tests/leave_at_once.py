"""A plugin for pytest, `-p tests.leave_at_once`: the process ends as soon as all reports are written.

Python would take ten seconds to free the graphs of hundreds of tests, one object after another.
"""

import gc
import os

import pytest

status = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[status] = int(exitstatus)
    gc.collect()  # pytest raises what finalizers raise before it calls the function below


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if status in config.stash:
        config.get_terminal_writer().flush()
        os._exit(config.stash[status])
