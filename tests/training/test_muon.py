"""`Muon` updates the kernels of attention as Keras' Muon updates matrices: nearly orthogonally."""

import re

import keras
import numpy as np
import pytest

from keras_tx import layers, models
from keras_tx.training import Muon
from tests.tools import assert_close, normal, to_numpy

# Names as in attention, shapes, and the same kernels as matrices.
KERNELS = [
    ("self_attention/query", (11, 3, 5), (11, 15)),
    ("cross_attention/value", (7, 2, 13), (7, 26)),
    ("self_attention/attention_output", (3, 5, 17), (15, 17)),
    ("feed_forward/intermediate", (11, 19), (11, 19)),
]


def variable(value, path):
    made = keras.Variable(value, name="kernel")
    made._path = f"{path}/kernel"
    return made


def moved(optimizer, paths, values, steps=3):
    """What `steps` updates with the same gradients each time make of `values`."""
    variables = [variable(value, path) for path, value in zip(paths, values, strict=True)]
    optimizer.build(variables)
    for step in range(steps):
        optimizer.apply([keras.ops.convert_to_tensor(normal(*x.shape, seed=step)) for x in values], variables)
    return [to_numpy(x) for x in variables]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"nesterov": False, "weight_decay": None},
        {"rms_rate": None, "ns_steps": 3},
    ],
)
def test_kernels_of_three_axes_are_updated_as_matrices(options):
    paths = [path for path, _, _ in KERNELS]
    values = [normal(*matrix, seed=7) for _, _, matrix in KERNELS]
    ours = Muon(0.02, **options)
    variables = [variable(value.reshape(shape), path) for value, (path, shape, _) in zip(values, KERNELS, strict=True)]
    ours.build(variables)
    for step in range(3):
        slopes = [normal(*matrix, seed=step).reshape(shape) for _, shape, matrix in KERNELS]
        ours.apply([keras.ops.convert_to_tensor(x) for x in slopes], variables)
    expected = moved(keras.optimizers.Muon(0.02, **options), paths, values)
    for one, other in zip(variables, expected, strict=True):
        assert_close(to_numpy(one).reshape(other.shape), other, atol=1e-6)


def test_an_update_has_singular_values_near_one():
    path, shape, matrix = KERNELS[2]
    kernel = variable(np.zeros(shape, "float32"), path)
    optimizer = Muon(1.0, rms_rate=None, weight_decay=None)
    optimizer.build([kernel])
    optimizer.apply([keras.ops.convert_to_tensor(normal(*shape))], [kernel])
    step = -to_numpy(kernel).astype("float64").reshape(matrix)
    left, _, right = np.linalg.svd(normal(*shape).astype("float64").reshape(matrix), full_matrices=False)
    singular = np.diag(left.T @ step @ right.T)
    assert 0.6 < singular.min() and singular.max() < 1.3  # the range that the iteration comes to
    assert_close(left @ np.diag(singular) @ right, step, atol=1e-5)


def test_a_string_is_no_list_of_regular_expressions():
    with pytest.raises(
        TypeError, match=r"`exclude_layers` must be a list of regular expressions. Received: exclude_layers='gate'"
    ):
        Muon(exclude_layers="gate")


@pytest.mark.parametrize(("pattern", "reason"), [("(", "unterminated subpattern"), (3, "must be string")])
def test_what_is_no_regular_expression_is_refused_before_training(pattern, reason):
    message = (
        f"`exclude_layers` must be a list of regular .* Received: {re.escape(repr(pattern))} among them: .*{reason}"
    )
    with pytest.raises(ValueError, match=message):
        Muon(exclude_layers=["gate", pattern])


@pytest.mark.parametrize("attention", [layers.MultiHeadAttention, keras.layers.MultiHeadAttention])
def test_adamw_updates_what_is_no_matrix(attention):
    inputs = keras.Input((5,), dtype="int32")
    x = layers.TokenEmbedding(13, 12)(inputs)
    x = attention(3, 4, use_bias=True)(x, x)
    x = layers.FeedForward(17)(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(7, name="classes")(x))
    optimizer = Muon(exclude_layers=["classes"])
    optimizer.build(model.trainable_variables)
    by_muon = {
        weight.path
        for weight, velocity in zip(model.trainable_variables, optimizer.adam_velocities, strict=True)
        if velocity is None
    }
    expected = ["query", "key", "value", "attention_output", "intermediate", "output"]
    assert len(by_muon) == len(expected)
    assert all(any(path.endswith(f"/{name}/kernel") for path in by_muon) for name in expected)
    assert len(optimizer.adam_velocities) == len(model.trainable_variables)


def test_adamw_updates_the_matrices_of_lora():
    layer = layers.DecoderLayer(16, 3)
    layer.build((None, None, 12))
    for projection in (layer.self_attention.query_dense, layer.feed_forward.output_dense):
        projection.enable_lora(2)
    optimizer = Muon()
    optimizer.build(layer.trainable_variables)
    pairs = zip(layer.trainable_variables, optimizer.adam_velocities, strict=True)
    found = [velocity for weight, velocity in pairs if "lora" in weight.path]
    assert len(found) == 4 and all(velocity is not None for velocity in found)


@pytest.mark.parametrize(
    ("path", "options"), [("self_attention/query", {"exclude_layers": ["self_att"]}), ("conv1d", {})]
)
def test_adamw_updates_other_kernels_of_three_axes(path, options):
    kernel = variable(normal(5, 2, 3), path)
    optimizer = Muon(**options)
    optimizer.build([kernel])
    assert optimizer.adam_velocities[0] is not None


EAGER = keras.backend.backend() != "jax"  # JAX compiles each operation; elsewhere tracing would take most of the time


def compiled(optimizer, eager=EAGER):
    model = models.CausalLM(23, num_layers=1, hidden_dim=12, num_heads=3, intermediate_dim=17, dropout=0.0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=eager)
    return model


def test_a_model_learns_and_continues_from_its_file(tmp_path):
    ids = np.random.default_rng(0).integers(1, 23, (29, 7))
    model = compiled(Muon(0.01))
    first = model.evaluate(ids, ids, verbose=0)
    model.fit(ids, ids, epochs=5, verbose=0, shuffle=False)
    assert model.evaluate(ids, ids, verbose=0) < first - 0.5
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is Muon
    for one in (model, again):
        one.fit(ids, ids, epochs=1, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        assert_close(one, other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_distribution_strategy_changes_nothing():
    import tensorflow as tf

    made = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0"])):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = compiled(Muon(0.01, ns_steps=2), eager=EAGER and not made)
        ids = np.random.default_rng(0).integers(1, 23, (32, 7))
        model.fit(ids, ids, epochs=2, verbose=0, shuffle=False)
        # The gradient of the bias of keys is zero: its steps are those of rounding errors.
        made.append([to_numpy(weight) for weight in model.weights if not weight.path.endswith("key/bias")])
        assert len(made[-1]) == len(model.weights) - 1
    for one, other in zip(*made, strict=True):
        assert_close(one, other, atol=1e-5)
