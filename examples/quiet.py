"""Imports TensorFlow without the lines about the machine that it writes to stderr at its start.

Import this module before Keras. If TensorFlow cannot be imported, the lines are shown. TF_CPP_MIN_LOG_LEVEL=0 in the
environment shows them always, which helps if a GPU is not found.
"""

import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def kept_back():
    """Holds what this process writes to stderr, from C++ too, and drops it, or shows it if the block raises."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


# Level 3 leaves out the error that TensorFlow writes where there is no GPU.
if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "0":
    import tensorflow
else:
    with kept_back():
        import tensorflow  # noqa: F401
