"""Masks behind operations on batches of a fixed size, which run on few rows, and behind attention to other tokens."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.internals.keras_models import call_that_made, get_keras_mask
from keras_tx.layers import EncoderLayer, TokenEmbedding, mask_search, mask_trial, trial_runs
from keras_tx.layers.mask_search import mask_of
from tests.tools import to_numpy

L = keras.layers
B, T, D = 10, 7, 6
ORDER = np.random.default_rng(0).permutation(B)
IDS = np.array([[1, 2, 3, 4, 5, 6, 7][: 1 + row % T] + [0] * (T - 1 - row % T) for row in range(B)])


def masked():
    ids = keras.Input((T,), batch_size=B, dtype="int32")
    return ids, L.Embedding(11, D, mask_zero=True)(ids)


@pytest.mark.parametrize(
    ("operation", "on_mask"),
    [
        (lambda x: x * 2, lambda m: m),
        (lambda x: x[:2, :] * 2, lambda m: m[:2]),
        (lambda x: x[:1, :] * 2, lambda m: m[:1]),
        (lambda x: x[:8, :] * 2, lambda m: m[:8]),  # of seven rows, all
        (lambda x: x[-8:, :], lambda m: m[-8:]),
        (lambda x: x[1:, :], lambda m: m[1:]),
        (lambda x: x[::2, :], lambda m: m[::2]),
        (lambda x: ops.flip(x, axis=0), lambda m: m[::-1]),
        (lambda x: ops.take(x, ORDER, axis=0), lambda m: m[ORDER]),
        (lambda x: ops.roll(x, 4, axis=0), lambda m: np.roll(m, 4, axis=0)),
        (lambda x: ops.concatenate([x[5:, :], x[:5, :]], axis=0), lambda m: np.concatenate([m[5:], m[:5]])),
        (lambda x: ops.repeat(x, 3, axis=0), lambda m: np.repeat(m, 3, axis=0)),
        (lambda x: ops.reshape(x, (B // 2, 2 * T, D)), lambda m: m.reshape(B // 2, 2 * T)),
        (lambda x: ops.reshape(x, (B, T, D)) * 2, lambda m: m),
        (lambda x: x + ops.reshape(ops.cumsum(ops.ones((B, T, D)), axis=1), (B, T, D)), lambda m: m),
        (lambda x: ops.reshape(x, (B, T * D)) @ np.ones((T * D, 5), "float32"), None),
        (lambda x: ops.transpose(x, (1, 0, 2)), lambda m: m.T),
        (lambda x: L.LSTM(5, return_sequences=True, stateful=True)(x), lambda m: m),
    ],
)
def test_operations_on_a_batch_of_a_fixed_size(operation, on_mask):
    ids, x = masked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = operation(x)
        mask = mask_of(y)
    if on_mask is None:
        assert mask is None
    else:
        expected = on_mask(IDS != 0)
        # A copy, because what is symbolic here may be a constant.
        np.testing.assert_array_equal(to_numpy(keras.Model(ids, ops.copy(mask))(IDS)), expected)


def test_large_batches_are_tried_out_on_few_rows(monkeypatch):
    sizes = []

    def draw(kind, shape, random):
        sizes.append(shape)
        return drawn(kind, shape, random)

    drawn = mask_trial.draw
    monkeypatch.setattr(mask_trial, "draw", draw)
    ids = keras.Input((13,), batch_size=100_003, dtype="int32")
    x = TokenEmbedding(11, 8)(ids)
    x = L.Dense(8, activation="relu")(x * 3) + x
    x = ops.concatenate([x[:, 1:], x[:, :1]], axis=1)
    outputs = EncoderLayer(16, 2)(L.LayerNormalization()(ops.reshape(ops.reshape(x, (-1, 8)), (-1, 13, 8))))
    assert outputs.shape == (100_003, 13, 8)
    assert mask_of(outputs) is not None
    assert sizes
    assert max(shape[0] for shape in sizes) <= 7 * 13


def test_tokens_of_a_fixed_batch_do_not_see_padding():
    """What a fixed batch gives is what the same layers give for a batch of any size."""
    results = []
    for batch_size in (None, B):
        keras.utils.set_random_seed(3)
        ids = keras.Input((T,), batch_size=batch_size, dtype="int32")
        x = TokenEmbedding(11, 8)(ids)
        x = ops.concatenate([x[:, 1:], x[:, :1]], axis=1) * 2
        results.append(to_numpy(keras.Model(ids, EncoderLayer(16, 2)(x))(IDS)))
    np.testing.assert_allclose(*results, atol=1e-6)


class Look(L.Layer):
    """Attention of a user's own, whose queries may be its first or its second argument."""

    def __init__(self, queries_first):
        super().__init__()
        self.queries_first, self.supports_masking = queries_first, True

    def call(self, first, second, first_mask=None, second_mask=None):
        queries, keys, mask = (first, second, second_mask) if self.queries_first else (second, first, first_mask)
        scores = ops.einsum("btd,bsd->bts", queries, keys)
        return queries + ops.softmax(scores if mask is None else ops.where(mask[:, None], scores, -1e9)) @ keys

    def compute_output_shape(self, first_shape, second_shape):
        return first_shape if self.queries_first else second_shape


