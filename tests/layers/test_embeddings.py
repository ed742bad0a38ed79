"""Token embedding: each argument changes what it says, ids are refused where that can be known."""

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import SinusoidalPositionalEncoding, TokenEmbedding, xla
from tests.tools import assert_close, normal, randomize, to_numpy

V, D = 23, 10
IDS = np.array([[3, 4, 5, 6, 0], [7, 1, 22, 2, 9]], "int32")


def embedding(**arguments):
    layer = TokenEmbedding(V, D, **arguments)
    layer(IDS)
    return randomize(layer)


def test_the_sum_is_tokens_times_root_d_plus_positions_plus_segments_then_norm():
    layer = embedding(scale=True, position_encoding="learned", max_length=7, num_segments=3, normalization="layer_norm")
    segments = np.array([[0, 0, 1, 1, 0], [2, 2, 2, 0, 1]])
    table, positions, segment_table = (
        to_numpy(w).astype("float64") for w in (layer.tokens.embeddings, layer.positions.embeddings, layer.segments)
    )
    total = table[IDS] * np.sqrt(D) + positions[[[0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]] + segment_table[segments]
    centred = total - total.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = expected * to_numpy(layer.norm.gamma) + to_numpy(layer.norm.beta)
    assert_close(layer(IDS, segment_ids=segments), expected, atol=5e-6)


def test_a_layer_of_positions_may_be_given_and_is_saved_with_the_embedding():
    layer = embedding(position_encoding=SinusoidalPositionalEncoding(layout="concatenated", max_wavelength=50))
    again = TokenEmbedding.from_config(layer.get_config())
    again(IDS)
    again.set_weights(layer.get_weights())
    assert again.position_encoding.get_config()["layout"] == "concatenated"
    assert_close(again(IDS), layer(IDS), atol=0)
    plain = embedding(position_encoding="sinusoidal")
    plain.set_weights(layer.get_weights())
    assert np.abs(to_numpy(plain(IDS)) - to_numpy(layer(IDS))).max() > 0.1


def test_positions_may_be_given():
    layer = embedding(position_encoding="learned", max_length=7)
    positions = np.array([6, 5, 4, 3, 2])
    expected = to_numpy(layer.tokens.embeddings)[IDS] + to_numpy(layer.positions.embeddings)[positions]
    assert_close(layer(IDS, positions=positions), expected)


@pytest.mark.parametrize("embedding_dim", [None, 23])
@pytest.mark.parametrize("scale", [True, False])
def test_positions_and_segments_begin_as_large_as_what_they_are_added_to(scale, embedding_dim):
    options = {"position_encoding": "learned", "max_length": 307, "num_segments": 211, "embedding_dim": embedding_dim}
    layer = TokenEmbedding(401, 31, scale=scale, embeddings_initializer="normal", **options)
    layer.build((None, None))
    tables = layer.tokens.embeddings, layer.positions.embeddings, layer.segments
    sizes = [np.sqrt(np.mean(np.square(to_numpy(table)))) for table in tables]
    factor = (embedding_dim or 31) ** 0.5 if scale else 1
    np.testing.assert_allclose(sizes[1:], factor * sizes[0], rtol=0.06)
    position, segment = (to_numpy(table)[:200].ravel() for table in tables[1:])
    assert abs(np.corrcoef(position, segment)[0, 1]) < 0.1  # they are not the same numbers


def test_the_initializers_of_positions_and_tables_can_be_saved_and_cloned():
    embedding = TokenEmbedding(V, D, scale=True, zero_padding=True, position_encoding="learned", max_length=7)
    embedding.build((None, None))
    positions = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(embedding.positions))
    table = embedding.tokens.embeddings_initializer
    saved = keras.initializers.deserialize(keras.initializers.serialize(table))
    for initializer in (positions.embeddings_initializer, embedding.positions.embeddings_initializer.clone()):
        assert 0.05 < np.abs(to_numpy(initializer((V, D)))).max() <= 0.05 * D**0.5
    for initializer in (saved, table.clone()):
        values = to_numpy(initializer((V, D)))
        assert not values[0].any() and 0 < np.abs(values[1:]).max() <= 0.05


def test_segments_that_are_not_given_are_zero():
    layer = embedding(num_segments=2)
    assert_close(layer(IDS), layer(IDS, segment_ids=np.zeros_like(IDS)), atol=0)


