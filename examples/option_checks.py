"""Checks of options before a training begins. This module does not import Keras."""

import argparse
import importlib
import math
import os
from pathlib import Path


def positive(text):
    """The type of an option that counts something."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a positive integer. Received: {text}")
    return int(text)


def positive_number(text):
    """The type of an option that is a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a positive number. Received: {text}")
    return number


def check_plots(parser):
    """Ends the program if no pictures can be drawn."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        parser.error(
            f"the pictures need matplotlib, which cannot be imported ({error}). Install it: pip install "
            "'keras-tx[plots]'"
        )


def check_out(parser, folder):
    """Ends the program if files cannot be written to a folder, which need not exist yet."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        parser.error(f"--out must be a folder in which files can be written. Received: {folder}")
