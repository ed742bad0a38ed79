"""`Encoder(skip_padding=True)`: the same at real tokens, zeros at padding, and less computed."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_tx.layers import Encoder, FeedForward, MultiHeadAttention
from keras_tx.layers.attention import dispatch as routes
from keras_tx.layers.attention import layer as attention
from keras_tx.layers.attention import parts as divided
from keras_tx.layers.exported_weights import exported_weights
from keras_tx.layers.unpadding import Unpadding
from tests.tools import assert_close, gradients, normal, randomize, to_numpy

B, T, D = 5, 13, 12
LENGTHS = [7, 3, 11, 1, 0]
RIGHT = np.arange(T)[None] < np.array(LENGTHS)[:, None]
HOLES = np.random.default_rng(3).random((B, T)) < 0.6

OPTIONS = {
    "post-norm": {},
    "pre-norm": {"normalize_first": True, "gated": True, "activation": "silu", "use_bias": False},
    "alibi": {"position_bias": "alibi"},
    "relative": {"position_bias": "relative"},
    "rotary": {"attention_options": {"rotary": True, "num_key_value_heads": 1, "qk_norm": True, "use_gate": True}},
    "window": {"attention_options": {"sliding_window": 3}},
    "blockwise": {"attention_options": {"blockwise": True}},
    "remat": {"remat": True},
}

ARGUMENTS = {
    "attention_mask": np.random.default_rng(5).random((B, T, T)) < 0.7,
    "attention_bias": normal(B, 3, T, T),
    "document_ids": np.arange(T)[None] // 4 + np.ones((B, 1), "int32"),
    "positions": np.random.default_rng(7).integers(0, 17, (B, T)),
}


def pair(**options):
    """Encoders of the same weights, without and with `skip_padding`."""
    plain, skipping = (Encoder(2, 17, 3, skip_padding=skip, **options) for skip in (False, True))
    for one in (plain, skipping):
        one.build((None, None, D))
    skipping.set_weights(randomize(plain).get_weights())
    return plain, skipping


@functools.cache
def shared_pair(name):
    """A pair that several tests call and none changes."""
    return pair(**OPTIONS[name])


def check_same(name, mask, training=False, **arguments):
    x = normal(*mask.shape, D)
    kept = ops.cast(mask, "float32")[..., None]
    plain, skipping = shared_pair(name)
    expected = gradients(lambda x: plain(x, mask=mask, training=training, **arguments) * kept, [x])
    found = gradients(lambda x: skipping(x, mask=mask, training=training, **arguments), [x])
    for got, wanted in zip(found, expected, strict=True):
        # The gradient of a norm divides by deviations, which can be small in rows that no norm has prepared.
        assert_close(got, wanted, atol=5e-5 if name == "pre-norm" else 2e-5)
    assert (found[0][~mask] == 0).all() and (found[1][~mask] == 0).all()


@pytest.mark.parametrize("mask", [RIGHT, RIGHT[:, ::-1], HOLES], ids=["right", "left", "holes"])
@pytest.mark.parametrize("name", OPTIONS)
def test_real_tokens_and_gradients_are_the_same_and_padding_is_zero(name, mask):
    check_same(name, mask, training=name == "remat")


@pytest.mark.parametrize("mask", [RIGHT, HOLES], ids=["right", "holes"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_said_of_the_rows_still_holds(name, mask):
    check_same("rotary" if name == "positions" else "post-norm", mask, **{name: ARGUMENTS[name]})


@settings(max_examples=15 if keras.backend.backend() == "tensorflow" else 4, deadline=None)
@given(
    st.integers(0, 4), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from(["post-norm", "rotary", "relative"])
)
def test_any_padding(batch, length, seed, name):
    random = np.random.default_rng(seed)
    mask = random.random((batch, length)) < random.random((batch, 1))
    check_same(name, mask)


def model_of(encoder, dtype=None, run_eagerly=False):
    ids = keras.Input((T,), dtype="int32")
    keras.utils.set_random_seed(3)
    embedded = keras.layers.Embedding(17, D, mask_zero=True, embeddings_initializer="normal", dtype=dtype)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(encoder(embedded))))
    eagerly = run_eagerly and keras.backend.backend() == "tensorflow"
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False, run_eagerly=eagerly)
    return model


IDS = np.random.default_rng(1).integers(1, 17, (B, T)) * RIGHT


def learned(encoder, dtype=None, run_eagerly=True):
    """The weights after two steps; the last row, all padding, has no mean."""
    model = model_of(encoder, dtype, run_eagerly)
    model.fit(IDS[:-1], np.arange(B - 1)[:, None] / B, batch_size=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.tensorflow  # elsewhere padding is computed and then set to 0, which the gradients above cover
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_learn_the_same(options):
    plain, skipping = pair(**options)
    before = skipping.get_weights()
    run_eagerly = options != OPTIONS["remat"]  # a graph is traced for one kind only, as it takes long
    for got, expected in zip(learned(skipping, None, run_eagerly), learned(plain, None, run_eagerly), strict=True):
        assert_close(got, expected, atol=5e-6)
    assert max(np.abs(new - old).max() for new, old in zip(skipping.get_weights(), before, strict=True)) > 1e-3


@pytest.mark.tensorflow
def test_with_dropout_computing_again_changes_nothing(monkeypatch):
    def found():
        keras.utils.set_random_seed(11)
        encoder = Encoder(2, 17, 3, dropout=0.3, skip_padding=True, remat=True)
        encoder.build((None, None, D))
        return learned(encoder)

    got = found()
    monkeypatch.setattr(keras, "remat", lambda function: function)  # the same seeds, and nothing computed again
    for one, expected in zip(got, found(), strict=True):
        assert_close(one, expected, atol=2e-6)


@pytest.mark.tensorflow
def test_half_precision_learns_nearly_the_same():
    plain, skipping = pair(dtype="mixed_bfloat16")
    for got, expected in zip(learned(skipping, "mixed_bfloat16"), learned(plain, "mixed_bfloat16"), strict=True):
        assert_close(got, expected, atol=2e-2)


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_int8_goes_on():
    plain, skipping = (model_of(encoder) for encoder in pair())
    skipping.set_weights(plain.get_weights())
    before = to_numpy(skipping(IDS[:-1]))
    for model in (plain, skipping):
        model.quantize("int8")
    found = to_numpy(skipping(IDS[:-1]))
    assert_close(found, plain(IDS[:-1]), atol=1e-3)
    assert 1e-5 < np.abs(found - before).max() < 0.2


def test_scores_and_hidden_states_are_those_of_the_rows():
    plain, skipping = pair(normalize_first=True)
    x = normal(B, T, D)
    assert [one.shape for one in skipping(x, mask=RIGHT, return_hidden_states=True)] == [(B, T, D), (B, 3, T, D)]
    asked = {"mask": RIGHT, "return_attention_scores": True, "return_hidden_states": True}
    expected, found = (layer(x, **asked) for layer in (plain, skipping))
    assert_close(found[1], expected[1])
    real = RIGHT[:, None, :, None]
    assert found[2].shape == (B, 3, T, D)
    assert_close(to_numpy(found[2])[:, 1:], to_numpy(expected[2])[:, 1:] * real, atol=2e-6)
    assert_close(found[2][:, 0], x)


def test_without_a_mask_nothing_is_padding():
    plain, skipping = shared_pair("post-norm")
    x = normal(B, T, D)
    assert_close(skipping(x), plain(x), atol=0)


def test_document_zero_is_padding():
    plain, skipping = shared_pair("post-norm")
    x, documents = normal(B, T, D), np.where(HOLES, 1 + np.arange(T) // 5, 0)
    expected, found = (layer(x, document_ids=documents) for layer in (plain, skipping))
    assert_close(found, to_numpy(expected) * HOLES[..., None], atol=2e-6)
    both = skipping(x, mask=RIGHT, document_ids=documents)
    assert (to_numpy(both)[~(RIGHT & HOLES)] == 0).all()


@pytest.mark.tensorflow
def test_little_is_computed_for_padding(monkeypatch):
    """Each feed-forward sees the real tokens alone, and attention parts no longer than the longest of their texts."""
    seen, lengths = [], []
    whole, attend = FeedForward.call, attention.attend_in_parts
    monkeypatch.setattr(
        FeedForward, "call", lambda self, x, **options: seen.append(x.shape) or whole(self, x, **options)
    )

    def in_parts(query, key, value, parts, **options):
        lengths.append([one.shape[-1] for one in parts.masks])
        return attend(query, key, value, parts, **options)

    monkeypatch.setattr(attention, "attend_in_parts", in_parts)
    monkeypatch.setattr(divided, "_num_parts", lambda length: 4)
    _, skipping = shared_pair("post-norm")
    skipping(normal(B, T, D), mask=RIGHT)
    assert seen == [(1, sum(LENGTHS), D)] * 2
    assert lengths == [[0, 3, 7, 11]] * 2  # of 15 pairs of a text and a head: 3, 4, 4 and 4


@pytest.mark.tensorflow
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("options", [{"hard_attention": True}, {"blockwise": False, "sliding_window": 12}])
def test_other_attention_has_rows_as_long_as_the_longest_or_whole_for_scores(monkeypatch, options, asks):
    seen, attend = [], routes.attend
    monkeypatch.setattr(routes, "LONG", T * T)
    monkeypatch.setattr(
        routes, "attend", lambda *heads, **kwargs: seen.append(heads[0].shape) or attend(*heads, **kwargs)
    )
    _, skipping = pair(attention_options=options)
    skipping(normal(B, T, D), mask=RIGHT, return_attention_scores=asks)
    assert seen == [(B, T if asks else max(LENGTHS), 3, 4)] * 2


@pytest.mark.tensorflow
def test_rows_of_an_unknown_length_are_not_divided_into_parts(monkeypatch):
    import tensorflow as tf

    seen, attend = [], routes.attend
    monkeypatch.setattr(
        routes, "attend", lambda *heads, **kwargs: seen.append(heads[0].shape) or attend(*heads, **kwargs)
    )
    _, skipping = shared_pair("post-norm")
    signature = [tf.TensorSpec((None, None, D)), tf.TensorSpec((None, None), "bool")]
    tf.function(lambda x, mask: skipping(x, mask=mask), signature).get_concrete_function()
    assert [shape.as_list() for shape in seen] == [[None, None, 3, 4]] * 2


@pytest.mark.tensorflow
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [7], [5, 0, 2], [8], [6, 3, 11], []])
def test_in_an_export_at_least_8_tokens_are_left_and_the_same_come_back(lengths):
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((None, None), "bool"), tf.TensorSpec((None, None, D))])
    def run(mask, x):
        made = Unpadding(mask, x, cut=True)
        return made.remove(x), made.whole(made.remove(x)), made.rows(made.remove(x))[0]

    mask = np.arange(13) < np.array(lengths, int).reshape(-1, 1)
    x, real = normal(len(lengths), 13, D), sum(lengths)
    with exported_weights():
        left, whole, rows = run(mask, x)
    assert left.shape == (1, max(real, 8) if lengths else 0, D)
    assert_close(left[0, :real], x[mask], atol=0)
    assert_close(left[0, real:], np.tile(x[:1, 0], (max(8 - real, 0), 1)) if lengths else x[mask], atol=0)
    assert_close(whole, x * mask[..., None], atol=0)
    assert_close(rows, (x * mask[..., None])[:, : max(1, *lengths) if lengths else 0], atol=0)


@pytest.mark.tensorflow
def test_rows_of_an_unknown_length_are_one_part_in_an_export(monkeypatch):
    import tensorflow as tf

    seen, attend = [], attention.attend_in_parts

    def in_parts(query, key, value, parts, **options):
        seen.append(len(parts.masks))
        return attend(query, key, value, parts, **options)

    monkeypatch.setattr(attention, "attend_in_parts", in_parts)
    plain, skipping = shared_pair("post-norm")
    signature = [tf.TensorSpec((None, None, D)), tf.TensorSpec((None, None), "bool")]
    graph = tf.function(lambda x, mask: skipping(x, mask=mask), signature)
    with exported_weights():
        graph.get_concrete_function()
    assert seen == [1, 1]
    x = normal(B, T, D)
    for mask in (RIGHT, RIGHT[:, :3], RIGHT[2:, :1]):
        rows, length = mask.shape
        given = x[:rows, :length]
        assert_close(graph(given, mask), to_numpy(plain(given, mask=mask)) * mask[..., None], atol=2e-6)


@pytest.mark.tensorflow
def test_long_rows_go_by_blocks_also_where_the_mask_does_not_know_its_length(monkeypatch):
    import tensorflow as tf

    seen = []
    monkeypatch.setattr(routes, "LONG", T * T)
    monkeypatch.setattr(
        routes, "attend_blockwise", lambda query, *rest, **kwargs: seen.append(query.shape) or query * 0
    )
    _, skipping = shared_pair("post-norm")
    signature = [tf.TensorSpec((B, T, D)), tf.TensorSpec((None, None), "bool")]
    graph = tf.function(lambda x, mask: skipping(x, mask=mask), signature)
    assert graph(normal(B, T, D), RIGHT).shape == graph.get_concrete_function().outputs[0].shape == (B, T, D)
    assert seen == [(B, T, 3, 4)] * 2


@pytest.mark.tensorflow
def test_long_rows_keep_their_known_length_and_go_by_blocks(monkeypatch):
    seen = []
    blockwise = routes.attend_blockwise
    monkeypatch.setattr(routes, "LONG", T * T)
    monkeypatch.setattr(
        routes, "attend_blockwise", lambda *heads, **kwargs: seen.append(heads[0].shape) or blockwise(*heads, **kwargs)
    )
    plain, skipping = shared_pair("post-norm")
    x = normal(B, T, D)
    found, expected = (layer(x, mask=RIGHT) for layer in (skipping, plain))
    assert seen == [(B, T, 3, 4)] * 4
    assert_close(found, to_numpy(expected) * RIGHT[..., None], atol=2e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_graphs_of_unknown_sizes_give_the_same(jit_compile):
    import tensorflow as tf

    _, skipping = shared_pair("post-norm")
    signature = [tf.TensorSpec((None, None, D)), tf.TensorSpec((None, None), "bool")]
    graph = tf.function(lambda x, mask: skipping(x, mask=mask), signature, jit_compile=jit_compile)
    # Under XLA all tokens are computed, whatever their number, and each shape is compiled anew.
    for batch, length in ((2, 7),) if jit_compile else ((B, T), (2, 7), (1, 1)):
        x, mask = normal(batch, length, D), RIGHT[:batch, :length]
        assert_close(graph(x, mask), skipping(x, mask=mask), atol=5e-6)


@pytest.mark.tensorflow
def test_under_xla_gradients_are_the_same():
    import tensorflow as tf

    _, skipping = shared_pair("post-norm")

    def slopes(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(skipping(x, mask=RIGHT) * normal(B, T, D, seed=1))
        return tape.gradient(total, [one.value for one in skipping.trainable_weights])

    x = tf.constant(normal(B, T, D))
    for got, expected in zip(tf.function(slopes, jit_compile=True)(x), slopes(x), strict=True):
        assert_close(got, expected, atol=2e-5)


@pytest.mark.tensorflow
def test_keras_does_not_compile_it_by_xla():
    inputs = keras.Input((T, D))
    model = keras.Model(inputs, Encoder(1, 17, 3, skip_padding=True)(inputs))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile
    model.layers[-1].skip_padding = False
    model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile


@pytest.mark.tensorflow
def test_nothing_of_padding_or_of_another_text_reaches_a_text():
    _, skipping = shared_pair("post-norm")
    x = normal(B, T, D)
    expected = to_numpy(skipping(x, mask=RIGHT))
    x[~RIGHT] = np.nan
    x[1] = np.inf
    found = to_numpy(skipping(x, mask=RIGHT))
    np.testing.assert_array_equal(found[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float16", "mixed_float16"])
def test_half_precision(dtype):
    plain, skipping = (Encoder(2, 17, 3, skip_padding=skip, dtype=dtype) for skip in (False, True))
    x = normal(B, T, D)
    expected = plain(x, mask=RIGHT)
    skipping.build(x.shape)
    skipping.set_weights(plain.get_weights())
    found = skipping(x, mask=RIGHT)
    assert found.dtype == expected.dtype
    expected = to_numpy(ops.cast(expected, "float32")) * RIGHT[..., None]
    assert_close(ops.cast(found, "float32"), expected, atol=5e-2)


@pytest.mark.parametrize("of", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_drops_in_training_alone(of):
    encoder = Encoder(1, 17, 3, **{"dropout": 0.0, of: 0.5}, skip_padding=True)
    x = normal(B, T, D)
    first, second, still, again = (to_numpy(encoder(x, mask=RIGHT, training=on)) for on in (True, True, False, False))
    longer = RIGHT.sum(1) > 1  # a token alone has one score, that stays or goes
    changed = np.abs(first - second).max(-1) > 1e-3
    assert changed[RIGHT & longer[:, None]].mean() > 0.9 and not changed[~RIGHT].any()
    assert_close(still, again, atol=0)
    assert (first[~RIGHT] == 0).all()


def test_what_does_not_go_with_it_is_refused():
    encoder = Encoder(1, 17, 3, attention_options={"activity_regularizer": "l2"}, skip_padding=True)
    with pytest.raises(ValueError, match="`skip_padding` cannot be used with `activity_regularizer`. .*'query'"):
        encoder(normal(B, T, D), mask=RIGHT)
    layer = MultiHeadAttention(3, 4)
    x = normal(B, T, D)
    with pytest.raises(ValueError, match="`unpadding` must come without a `cache`. Received: cache of type KeyValue"):
        layer(x, x, cache=layer.new_cache(B, T), start=0, unpadding=object())


def test_skip_padding_is_a_boolean_or_none():
    message = "`skip_padding` must be True, False or None. Received: skip_padding='yes'"
    with pytest.raises(TypeError, match=message):
        Encoder(1, 17, 3, skip_padding="yes")
    encoder = Encoder(1, 17, 3, skip_padding=True)
    with pytest.raises(TypeError, match="Received: skip_padding='no'"):
        encoder.skip_padding = "no"
    assert encoder.skip_padding is True