# Without a mask of its second argument, Keras itself gives the layer that of the first one.
@pytest.mark.parametrize(("queries_first", "has_mask"), [(True, True), (True, False), (False, True)])
def test_attention_to_other_tokens_has_the_mask_of_its_queries(queries_first, has_mask):
    queries = keras.Input((None,), dtype="int32", name="queries")
    keys = keras.Input((None,), dtype="int32", name="keys")
    x = L.Embedding(11, D, mask_zero=has_mask)(queries) * 2
    memory = L.Embedding(11, D, mask_zero=True)(keys)
    mask = mask_of(Look(queries_first)(*[x, memory][:: 1 if queries_first else -1]))
    if not has_mask:
        assert mask is None
    else:
        found = keras.Model([queries, keys], ops.copy(mask))([np.array([[3, 0, 4]]), np.array([[5, 6, 0, 0]])])
        np.testing.assert_array_equal(to_numpy(found), [[True, False, True]])


def test_attention_to_other_tokens_has_no_mask_of_theirs_if_it_is_an_argument():
    """The layer does not run with more keys than values of this mask."""
    ids = keras.Input((None,), dtype="int32")
    memory = L.Embedding(11, D, mask_zero=True)(ids)
    assert mask_of(Look(queries_first=True)(keras.Input((None, D)), memory, second_mask=ids != 0)) is None


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("order", ["xy", "yx", "xyn", "nyx", "xz", "nx"])
def test_tokens_that_are_joined_feature_by_feature_are_real_if_all_their_parts_are(order, length):
    """`Concatenate` has the length of its first input for Keras, also with inputs that it refuses when it runs."""
    first, second = (keras.Input((length,), dtype="int32") for _ in range(2))
    parts = {
        "x": L.Embedding(11, D, mask_zero=True)(first),
        "y": L.Embedding(11, 4, mask_zero=True)(second),
        "z": L.Embedding(11, 2, mask_zero=True)(first),
        "n": L.Embedding(11, D)(first),
    }
    given = np.array([[1, 2, 0, 4, 0]]), np.array([[0, 2, 3, 4, 0]])
    expected = (given[0] != 0) & (given[1] != 0) if "y" in order else given[0] != 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = L.Concatenate()([parts[name] for name in order])
        EncoderLayer(12, 2)(layer)
    for joined in (layer, ops.concatenate([parts[name] for name in order], axis=-1)):
        mask = keras.Model([first, second], ops.copy(mask_of(joined)))(list(given))
        np.testing.assert_array_equal(to_numpy(mask), expected)


RECURRENT = {
    "LSTM": lambda x, _: L.LSTM(5, return_sequences=True)(x),
    "GRU": lambda x, _: L.GRU(5, return_sequences=True, return_state=True)(x)[0],
    "SimpleRNN": lambda x, _: L.SimpleRNN(5, return_sequences=True, unroll=True)(x),
    "both directions": lambda x, _: L.Bidirectional(L.LSTM(5, return_sequences=True))(x),
    "backwards": lambda x, _: L.Bidirectional(L.GRU(5, return_sequences=True), merge_mode=None)(x)[1],
    "with states": lambda x, mask: L.GRU(5, return_sequences=True)(x, initial_state=keras.Input((5,)), mask=mask),
}
WITHOUT = {  # the mask that their outputs need
    "reversed": lambda x: L.LSTM(5, return_sequences=True, go_backwards=True)(x),
    "both reversed": lambda x: L.Bidirectional(
        L.GRU(5, return_sequences=True, go_backwards=True), backward_layer=L.GRU(5, return_sequences=True)
    )(x),
    "with states": lambda x: L.GRU(5, return_sequences=True)(x, initial_state=keras.Input((5,))),
    "without a mask": lambda x: L.Bidirectional(L.LSTM(5, return_sequences=True))(x * 2),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_that_were_given_their_mask_are_not_tried_out(name, monkeypatch):
    """Trials of a hundred tokens would take seconds, and find the same."""
    x = L.Embedding(11, D, mask_zero=True)(keras.Input((T,), dtype="int32"))
    mask = get_keras_mask(x)
    with monkeypatch.context() as patch:
        patch.setattr(mask_search, "_RECURRENT", ())
        assert mask_of(RECURRENT[name](x, mask)) is mask
    monkeypatch.setattr(mask_search, "examine", lambda *_, **__: pytest.fail("It was tried out."))
    assert mask_of(RECURRENT[name](x, mask)) is mask


@pytest.mark.parametrize("name", WITHOUT)
def test_recurrent_layers_whose_outputs_have_another_mask_are_told(name):
    x = L.Embedding(11, D, mask_zero=True)(keras.Input((None,), dtype="int32"))
    y = WITHOUT[name](x)
    with pytest.warns(UserWarning, match="Padding may change the outputs"):
        EncoderLayer(12, 1)(y)


class CountingCell(L.GRUCell):
    calls = 0

    def call(self, *args, **kwargs):
        self.calls += 1
        return super().call(*args, **kwargs)


@pytest.mark.tensorflow
def test_many_steps_of_a_recurrent_layer_are_tried_out_in_a_graph(monkeypatch):
    cell = CountingCell(3)
    x = L.Embedding(11, D, mask_zero=True)(keras.Input((T,), dtype="int32"))
    call, place = call_that_made(L.RNN(cell, return_sequences=True)(x))
    x, mask = call.inputs
    random = np.random.default_rng(0)
    values = {id(x): random.normal(size=(2, T, D)), id(mask): np.ones((2, T), "bool")}
    masks = {id(x): random.random((2, T)) < 0.5}
    results, calls = [], []
    for steps in (T + 1, T):
        monkeypatch.setattr(trial_runs, "_MANY_STEPS", steps)
        cell.calls = 0
        results.append(trial_runs.Runner(call, place, {id(mask): id(x)}, np.random.default_rng(3)).run(values, masks))
        calls.append(cell.calls)
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert calls[0] >= T > calls[1]
