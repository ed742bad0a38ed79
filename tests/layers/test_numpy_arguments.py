"""NumPy's numbers are numbers: as arguments of layers and models they do what Python's own do."""

import inspect
import json

import keras
import numpy as np
import pytest

from keras_tx import models
from tests import catalogue

SIZES = {"num_layers": 1, "hidden_dim": 12, "num_heads": 3, "intermediate_dim": 17, "dropout": 0.25}
OPTIONS = {"attention_options": {"num_key_value_heads": 1, "scale": 0.5}, "layer_norm_epsilon": 0.5}
MODELS = [
    (models.TextClassifier, {"vocabulary_size": 11, "num_classes": 3, **SIZES, "encoder_options": OPTIONS}),
    (models.MaskedLM, {"vocabulary_size": 11, **SIZES, "embedding_options": {"num_segments": 2, "padding_id": 4}}),
    (models.CausalLM, {"vocabulary_size": 11, **SIZES, "decoder_options": OPTIONS}),
    (models.Seq2Seq, {"source_vocabulary_size": 11, "target_vocabulary_size": 13, "num_decoder_layers": 2, **SIZES}),
]
CASES = [pytest.param(row.layer, row.arguments, id=catalogue.name(row)) for row in catalogue.ROWS]
CASES += [pytest.param(cls, arguments, id=cls.__name__) for cls, arguments in MODELS]


def as_numpy(value):
    if isinstance(value, (dict, list)):
        return keras.tree.map_structure(as_numpy, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return np.int64(value) if isinstance(value, int) else np.float32(value)


@pytest.mark.parametrize(("cls", "arguments"), CASES)
def test_numpy_numbers_are_arguments_as_python_s_are(cls, arguments):
    parameters = inspect.signature(cls).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    arguments = {**defaults, **arguments, "name": "one"}
    keras.utils.clear_session(free_memory=False)  # counts names of layers from the beginning
    expected = cls(**arguments)
    keras.utils.clear_session(free_memory=False)
    made = cls(**{name: as_numpy(value) for name, value in arguments.items()})
    config = made.get_config()
    assert json.loads(json.dumps(config)) == json.loads(json.dumps(cls.from_config(config).get_config()))
    for found, wanted in zip(keras.tree.flatten(config), keras.tree.flatten(expected.get_config()), strict=True):
        assert type(found) is type(wanted)
        assert found == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted)
    for name, value in arguments.items():
        if isinstance(value, (int, float)):
            assert not isinstance(getattr(made, name), np.generic), name