def test_reverse_gives_the_products_with_the_token_table():
    layer = embedding(scale=True, position_encoding="sinusoidal", normalization="rms_norm")
    x = normal(2, 5, D)
    assert_close(layer(x, reverse=True), x @ to_numpy(layer.tokens.embeddings).T, atol=3e-6)
    symbolic = layer(keras.Input((None, D)), reverse=True)
    assert symbolic.shape == (None, None, V)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float64"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_logits_have_the_dtype_that_the_layer_declares(policy, is_int8):
    """As those of a dense layer do: on every backend, traced for XLA or not, and of integers, too."""
    compute_dtype = keras.DTypePolicy(policy).compute_dtype
    if compute_dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("JAX computes in float64 only if its 64-bit types are on")
    if is_int8 and compute_dtype in ("float16", "float64"):
        pytest.skip("Keras quantizes no layers of this dtype")
    layer = embedding(dtype=policy)
    vectors = keras.ops.cast(normal(3, 2, D), compute_dtype)
    if is_int8:
        layer.tokens.quantize("int8")
    declared = layer.compute_output_spec(keras.KerasTensor((3, 2, D), compute_dtype), reverse=True).dtype
    assert declared == compute_dtype
    with xla.tracing(True):
        traced = layer(vectors, reverse=True)
    eager = layer(vectors, reverse=True)
    for logits in (traced, eager):
        assert keras.backend.standardize_dtype(logits.dtype) == compute_dtype
    assert_close(*(to_numpy(keras.ops.cast(one, "float32")) for one in (traced, eager)), atol=0.1)


def test_the_mask_is_where_there_is_no_padding_id():
    assert to_numpy(embedding().compute_mask(IDS)).astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert to_numpy(embedding(padding_id=9).compute_mask(IDS)).astype(int)[1].tolist() == [1, 1, 1, 1, 0]
    assert embedding(padding_id=None).compute_mask(IDS) is None
    assert to_numpy(embedding().compute_mask(IDS.astype("float32"))).astype(int)[0].tolist() == [1, 1, 1, 1, 0]
    assert embedding().compute_mask(normal(2, 5, D)) is None  # the vectors of `reverse`


