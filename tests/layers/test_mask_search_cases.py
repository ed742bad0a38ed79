"""Where the mask of a tensor is found or lost: moved tokens, several inputs, nested models, layers of one's own."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import layers
from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import mask_patterns, mask_search
from keras_tx.layers.mask_search import mask_of
from keras_tx.models.pooling import TokenPooling
from tests.tools import assert_close, randomize, to_numpy

D = 6
L = keras.layers
IDS = np.array([[5, 6, 7, 0, 0], [0, 0, 0, 3, 4]])
MASK = IDS != 0

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")  # Keras' own


@pytest.fixture
def ids():
    return keras.Input((None,), dtype="int32")


@pytest.fixture
def x(ids):
    return L.Embedding(11, D, mask_zero=True)(ids)


def found(ids, y, given=IDS):
    """The values of the mask that is found for a symbolic `y`."""
    return to_numpy(keras.Model(ids, mask_of(y))(given)).tolist()


MOVES = {
    "x[:, 1:]": (lambda x: x[:, 1:], MASK[:, 1:]),
    "x[:, :100]": (lambda x: x[:, :100], MASK),
    "x[:, -3:]": (lambda x: x[:, -3:], MASK[:, -3:]),
    "x[:, ::2]": (lambda x: x[:, ::2], MASK[:, ::2]),
    "flip": (lambda x: ops.flip(x, axis=1), MASK[:, ::-1]),
    "take": (lambda x: ops.take(x, [4, 0], axis=1), MASK[:, [4, 0]]),
    "concatenate": (lambda x: ops.concatenate([x, x[:, :2]], axis=1), np.concatenate([MASK, MASK[:, :2]], axis=1)),
    "with tokens that are no padding": (
        lambda x: ops.concatenate([np.ones((2, 1, D), "float32"), x], axis=1),
        np.pad(MASK, [(0, 0), (1, 0)], constant_values=True),
    ),
    "repeat": (lambda x: ops.repeat(x, 2, axis=1), np.repeat(MASK, 2, axis=1)),
    "pad": (lambda x: ops.pad(x, [(0, 0), (1, 2), (0, 0)]), np.pad(MASK, [(0, 0), (1, 2)])),
    "split features": (lambda x: L.Reshape((-1, D // 2))(x), np.repeat(MASK, 2, axis=1)),
    "heads and back": (
        lambda x: L.Reshape((-1, D))(ops.tanh(L.Permute((2, 1, 3))(L.Permute((2, 1, 3))(L.Reshape((-1, 2, 3))(x))))),
        MASK,
    ),
    "transpose and back": (lambda x: ops.swapaxes(ops.exp(ops.swapaxes(x, 1, 2) * 2.0), 1, 2), MASK),
    "rows of all tokens": (lambda x: L.Reshape((-1, 2))(L.Flatten()(x)), np.repeat(MASK, 3, axis=1)),
    "one token": (lambda x: ops.expand_dims(x[:, 0], 1), MASK[:, :1]),
    "stack": (lambda x: L.Reshape((-1, D))(ops.stack([x, 2.0 * x], axis=2)), np.repeat(MASK, 2, axis=1)),
    "Lambda": (lambda x: L.Lambda(lambda t: t[:, 1:4], output_shape=(3, D))(x), MASK[:, 1:4]),
    "Cropping1D": (lambda x: L.Cropping1D((1, 0))(x), MASK[:, 1:]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_a_mask_moves_with_its_tokens(name, ids, x):
    move, expected = MOVES[name]
    y = move(x)
    outputs = layers.EncoderLayer(12, 1)(y)
    assert found(ids, y) == expected.tolist()
    assert found(ids, outputs) == expected.tolist()


@pytest.mark.parametrize(
    "join",
    [
        lambda image, x: ops.concatenate([image, x], axis=1),
        lambda image, x: L.Concatenate(axis=1)([image, x * 1.0]),
    ],
)
def test_tokens_without_a_mask_are_real_when_they_are_joined_to_others(ids, x, join):
    """Whatever their values are: half of the features behind a ReLU are 0."""
    images = keras.Input((3, D))
    mask = keras.Model([images, ids], mask_of(join(images, x)))
    expected = np.pad(MASK, [(0, 0), (3, 0)], constant_values=True)
    for values in (0.0, 1.0):
        assert to_numpy(mask([np.full((len(IDS), 3, D), values, "float32"), IDS])).tolist() == expected.tolist()


def swap_pairs(t):
    return ops.reshape(ops.flip(ops.reshape(t, (ops.shape(t)[0], -1, 2, D)), axis=2), ops.shape(t))


ORDERS = {  # the places of the tokens after a move, for a number of tokens
    "two": (lambda x: ops.take(x, [4, 0], axis=1), lambda length: [4, 0]),
    "three": (lambda x: ops.take(x, [1, 2, 3], axis=1), lambda length: [1, 2, 3]),
    "pairs": (lambda x: L.Lambda(swap_pairs, output_shape=x.shape[1:])(x), lambda length: np.arange(length) ^ 1),
}


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("name", ORDERS)
def test_a_mask_moves_whatever_masks_were_made_before(name, length, monkeypatch):
    """Each new mask is another pattern in trials. In some of these, moved tokens are padding, or real, all together."""
    move, order_of = ORDERS[name]
    order = order_of(length or 12)
    made = {number: mask_patterns.patterns_in_trials((2, length or 12), number)[0] for number in range(200)}
    hiding = [
        number
        for number, mask in made.items()
        if (mask[:, order] == mask[:, order[:1]]).all() or (mask[:, order] == mask[:, : len(order)]).all()
    ]
    numbers = (hiding or list(made))[:6]
    monkeypatch.setattr(mask_search, "_numbers", itertools.chain(numbers, itertools.count(1000)))
    given = np.array([[5, 6, 7, 0, 0, 0], [0, 0, 0, 3, 4, 5], [8, 9, 1, 2, 0, 0]])
    for _ in numbers:
        ids = keras.Input((length,), dtype="int32")
        y = move(L.Embedding(11, D, mask_zero=True)(ids))
        assert found(ids, y, given) == (given != 0)[:, order_of(6)].tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mixing_within_blocks_is_told_whatever_masks_were_made_before(size, monkeypatch):
    """In some patterns of trials, padding fills whole blocks."""

    def mix(t):
        blocks = ops.reshape(t, (ops.shape(t)[0], -1, size, D))
        return ops.reshape(blocks + ops.mean(blocks, axis=2, keepdims=True), ops.shape(t))

    made = {number: mask_patterns.patterns_in_trials((2, 12), number)[0] for number in range(600)}
    hiding = [n for n, mask in made.items() if (mask.reshape(2, -1, size) == mask.reshape(2, -1, size)[..., :1]).all()]
    assert hiding
    monkeypatch.setattr(mask_search, "_numbers", itertools.chain(hiding[:3], itertools.count(1000)))
    for _ in hiding[:3]:
        x = L.Embedding(11, D, mask_zero=True)(keras.Input((None,), dtype="int32"))
        assert mask_of(L.Lambda(mix, output_shape=(None, D))(x)) is None


def test_a_moved_mask_makes_padding_harmless(ids, x):
    joined = ops.concatenate([x[:, 1:], ops.flip(x, axis=1)], axis=1)
    model = randomize(keras.Model(ids, layers.EncoderLayer(12, 2)(joined)))
    whole, alone = to_numpy(model(IDS[:1])), to_numpy(model(IDS[:1, :3]))
    assert_close(whole[:, [0, 1, 6, 7, 8]], alone, atol=2e-6)  # 6 7 _ _ | _ _ 7 6 5


def test_a_moved_mask_is_saved_with_the_model(ids, x, tmp_path):
    moved = ops.flip(L.Reshape((-1, D // 2))(x)[:, 2:], axis=1)
    model = keras.Model(ids, layers.EncoderLayer(12, 1)(moved))
    model.save(tmp_path / "model.keras")
    assert_close(keras.saving.load_model(tmp_path / "model.keras")(IDS), model(IDS), atol=0)


def test_tokens_of_which_half_is_padding_are_told(ids, x):
    with pytest.warns(UserWarning, match=r"because 'pairs' \(Reshape\) before it mixes padding into other tokens"):
        layers.EncoderLayer(12, 2)(L.Reshape((-1, 2 * D), name="pairs")(x))


def test_a_mask_of_tokens_in_rows_of_a_batch():
    """(B, 5, D) -> (B * 5, D) -> dense -> (B, 5, 4), as some write it."""
    ids = keras.Input((5,), dtype="int32")
    x = L.Embedding(11, D, mask_zero=True)(ids)
    rows = L.Dense(4)(ops.reshape(x, (-1, D)))
    assert found(ids, ops.reshape(rows, (-1, 5, 4))[:, :, :2]) == MASK.tolist()


# Several inputs


def test_masks_of_two_sources_are_joined(ids, x):
    other = keras.Input((5,), dtype="int32")
    y = L.Embedding(11, D, mask_zero=True)(other)
    given = np.array([[1, 0, 2, 3, 0], [1, 1, 1, 1, 0]])
    both = (MASK & (given != 0)).tolist()
    for joined in (x + y, L.Add()([x, y]), L.Add()([x * 2.0, y])):  # Keras' layers join by "or", or not at all
        assert found([ids, other], joined, [IDS, given]) == both
    sides = ops.concatenate([x, y], axis=1)
    assert found([ids, other], sides, [IDS, given]) == np.concatenate([MASK, given != 0], axis=1).tolist()


def test_inputs_without_masks_change_nothing(ids, x):
    positions, table = keras.Input((None, D)), np.ones((5, D), "float32")
    real = ops.expand_dims(ops.cast(ids != 0, "float32"), -1)
    for y in (x + positions, x + table, x * real, ops.where(x > 0, x, 0.0), ops.where(real > 0, x, -1.0)):
        assert mask_of(y) is get_keras_mask(x)
    assert mask_of(positions * 2.0) is None and mask_of(real * 2.0) is None


def test_padding_that_comes_by_another_input_is_told(ids, x):
    """The mean over all tokens, padding among them, times each token: a mask is there, and does not help."""
    gate = L.Dense(D)(ops.mean(x, axis=1, keepdims=True))
    with pytest.warns(UserWarning, match=r"'mean.*' \(Mean\) before it mixes padding"):
        layers.EncoderLayer(12, 2)(x * gate)


def test_what_no_padding_reaches_is_not_told(ids, x):
    pooled = L.GlobalAveragePooling1D()(x)  # with the mask
    assert mask_of(ops.expand_dims(pooled, 1)) is None
    layers.EncoderLayer(12, 2)(ops.expand_dims(pooled, 1))
    layers.EncoderLayer(12, 2)(ops.expand_dims(TokenPooling()(x * 2.0), 1))


# What is told, and how


def test_the_warning_names_both_layers_and_the_argument(ids, x):
    smooth = lambda: L.Conv1D(D, 3, padding="same", kernel_initializer="zeros", name="smooth")(x)
    expected = (
        r"Padding may change the outputs of '{}' \({}\) at real tokens, because 'smooth' \(Conv1D\) before it mixes "
        r"padding into other tokens. Keep padding out of 'smooth': by its own mask or, for a convolution, zeros in its "
        r"place. Pass `{}=`, True at real tokens, to '{}'."
    )
    with pytest.warns(UserWarning, match=expected.format("first", "EncoderLayer", "mask", "first")):
        layers.EncoderLayer(12, 2, name="first")(smooth())
    with pytest.warns(UserWarning, match=expected.format("second", "DecoderLayer", "memory_mask", "second")):
        layers.DecoderLayer(12, 2, cross_attention=True, name="second")(x, smooth())
    with pytest.warns(UserWarning, match=expected.format("third", "MultiHeadAttention", "value_mask", "third")):
        layers.MultiHeadAttention(2, 3, name="third")(x, smooth())


def test_what_the_warning_says_helps(ids, x):
    """Zeros in place of padding before the convolution, and the mask for the layer that follows."""

    def built(zeros):
        embedding = layers.TokenEmbedding(17, D)
        mask = embedding.compute_mask(ids)
        y = embedding(ids)
        y = y * ops.cast(mask, "float32")[..., None] if zeros else y * 1.0
        y = layers.EncoderLayer(12, 2)(L.Conv1D(D, 3, padding="same")(y), mask=mask)
        return keras.Model(ids, y)

    short, long = np.array([[5, 7, 4]]), np.array([[5, 7, 4, 0, 0]])
    for zeros in (True, False):
        model = built(zeros)
        model.set_weights([np.random.default_rng(5).normal(size=w.shape) for w in model.get_weights()])
        difference = np.abs(to_numpy(model(short)) - to_numpy(model(long))[:, :3]).max()
        assert (difference < 1e-5) == zeros


def test_a_branch_that_starts_at_zero_is_told_within_a_nested_model_too(x):
    """As with ReZero: before training, the block is the identity."""
    inputs = keras.Input((None, D))
    block = keras.Model(inputs, inputs + L.Conv1D(D, 3, padding="same", kernel_initializer="zeros")(inputs))
    for nested in (block, keras.Sequential([block])):
        with pytest.warns(UserWarning, match="before it mixes padding into other tokens"):
            layers.EncoderLayer(12, 2)(nested(x))


def test_an_operation_is_told_once_and_not_if_a_mask_is_given(ids, x):
    smooth = L.Conv1D(D, 3, padding="same")(x)
    layers.EncoderLayer(12, 2)(smooth, mask=ids != 0)
    with pytest.warns(UserWarning, match="Padding may change") as caught:
        y = layers.EncoderLayer(12, 2)(layers.EncoderLayer(12, 2)(smooth))
        layers.MultiHeadAttention(2, 3)(ops.tanh(smooth), y)
    assert len(caught) == 1


def test_positions_that_count_padding_are_told(ids, x):
    class Positions(L.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking, self.table = True, L.Embedding(17, D)

        def call(self, inputs):
            return inputs + self.table(ops.arange(ops.shape(inputs)[1]))

        def compute_output_shape(self, shape):
            return shape

    y = Positions()(x)
    assert mask_of(y) is get_keras_mask(x)
    with pytest.warns(
        UserWarning, match=r"'positions(_[0-9]+)?' \(Positions\) before it counts padding tokens, so that its"
    ):
        layers.EncoderLayer(12, 2)(y)
    layers.EncoderLayer(12, 2)(layers.LearnedPositionalEncoding(17)(x))  # counts real tokens
    for between in (L.Dropout(0.1), L.Dense(D)):
        with pytest.warns(UserWarning, match=r"\(Positions\) before it counts padding tokens"):
            layers.EncoderLayer(12, 2)(between(Positions()(x)))


def test_an_operation_that_cannot_be_tried_out_is_told(ids, x):
    class Strange(L.Layer):
        def call(self, inputs):
            raise RuntimeError("only on Tuesdays")

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape)

    with pytest.warns(
        UserWarning, match=r"'strange(_[0-9]+)?' \(Strange\) before it cannot be tried out \(RuntimeError\)"
    ):
        layers.EncoderLayer(12, 2)(Strange()(x))


def test_a_mask_made_inside_a_layer_of_ones_own(ids):
    class Inside(L.Layer):
        def __init__(self):
            super().__init__()
            self.embedding = L.Embedding(11, D, mask_zero=True)

        def call(self, ids):
            return self.embedding(ids)

        def compute_output_shape(self, shape):
            return (*shape, D)

    y = Inside()(ids)
    model = randomize(keras.Model(ids, layers.EncoderLayer(12, 2)(y)))  # its mask is seen when the model is called
    assert_close(model(IDS[:1])[:, :3], model(IDS[:1, :3]), atol=2e-6)
    with pytest.warns(
        UserWarning, match=r"'inside(_[0-9]+)?' \(Inside\) before it makes a mask that cannot be read from"
    ):
        layers.EncoderLayer(12, 2)(y * 2.0)


# Trials


def test_a_trial_leaves_no_trace(ids, x):
    class Counting(L.Layer):
        def __init__(self):
            super().__init__()
            self.runs, self.seeds = 0, keras.random.SeedGenerator(3)
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, inputs):
            self.runs += 1
            self.calls.assign_add(1.0)
            self.add_loss(ops.sum(inputs))
            return ops.flip(keras.random.dropout(inputs, 0.5, seed=self.seeds), axis=1)

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape)

    counting, reshape = Counting(), L.Reshape((-1, D // 2))
    with pytest.warns(UserWarning, match="Padding may change"):
        y = layers.EncoderLayer(12, 2)(counting(x))
    runs = counting.runs
    assert runs > 0 and float(counting.calls) == 0 and not counting.losses
    assert to_numpy(counting.seeds.state).tolist() == to_numpy(keras.random.SeedGenerator(3).state).tolist()
    mask_of(y), layers.EncoderLayer(12, 2)(counting.output)
    assert counting.runs == runs  # each call of an operation is tried out once
    assert mask_of(reshape(x)) is not None
    assert reshape.output.shape == (None, None, D // 2)  # Keras raises an error for a layer that was called twice


def test_a_layer_that_returns_its_input(ids):
    class Same(L.Layer):
        def call(self, inputs):
            return inputs

        def compute_output_spec(self, inputs):
            return inputs

    x = keras.Input((None, D))
    assert mask_of(Same()(x * 2.0)) is None


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_trials_in_other_precisions(dtype, ids, x):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is told to")
    for layer in (L.EinsumDense("abc,cd->abd", (None, 4), dtype=dtype), L.LayerNormalization(dtype=dtype)):
        assert mask_of(layer(x)) is get_keras_mask(ids) or found(ids, layer(x)) == MASK.tolist()
    flip = L.Lambda(lambda t: ops.flip(t, axis=1), dtype=dtype)
    assert found(ids, flip(x)) == MASK[:, ::-1].tolist()


# Nested models


def nested(function, shape=(None, D), dtype="float32", name=None):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, function(inputs), name=name)


def test_masks_pass_through_nested_models(ids, x):
    per_token = nested(lambda x: ops.tanh(L.Dense(D)(x * 2.0)))
    backwards = nested(lambda x: ops.flip(x, axis=1))
    plain = keras.Sequential([L.Dense(D), L.Activation("tanh")])
    for given in (x, x * 2.0):
        assert found(ids, per_token(given)) == found(ids, plain(given)) == MASK.tolist()
        assert found(ids, backwards(given)) == MASK[:, ::-1].tolist()


def test_masks_come_out_of_nested_models(ids):
    embed = lambda ids: L.Embedding(11, D, mask_zero=True)(ids)
    inner = nested(lambda ids: ops.tanh(embed(ids) * 2.0)[:, 1:], (None,), "int32")
    outer = nested(lambda ids: inner(ids) + 1.0, (None,), "int32")
    y = outer(ids) * 3.0
    assert found(ids, y) == MASK[:, 1:].tolist()
    model = randomize(keras.Model(ids, layers.EncoderLayer(12, 2)(y)))
    assert_close(model(IDS[:1])[:, :2], model(IDS[:1, :3]), atol=2e-6)
    real, vectors = keras.Input((None,), dtype="bool"), keras.Input((None, D))
    given = keras.Model([vectors, real], layers.EncoderLayer(12, 2)(vectors, mask=real))
    assert mask_of(given([y, ids[:, 1:] != 0]) * 2.0) is not None


def named_inputs(*names):
    return [keras.Input((None,), dtype="int32", name=name) for name in names]


@pytest.mark.parametrize(
    ("given", "of_dict"),
    [("dict", False), ("dict", True), ("more", False), ("named", False), ("named", True), ("list", False)],
)
def test_inputs_of_a_nested_model_are_found_by_name(of_dict, given):
    """The keys are sorted in another order than the inputs of the nested model."""
    tokens, segments = named_inputs("token_ids", "segment_ids")
    embedded = layers.TokenEmbedding(31, D, num_segments=2)(tokens, segment_ids=segments)
    inputs = {"token_ids": tokens, "segment_ids": segments} if of_dict else [tokens, segments]
    nested = keras.Model(inputs, layers.Encoder(1, 7, 3)(embedded))
    a, b = named_inputs("a", "b")
    by_name = {"token_ids": a, "segment_ids": b}
    if given == "list":
        x = nested([a, b])
    elif given == "named":
        x = nested(inputs=by_name)
    else:
        x = nested({**by_name, "other": a} if given == "more" else by_name)
    found = keras.Model([a, b], mask_of(x))
    ids, kinds = np.array([[3, 5, 0]]), np.array([[0, 1, 1]])
    assert to_numpy(found([ids, kinds])).astype(int).tolist() == [[1, 1, 0]]


def test_a_nested_model_that_does_not_see_the_mask_is_told(ids, x):
    encoder = nested(lambda x: layers.EncoderLayer(12, 2)(x), name="encoder")
    model = randomize(keras.Model(ids, layers.EncoderLayer(12, 2)(encoder(x))))  # the inner layer gets Keras' mask
    assert_close(model(IDS[:1])[:, :3], model(IDS[:1, :3]), atol=2e-6)
    with pytest.warns(UserWarning, match=r"'encoder' \(Functional\) before it mixes padding into other tokens"):
        layers.EncoderLayer(12, 2)(encoder(x * 2.0))
