"""What every public layer must do, for every row of the catalogue."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_tx import checks, layers
from tests import catalogue
from tests.tools import assert_close, randomize, to_numpy

rows = pytest.mark.parametrize("row", catalogue.ROWS, ids=catalogue.name)
per_example = [row for row in catalogue.ROWS if row.per_example]
examples = pytest.mark.parametrize("row", per_example, ids=catalogue.name)
GOLDEN = Path(__file__).with_name("weights.json")


def built(row, **kwargs):
    layer = row.make(**kwargs)
    layer(**row.inputs())
    return randomize(layer)


def functional(row):
    """A model of the one layer, its inputs by name, lengths left open where they may be."""
    inputs = {}
    for name, x in row.inputs().items():
        shape = (None, *x.shape[2:]) if row.any_length else x.shape[1:]
        inputs[name] = keras.Input(shape, dtype=str(x.dtype), name=name)
    outputs = row.make(name="layer")(**inputs)
    model = keras.Model(inputs, outputs)
    randomize(model)
    return model


def test_every_public_layer_is_in_the_catalogue():
    assert {row.layer.__name__ for row in catalogue.ROWS} == set(layers.__all__)


@rows
def test_the_config_is_the_signature(row):
    config = row.make().get_config()
    assert set(config) - {"name", "trainable", "dtype"} == set(checks.parameters_of(row.layer))


@rows
def test_a_layer_made_from_its_config_has_the_same_attributes(row):
    layer = row.make(dtype="mixed_float16", name="one")
    again = row.layer.from_config(json.loads(json.dumps(layer.get_config())))
    for name, value in vars(layer).items():
        if isinstance(value, (int, float, str, bool, tuple, dict, type(None))) and not name.startswith("_"):
            assert getattr(again, name) == value, name
    assert again.dtype_policy == layer.dtype_policy
    assert again.get_config() == layer.get_config()


@rows
def test_the_symbolic_shape_and_dtype_are_the_eager_ones(row):
    for policy in ("float32", "mixed_bfloat16"):
        for flags in [{}] + [{"return_attention_scores": True}] * row.scores:
            inputs = row.inputs()
            symbolic = {name: keras.Input(batch_shape=x.shape, dtype=str(x.dtype)) for name, x in inputs.items()}
            specs = keras.tree.flatten(row.make(dtype=policy)(**symbolic, **flags))
            outputs = keras.tree.flatten(row.make(dtype=policy)(**inputs, **flags))
            assert [tuple(s.shape) for s in specs] == [tuple(o.shape) for o in outputs]
            assert [s.dtype for s in specs] == [keras.backend.standardize_dtype(o.dtype) for o in outputs]


@rows
def test_a_saved_model_comes_back_with_the_same_outputs(row, tmp_path):
    model = functional(row)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(again(row.inputs()), model(row.inputs()), atol=0, rtol=0)


@rows
def test_weights_saved_alone_load_into_a_fresh_model(row, tmp_path):
    model, fresh = functional(row), functional(row)
    randomize(fresh, seed=1)
    model.save_weights(tmp_path / "model.weights.h5")
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_close(fresh(row.inputs()), model(row.inputs()), atol=0, rtol=0)


@pytest.mark.parametrize("row", [row for row in per_example if row.any_length], ids=catalogue.name)
def test_lengths_and_batches_may_change_from_call_to_call(row):
    model = functional(row)
    for batch, length in ((1, 1), (3, 8), (2, 5)):
        inputs = row.inputs(batch, length)
        whole = to_numpy(model(inputs))
        assert whole.shape[:2] == (batch, length)
        atol = max(2e-6, 1e-6 * np.abs(whole).max())
        for i in range(batch):
            assert_close(model({name: x[i : i + 1] for name, x in inputs.items()})[0], whole[i], atol=atol)


@examples
def test_an_empty_batch_gives_an_empty_output(row):
    layer = built(row)
    inputs = {name: x[:0] for name, x in row.inputs().items()}
    assert to_numpy(layer(**inputs)).shape == (0, *to_numpy(layer(**row.inputs())).shape[1:])


@rows
@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_compiled_graph_equals_the_eager_call(row, jit_compile):
    import tensorflow as tf

    layer, inputs = built(row), row.inputs()
    compiled = tf.function(layer, jit_compile=jit_compile)
    expected = to_numpy(layer(**inputs))
    assert_close(compiled(**inputs), expected, atol=max(3e-6, 1e-6 * np.abs(expected).max()))


@rows
@pytest.mark.tensorflow
def test_a_saved_model_of_the_layer_equals_the_layer_without_xla_ops(row, tmp_path):
    import tensorflow as tf

    model = functional(row)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    expected = to_numpy(model(row.inputs()))
    assert_close(exported.serve(row.inputs()), expected, atol=1e-6 * max(1.0, np.abs(expected).max()))
    graph = exported.signatures["serving_default"].graph.as_graph_def()
    ops = {node.op for node in graph.node} | {n.op for function in graph.library.function for n in function.node_def}
    assert len(ops) > 3 and not [op for op in ops if op.startswith("Xla")]


@rows
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
def test_half_precision_stays_near_single_precision(row, policy):
    exact, rough = built(row), built(row, dtype=policy)
    rough.set_weights(exact.get_weights())
    outputs = to_numpy(keras.ops.cast(rough(**row.inputs()), "float32"))
    expected = to_numpy(exact(**row.inputs()))
    error = np.abs(outputs - expected).max() / np.abs(expected).max()
    assert error < (0.05 if "bfloat16" in policy else 0.01)


@examples
def test_every_weight_gets_a_gradient(row):
    inputs = row.inputs()
    model = functional(row)
    if not model.weights:
        return
    model.compile(keras.optimizers.SGD(1.0), loss="mse")
    before = model.get_weights()
    target = np.random.default_rng(3).normal(size=to_numpy(model(inputs)).shape).astype("float32")
    model.fit(inputs, target, verbose=0)
    for weight, old in zip(model.weights, before, strict=True):
        if weight.path.endswith("key/bias"):
            continue  # the same number on every key: the softmax does not see it
        assert np.abs(to_numpy(weight) - old).max() > 0, weight.path


def test_weight_names_and_shapes_are_a_promise():
    names = {
        catalogue.name(row): {w.path.split("/", 1)[1]: list(w.shape) for w in functional(row).weights}
        for row in catalogue.ROWS
    }
    assert names == json.loads(GOLDEN.read_text())