def test_logits_of_one_vector_for_each_row_have_no_mask():
    layer, ids = embedding(), keras.Input((None,), dtype="int32")
    logits = layer(layer(ids)[:, -1], reverse=True)
    assert get_keras_mask(logits) is None and get_keras_mask(layer(normal(2, D), reverse=True)) is None
    model = keras.Model(ids, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    found = model.evaluate(IDS, np.array([4, 9]), verbose=0)
    assert_close(found, loss(np.array([4, 9]), model(IDS)), rtol=1e-5)


def test_a_given_mask_counts_instead_of_the_padding_id():
    layer = embedding(position_encoding="sinusoidal")
    mask = np.array([[False, False, True, True, True]] * 2)
    output = layer(IDS, mask=mask)
    assert_close(get_keras_mask(output), mask)
    shifted = layer(IDS, mask=np.ones_like(mask), positions=np.array([0, 0, 0, 1, 2]))
    assert_close(to_numpy(output)[:, 2:], to_numpy(shifted)[:, 2:])


def test_dropout_drops_in_training_only():
    layer = embedding(dropout=0.5)
    assert_close(layer(IDS), to_numpy(layer.tokens.embeddings)[IDS])
    dropped = to_numpy(layer(IDS, training=True))
    assert 0.2 < (dropped == 0).mean() < 0.8


def test_dropout_comes_before_the_norm_if_asked():
    # RMS norm keeps zeros, and makes the root mean square of what dropout left 1.
    options = {"normalization": "rms_norm", "dropout": 0.5}
    for before in (False, True):
        layer = TokenEmbedding(V, D, **options, dropout_before_norm=before, embeddings_initializer="normal")
        dropped = to_numpy(layer(np.arange(1, V)[None], training=True))
        squares = (dropped**2).mean(-1)
        assert 0.2 < (dropped == 0).mean() < 0.8
        assert (np.abs(squares - 1) < 0.02).mean() > 0.9 if before else np.abs(squares - 1).max() > 0.2
        again = TokenEmbedding.from_config(layer.get_config())
        assert again.dropout_before_norm is before
        assert_close(again(IDS).shape, layer(IDS).shape)


def zero_padded(padding_id=9, **options):
    return embedding(padding_id=padding_id, zero_padding=True, **options)


def test_the_padding_row_is_zero_and_its_logit_too():
    table = to_numpy(TokenEmbedding(V, D, zero_padding=True, padding_id=9)(np.arange(V)[None]))[0]
    assert not table[9].any() and table[np.arange(V) != 9].any(-1).all()
    built = TokenEmbedding(V, D, zero_padding=True, padding_id=9)
    built.build((None, None))
    assert not to_numpy(built.tokens.embeddings)[9].any()  # and in files, so that others read zeros
    layer = zero_padded(position_encoding="learned", max_length=7)  # `randomize` also changed the padding row
    plain = embedding(padding_id=9, position_encoding="learned", max_length=7)
    plain.set_weights(layer.get_weights())
    table = to_numpy(plain.tokens.embeddings).copy()
    table[9] = 0
    plain.tokens.embeddings.assign(table)
    x = normal(2, 5, D)
    assert_close(layer(IDS), plain(IDS), atol=0)
    assert_close(layer(x, reverse=True), plain(x, reverse=True), atol=0)
    assert not to_numpy(layer(x, reverse=True))[..., 9].any()
    assert TokenEmbedding.from_config(layer.get_config()).zero_padding


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_padding_row_is_not_trained_also_if_it_is_tied(optimizer):
    for zero_padding in (True, False):
        keras.utils.set_random_seed(1)
        layer = TokenEmbedding(V, D, zero_padding=zero_padding)
        ids = keras.Input((None,), dtype="int32")
        model = keras.Model(ids, layer(layer(ids) + 1.0, reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, run_eagerly=keras.backend.backend() == "tensorflow")
        before = to_numpy(layer.tokens.embeddings).copy()
        model.train_on_batch(IDS, IDS)
        changed = np.abs(to_numpy(layer.tokens.embeddings) - before).max(-1) > 0
        assert changed[1:].all() and changed[0] == (not zero_padding)


@pytest.mark.tensorflow
def test_a_zero_padding_row_has_no_gradient_even_from_nan():
    import tensorflow as tf

    layer = TokenEmbedding(V, D, zero_padding=True)
    layer(IDS)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(IDS) * np.where(IDS == 0, np.nan, 1.0)[..., None])
    gradient = tf.convert_to_tensor(tape.gradient(total, layer.tokens.embeddings.value))
    assert not to_numpy(gradient)[0].any() and np.isfinite(to_numpy(gradient)).all()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_every_integer_dtype_reads_the_same_rows(dtype):
    layer = embedding(position_encoding="sinusoidal")
    assert_close(layer(IDS.astype(dtype)), layer(IDS), atol=0)


@pytest.mark.parametrize(
    ("dtype", "size"), [("uint8", 259), ("int8", 200), ("int16", 2**15 + 7), ("uint16", 2**16 + 7)]
)
def test_narrow_dtypes_read_the_rows_of_large_tables(dtype, size):
    layer = TokenEmbedding(size, 3)
    ids = np.array([[1, 5, 100, np.iinfo(dtype).max]])
    assert_close(layer(ids.astype(dtype)), layer(ids), atol=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS + 0.5, r"`inputs` must be integers or whole numbers. Received: 3.5 in inputs of shape \(2, 5\)"),
        (IDS * np.nan, r"`inputs` must be integers or whole numbers. Received: nan in inputs of shape"),
        (IDS * 1e20, r"`inputs` must be in \[0, 23\). Received: 3e\+20 in inputs of shape \(2, 5\)"),
        (IDS - 1.0, r"`inputs` must be in \[0, 23\). Received: -1.0 in inputs of shape \(2, 5\)"),
        (np.array([["dog"]]), "`inputs` must be integers; a tokenizer .* Received: inputs of dtype <U3"),
        (np.array([["dog"]], object), "`inputs` must be integers; a tokenizer .* Received: inputs of dtype object"),
        (keras.Input((None,), dtype="string"), "`inputs` must be integers; a tokenizer .* inputs of dtype string"),
        (IDS > 3, "`inputs` must be integers; .* Received: inputs of dtype bool"),
        (IDS + 4, r"`inputs` must be in \[0, 23\). Received: 26 in inputs of shape \(2, 5\)"),
        (IDS - 1, r"`inputs` must be in \[0, 23\). Received: -1 in inputs of shape \(2, 5\)"),
    ],
)
def test_ids_that_are_no_rows_of_the_table_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        TokenEmbedding(V, D)(ids)


