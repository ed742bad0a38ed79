"""Masks are booleans, or 1 and 0: other numbers, such as those of additive masks, are refused."""

import keras
import numpy as np
import pytest

from keras_tx import layers
from tests.tools import assert_close, normal

X, IDS = normal(2, 3, 4), np.array([[3, 4, 2], [1, 2, 0]])
REAL = np.array([[True, True, False], [True, False, False]])
# What makes a layer, the inputs, and the name of the mask.
CASES = {
    "encoder": (lambda: layers.Encoder(1, 8, 2), (X,), "mask"),
    "decoder": (lambda: layers.Decoder(1, 8, 2), (X,), "mask"),
    "memory": (lambda: layers.Decoder(1, 8, 2, cross_attention=True), (X, X), "memory_mask"),
    "queries": (lambda: layers.MultiHeadAttention(2, 3), (X, X), "query_mask"),
    "values": (lambda: layers.MultiHeadAttention(2, 3), (X, X), "value_mask"),
    "keys": (lambda: layers.MultiHeadAttention(2, 3), (X, X), "key_mask"),
    "embedding": (lambda: layers.TokenEmbedding(5, 4, position_encoding="sinusoidal"), (IDS,), "mask"),
    "sinusoidal": (lambda: layers.SinusoidalPositionalEncoding(), (X,), "mask"),
    "learned": (lambda: layers.LearnedPositionalEncoding(5), (X,), "mask"),
    "pairs": (lambda: layers.MultiHeadAttention(2, 3), (X, X), "attention_mask"),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A function of a mask (B, T), and the name of the mask."""
    make, inputs, name = CASES[request.param]
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    layer = make()

    def call(mask):
        return layer(*inputs, **{name: mask[:, None] if name == "attention_mask" else mask})

    call(REAL)
    return call, name


NUMBERS = [(-1e9, 0.0), (-np.inf, 0.0), (0.0, np.nan), (0.0, 0.5), (2.0, 1.0)]
INTEGERS = [(0, 2), (0, -1), (7, 1)]  # such as token ids


@pytest.mark.parametrize(
    ("no", "yes", "dtype"), [(*one, "float32") for one in NUMBERS] + [(*one, "int32") for one in INTEGERS]
)
def test_other_numbers_than_1_and_0_are_refused(case, no, yes, dtype):
    call, name = case
    expected = (
        f"`{name}` must be boolean, or 1 and 0; numbers to add .* `attention_bias`. Received: {name} with the value"
    )
    with pytest.raises(ValueError, match=expected):
        call(np.where(REAL, yes, no).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8"])
def test_1_and_0_are_as_booleans(case, dtype):
    call, _ = case
    assert_close(call(REAL.astype(dtype)), call(REAL), atol=0)


def test_lists_are_checked_too(case):
    call, name = case
    if name != "attention_mask":
        with pytest.raises(ValueError, match=f"`{name}` must be boolean, or 1 and 0"):
            call([[0.0, 0.0, -1e9], [0.0, -1e9, -1e9]])
        assert_close(call([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), call(REAL), atol=0)


@pytest.mark.parametrize("text", ["x", [["a", "b", "c"]], np.array([[b"a"]])])
def test_texts_are_no_masks(case, text):
    call, name = case
    if name != "attention_mask":
        with pytest.raises(ValueError, match=f"`{name}` must be boolean, or 1 and 0. Received: {name}="):
            call(text)


def test_the_mask_of_an_embedding_by_position_is_checked():
    layer = layers.TokenEmbedding(5, 4)
    with pytest.raises(ValueError, match="`mask` must be boolean, or 1 and 0"):
        layer(IDS, None, np.where(REAL, 0, -1e9).astype("float32"))


@pytest.mark.tensorflow
@pytest.mark.parametrize(("policy", "jit_compile"), [("mixed_bfloat16", False), ("float32", True)])
def test_a_model_with_a_mask_of_floats_trains_as_one_with_booleans(policy, jit_compile):
    """Keras gives every input floats unless told otherwise. XLA cannot raise errors, and leaves the check out."""

    def trained(dtype, real):
        keras.utils.set_random_seed(3)
        x, mask = keras.Input((3, 4)), keras.Input((3,), dtype=dtype)
        outputs = layers.Encoder(1, 8, 2, dtype=policy)(x, mask=mask)
        model = keras.Model([x, mask], keras.layers.Dense(1)(outputs[:, 0]))
        model.compile("sgd", "mse", jit_compile=jit_compile)
        model.fit([X, real.astype(dtype)], np.ones((2, 1)), epochs=2, verbose=0)
        return model, model.get_weights()

    (model, found), (_, expected) = trained("float32", REAL), trained("bool", REAL)
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two, atol=1e-6)
    if not jit_compile:
        with pytest.raises(Exception, match="`mask` must be boolean, or 1 and 0"):
            model.predict([X, np.where(REAL, 0, -1e9)], verbose=0)


@pytest.mark.tensorflow
def test_a_graph_checks_what_only_it_knows(case):
    import tensorflow as tf

    call, name = case
    graph = tf.function(call)
    assert_close(graph(tf.constant(REAL, "float32")), call(REAL), atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"`{name}` must be boolean, or 1 and 0; .* other values"):
        graph(tf.constant(np.where(REAL, 0, -1e9), "float32"))
    if name != "attention_mask":  # the check does not depend on the dtype, and another is another graph
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"`{name}` must be boolean, or 1 and 0; .* other values"):
        graph(tf.constant(np.where(REAL, 3, 0), "int32"))
