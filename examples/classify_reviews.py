"""The old name of classify.py; it takes the same arguments."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("classify.py")), run_name="__main__")