def test_floats_that_cannot_hold_every_id_are_refused():
    message = "in .0, 257. must be integers, because bfloat16 holds whole numbers to 256 only; .* of dtype bfloat16"
    TokenEmbedding(256, D)(keras.Input((None,), dtype="bfloat16"))
    with pytest.raises(ValueError, match=message):
        TokenEmbedding(257, D)(keras.Input((None,), dtype="bfloat16"))
    # Keras' own Embedding reads the row 1000 for the id 999 here.
    with pytest.raises(ValueError, match=message):
        keras.Sequential([TokenEmbedding(257, D, dtype="mixed_bfloat16")]).build((None, 5))


SCRIPTS = {  # as they are written with keras.layers.Embedding
    "sequential": lambda layer: keras.Sequential([layer, keras.layers.GlobalAveragePooling1D()]),
    "sequential with an input": lambda layer: keras.Sequential(
        [keras.Input((5,)), layer, keras.layers.GlobalAveragePooling1D()]
    ),
    "functional": lambda layer: keras.Model(x := keras.Input((5,)), keras.layers.GlobalAveragePooling1D()(layer(x))),
}


@pytest.mark.parametrize(
    ("script", "dtype", "mask_zero"),
    [
        ("sequential", "float32", True),
        ("sequential", "float32", False),
        ("sequential with an input", "mixed_bfloat16", True),
        ("functional", "mixed_bfloat16", True),
    ],
)
def test_it_stands_where_the_embedding_of_keras_stands(script, dtype, mask_zero):
    ids = np.array([[300, 257, 5, 0, 0], [7, 1, 999, 2, 9]])
    theirs, ours = (
        SCRIPTS[script](layer(1000, D, mask_zero=mask_zero, dtype=dtype))
        for layer in (keras.layers.Embedding, TokenEmbedding)
    )
    for model in (theirs, ours):
        model.build((None, 5))
        model.compile("sgd", "mse", run_eagerly=True)
    randomize(theirs)
    ours.set_weights(theirs.get_weights())
    for given in (ids, ids.astype("float32")):
        assert_close(ours(given), theirs(given), atol=0)
    assert_close(ours.predict(ids, verbose=0), theirs.predict(ids, verbose=0), atol=0)


def test_a_model_with_float_ids_is_saved_and_compiled(tmp_path):
    model = SCRIPTS["functional"](TokenEmbedding(V, D, mask_zero=True))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_close(again.predict(IDS, verbose=0), model(IDS))


@pytest.mark.parametrize(
    ("arguments", "padding_id", "mask_zero"),
    [
        ({}, 0, True),
        ({"mask_zero": True}, 0, True),
        ({"mask_zero": False}, None, False),
        ({"padding_id": None}, None, False),
        ({"padding_id": None, "mask_zero": False}, None, False),
        ({"padding_id": 5}, 5, False),
        ({"padding_id": 5, "mask_zero": False}, 5, False),
    ],
)
def test_mask_zero_says_whether_padding_is_0(arguments, padding_id, mask_zero):
    layer = TokenEmbedding(V, D, **arguments)
    for one in (layer, TokenEmbedding.from_config(layer.get_config())):
        assert (one.padding_id, one.mask_zero) == (padding_id, mask_zero)


@pytest.mark.parametrize("padding_id", [None, 5])
def test_mask_zero_with_another_padding_id_is_refused(padding_id):
    with pytest.raises(
        ValueError, match=f"needs the `padding_id` 0. Received: padding_id={padding_id}, mask_zero=True"
    ):
        TokenEmbedding(V, D, padding_id=padding_id, mask_zero=True)


