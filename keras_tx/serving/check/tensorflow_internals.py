"""All uses of private parts of TensorFlow and tensorflow_text, for a process without Keras.

`clean_process.py` runs as a script that must import neither Keras nor keras_tx, so it cannot use
`keras_tx/internals`. It imports this file from its own folder.
"""

import ctypes
import glob
import importlib.util
import os
from typing import Any

import tensorflow as tf

LIBRARY = "libtensorflow_cc.so.2"
XLA_OFF = "_ZN10tensorflow21DisableXlaCompilationEv"  # void tensorflow::DisableXlaCompilation()


def library() -> Any:
    """TensorFlow's C++ library, which this process has loaded already; it exports the functions of the C API."""
    return ctypes.CDLL(os.path.join(os.path.dirname(tf.__file__), LIBRARY))


def turn_xla_off() -> None:
    """From now on this process compiles no graph by XLA, which is also the default of TensorFlow Serving."""
    getattr(library(), XLA_OFF)()


def text_op_libraries() -> list[str]:
    """The files of tensorflow_text's kernels for `tf.load_op_library`; none where it is not installed.

    The package itself cannot be imported for them: it imports Keras.
    """
    text = importlib.util.find_spec("tensorflow_text")
    if text is None:
        return []
    return sorted(glob.glob(os.path.join(os.path.dirname(str(text.origin)), "python", "ops", "*.so")))
