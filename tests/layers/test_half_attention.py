"""Attention of half-precision numbers as JAX computes it on GPUs, against the equation and against its own float32."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.attention import halves
from keras_tx.layers.attention.dense import attend
from tests.tools import assert_close, gradients, normal, to_numpy

if keras.backend.backend() != "jax":
    pytest.skip("about JAX", allow_module_level=True)
B, T, S, N, H, V = 2, 11, 13, 6, 5, 7
ATOL = {"bfloat16": 0.02, "float16": 0.003}  # of numbers around one


@pytest.fixture
def on_gpu(monkeypatch):
    """Takes this way also on a CPU."""
    monkeypatch.setattr(halves, "computes_on_gpu", lambda: True)


def heads(key_heads=N):
    return normal(B, T, N, H), normal(B, S, key_heads, H, seed=1), normal(B, S, key_heads, V, seed=2)


def mask():
    allowed = np.random.default_rng(3).random((B, 1, T, S)) < 0.6
    allowed[0, 0, 4] = False
    return allowed


OPTIONS = {"plain": {}, "mask": {"mask": mask()}, "bias": {"bias": normal(1, N, T, S, seed=4)}, "scale": {"scale": 0.7}}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("key_heads", "dtype"), [(6, "bfloat16"), (3, "float16"), (1, "bfloat16")])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_and_gradients_are_those_of_float32(options, key_heads, dtype):
    tensors = [ops.cast(ops.cast(x, dtype), "float32") for x in heads(key_heads)]
    for drop in (None, lambda x: keras.random.dropout(x, 0.4, seed=7)):

        def in_half(*tensors, drop=drop):
            output, scores = attend(*[ops.cast(x, dtype) for x in tensors], dropout=drop, with_scores=False, **options)
            assert scores is None and keras.backend.standardize_dtype(output.dtype) == dtype
            return ops.cast(output, "float32")

        def in_float32(*tensors, drop=drop):
            return attend(*tensors, dropout=drop, with_scores=False, **options)[0]

        for one, expected in zip(gradients(in_half, tensors), gradients(in_float32, tensors), strict=True):
            assert np.isfinite(one).all()
            assert_close(one, expected, atol=ATOL[dtype] * max(1.0, np.abs(expected).max()))


@pytest.mark.usefixtures("on_gpu")
def test_it_is_taken_for_half_precision_without_scores_alone(monkeypatch):
    calls = []
    real = halves.half_product
    monkeypatch.setattr("keras_tx.layers.attention.dense.half_product", lambda *x: calls.append(1) or real(*x))
    query, key, value = heads()
    half = [ops.cast(x, "bfloat16") for x in (query, key, value)]
    attend(*half, with_scores=False)
    assert len(calls) == 1
    attend(query, key, value, with_scores=False)
    attend(*half[:2], value, with_scores=False)
    attend(*half, with_scores=True)
    attend(*half, hard=True, with_scores=False)
    assert len(calls) == 1
    monkeypatch.setattr(halves, "computes_on_gpu", lambda: False)
    attend(*half, with_scores=False)
    assert len(calls) == 1


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("keys", [1, 0])
def test_one_key_gets_all_and_none_gives_zeros(keys):
    query, key, value = (ops.cast(x, "bfloat16") for x in heads())
    output, _ = attend(query, key[:, :keys], value[:, :keys], with_scores=False)
    expected = np.repeat(to_numpy(ops.cast(value[:, :1], "float32")), T, axis=1) * keys
    assert_close(ops.cast(output, "float32"), expected, atol=0.01)


@pytest.mark.usefixtures("on_gpu")
def test_a_layer_trains_with_dropout_and_draws_other_numbers_in_each_step(monkeypatch):
    layer = MultiHeadAttention(N, H, dropout=0.5, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((T, 8)), keras.layers.Dense(8), _SelfAttention(layer)])
    model.compile(keras.optimizers.SGD(0.0), "mean_squared_error")
    x = normal(B, T, 8)
    calls = []
    real = halves.half_weights
    monkeypatch.setattr("keras_tx.layers.attention.dense.half_weights", lambda *x: calls.append(1) or real(*x))
    losses = [float(model.train_on_batch(x, x)) for _ in range(3)]
    assert calls
    assert np.isfinite(losses).all() and len(set(losses)) == 3


class _SelfAttention(keras.layers.Layer):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=None):
        return self.layer(x, x, training=training)