def test_segments_outside_their_table_are_refused():
    with pytest.raises(ValueError, match=r"`segment_ids` must be in \[0, 2\). Received: 2 in segment_ids"):
        embedding(num_segments=2)(IDS, segment_ids=np.full_like(IDS, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"segment_ids": np.zeros((3, 5), "int32")}, r"`segment_ids` must have the shape \(2, 5\).*shape=\(3, 5\)"),
        ({"mask": np.ones((2, 4), "bool")}, r"`mask` must have the shape \(2, 5\). Received: mask.shape=\(2, 4\)"),
        (
            {"segment_ids": np.zeros((2, 5), "int32")},
            "`segment_ids` must be given only with `num_segments` .*num_segments=0",
        ),
        (
            {"positions": np.arange(5)},
            "`positions` must be given only with a `position_encoding`. .*position_encoding=None",
        ),
    ],
)
def test_what_plays_no_part_or_has_a_wrong_shape_is_refused(call, message):
    layer = embedding(num_segments=2) if "must have" in message else embedding()
    with pytest.raises(ValueError, match=message):
        layer(IDS, **call)


def test_ids_outside_the_table_never_read_nan_in_a_jax_program():
    if keras.backend.backend() != "jax":
        pytest.skip("needs the JAX backend")
    import jax

    layer = embedding()
    rows = jax.jit(lambda ids: layer(ids))(np.array([[99, -1]]))
    assert_close(rows[0], to_numpy(layer.tokens.embeddings)[[V - 1, 0]])


@pytest.mark.tensorflow
@pytest.mark.parametrize("wrong", [V, -1])
def test_a_graph_refuses_ids_outside_the_table(wrong):
    import tensorflow as tf

    graph = tf.function(embedding(), input_signature=[tf.TensorSpec((None, None), tf.int32)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 23\)"):
        graph(np.array([[1, wrong]], "int32"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 0}, "`vocabulary_size` must be a positive integer. Received: vocabulary_size=0"),
        ({"hidden_dim": -2}, "`hidden_dim` must be a positive integer. Received: hidden_dim=-2"),
        ({"padding_id": V}, r"`padding_id` must be None or in \[0, vocabulary_size\). Received: padding_id=23"),
        ({"position_encoding": "learnt"}, "`position_encoding` must be one of .*Received: position_encoding='learnt'"),
        ({"position_encoding": "learned"}, "`max_length` must be given with learned positions. Received: max_length=N"),
        ({"max_length": 9}, "`max_length` must be given only with learned positions. Received: max_length=9"),
        ({"padding_id": "[PAD]"}, r"`padding_id` must be None or in .* Received: padding_id='\[PAD\]'"),
        ({"max_length": 0}, "`max_length` must be a positive integer or None. Received: max_length=0"),
        ({"num_segments": -1}, "`num_segments` must be an integer of at least 0. Received: num_segments=-1"),
        ({"normalization": "batch"}, "`normalization` must be one of .*Received: normalization='batch'"),
        ({"layer_norm_epsilon": 0}, "`layer_norm_epsilon` must be a positive finite .*layer_norm_epsilon=0"),
        (
            {"zero_padding": True, "padding_id": None},
            "`zero_padding=True` needs a `padding_id`. Received: zero_padding=True, padding_id=None",
        ),
        (
            {"dropout_before_norm": True},
            "`dropout_before_norm=True` needs a `normalization`. Received: dropout_before_norm=True, normalization=N",
        ),
        ({"dropout": -0.1}, r"`dropout` must be a number in \[0, 1\). Received: dropout=-0.1"),
    ],
)
def test_a_constructor_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenEmbedding(**{"vocabulary_size": V, "hidden_dim": D, **arguments})


@pytest.mark.tensorflow
@pytest.mark.parametrize("rows", [1, 2])
def test_tied_logits_traced_for_xla_are_the_products_with_the_table(rows):
    import tensorflow as tf

    layer = TokenEmbedding(23, 8)
    layer(np.array([[1]]))
    x = np.random.default_rng(1).normal(size=(rows, 1, 8)).astype("float32")
    with xla.tracing(True):
        logits = tf.function(lambda x: layer(x, reverse=True), jit_compile=True)(x)
    expected = x.astype("float64") @ to_numpy(layer.tokens.embeddings).astype("float64").T
    np.testing.assert_allclose(to_numpy(logits), expected, atol=1e-6)


def test_only_the_padding_begins_at_zero_whatever_floatx_is():
    keras.config.set_floatx("float16")  # in which Keras counts to 32,767
    try:
        layer = TokenEmbedding(70_001, 2, embeddings_initializer="ones", zero_padding=True, padding_id=7)
        layer.build((None, None))
    finally:
        keras.config.set_floatx("float32")
    table = to_numpy(layer.tokens.embeddings)
    assert np.flatnonzero((table == 0).any(axis=-1)).tolist() == [7]
