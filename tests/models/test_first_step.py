"""The first training step of the models of this package is traced once, and changes their weights."""

import functools

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.models.counted import CountedModel
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy

SIZES = {"hidden_dim": 8, "num_heads": 2, "intermediate_dim": 8}
IDS = np.array([[2, 3, 3, 5], [3, 3, 4, 0], [7, 3, 2, 3]])
LABELS = np.array([0, 2, 1])


def classifier():
    return TextClassifier(11, num_classes=3, num_layers=1, **SIZES)


def translator():
    return Seq2Seq(11, 13, num_layers=1, **SIZES)


MODELS = {
    "classifier": (classifier, IDS, LABELS, {"metrics": ["accuracy"]}),
    "classifier in half precision": (classifier, IDS, LABELS, {"dtype": "mixed_float16"}),
    "translator": (translator, [IDS, IDS], IDS, {"metrics": [PaddedAccuracy()]}),
    "language model in chunks": (
        lambda: CausalLM(11, num_layers=1, **SIZES),
        IDS,
        IDS,
        {"metrics": [PaddedAccuracy()], "loss": PaddedCrossentropy(chunk_size=3)},
    ),
    "masked language model": (lambda: MaskedLM(11, num_layers=1, **SIZES), IDS, IDS, {}),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize(("name", "method"), [*[(name, "fit") for name in MODELS], ("translator", "train_on_batch")])
def test_the_first_step_is_traced_once(name, method, monkeypatch):
    make, x, y, options = MODELS[name]
    options = {"loss": PaddedCrossentropy(), **options}
    if y is LABELS:
        options["loss"] = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.config.set_dtype_policy(options.pop("dtype", "float32"))
    try:
        model, traced = make(), []
    finally:
        keras.config.set_dtype_policy("float32")
    step = CountedModel.train_step

    @functools.wraps(step)
    def counted(self, data):
        traced.append(1)
        return step(self, data)

    monkeypatch.setattr(CountedModel, "train_step", counted)
    model.compile("adam", jit_compile=False, **options)
    begun = model.get_weights()
    getattr(model, method)(x, y, **({"verbose": 0, "batch_size": 3} if method == "fit" else {}))
    assert traced == [1]
    assert any((one != other).any() for one, other in zip(begun, model.get_weights(), strict=True))


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", [TextClassifier, CausalLM, Seq2Seq])
def test_each_weight_is_cast_to_half_precision_once_in_a_step(kind):
    """The forward and the backward pass share what is cast."""
    import tensorflow as tf

    sizes = {"num_layers": 2, "hidden_dim": 6, "num_heads": 2, "intermediate_dim": 10, "dtype": "mixed_bfloat16"}
    model = kind(13, **({"num_classes": 3} if kind is TextClassifier else {}), **sizes)
    ids = np.array([[3, 5, 7], [2, 9, 4]])
    x = {"source_ids": ids, "target_ids": ids} if kind is Seq2Seq else ids
    y = np.array([0, 2]) if kind is TextClassifier else ids
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", sparse if kind is TextClassifier else PaddedCrossentropy(), jit_compile=False)
    model.train_on_batch(x, y)
    operations = tf.function(lambda x, y: model.train_step((x, y))).get_concrete_function(x, y).graph.get_operations()
    reads = [one.inputs[0].op for one in operations if one.type == "Cast"]
    names = [one.inputs[0].name for one in reads if one.type == "ReadVariableOp" and one.outputs[0].dtype == "float32"]
    assert len(names) == len(set(names)) > 20
