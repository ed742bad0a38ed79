"""`.keras` files of earlier versions still load and give the outputs that they gave in the version that saved them.

`tests/saved/VERSION` holds the files, and in `outputs.npz` their inputs and outputs, computed by that version: the only
outputs of ours that the suite keeps. They promise that files stay valid; what is right is tested elsewhere.
"""

from pathlib import Path

import keras
import numpy as np
import pytest

import keras_tx  # noqa: F401  (its classes are registered for loading)
from tests.tools import assert_close

FILES = sorted((Path(__file__).parents[1] / "saved").glob("*/*.keras"))
KINDS = {"text_classifier", "masked_lm", "causal_lm", "seq2seq", "layers", "images", "quantized"}


def recorded(path):
    with np.load(path.with_name("outputs.npz")) as arrays:
        prefix = f"{path.stem}/inputs/"
        inputs = {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
        return inputs, arrays[f"{path.stem}/outputs"]


def test_there_is_a_file_of_each_kind():
    assert {path.stem for path in FILES if path.parent.name == "0.1.0"} == KINDS


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_of_an_earlier_version_gives_what_it_gave(path):
    if path.stem == "quantized" and keras.backend.backend() != "tensorflow":
        pytest.skip("Keras' own int8 layers fail on PyTorch")
    inputs, expected = recorded(path)
    model = keras.saving.load_model(path)
    by_order = [inputs[tensor.name] for tensor in model.inputs]
    close = {"atol": 3e-6 if keras.backend.backend() == "tensorflow" else 1e-5}  # rounding, in another order
    assert_close(model(by_order[0] if len(by_order) == 1 else by_order), expected, **close)
