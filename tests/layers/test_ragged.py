"""Ragged tensors: which layers take them, and models with inputs that are declared ragged."""

import keras
import numpy as np
import pytest

from keras_tx.layers import EncoderLayer, FeedForward, TokenEmbedding
from keras_tx.layers.shapes import check_dense
from tests.tools import assert_close, normal, randomize

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

V, D = 23, 6
ROWS = [[1, 2, 3, 5, 8], [], [13], [21, 0, 0]]
IDS = tf.ragged.constant(ROWS, dtype="int32")


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding_id": None},
        {"padding_id": 0},
        {"zero_padding": True, "scale": True, "normalization": "layer_norm", "embedding_dim": 4, "dropout": 0.5},
    ],
)
def test_a_token_embedding_of_ragged_ids_gives_the_vectors_of_each_row(options, mode):
    layer = TokenEmbedding(V, D, **options)
    layer(IDS)
    randomize(layer)
    if mode is not None:
        layer.tokens.quantize(mode)
    for call in (layer, tf.function(layer)):
        vectors = call(IDS)
        assert vectors.row_lengths().numpy().tolist() == [len(row) for row in ROWS]
        for row, expected in zip(vectors, ROWS, strict=True):
            if expected:
                assert_close(row, layer(np.array([expected]))[0], atol=2e-6)
    of_floats = layer(tf.cast(IDS, "float32"))
    assert_close(of_floats.flat_values, layer(IDS).flat_values, atol=0)
    if options.get("padding_id", 0) == 0:
        assert layer.compute_mask(IDS).to_list() == [[one != 0 for one in row] for row in ROWS]
    with pytest.raises(ValueError, match="`inputs` must be in \\[0, 23\\). Received: 23"):
        layer(tf.ragged.constant([[1], [2, 23]]))


@pytest.mark.parametrize("options", [{"position_encoding": "sinusoidal"}, {"num_segments": 2}])
def test_a_token_embedding_that_counts_positions_or_segments_refuses_ragged_ids(options):
    with pytest.raises(ValueError, match="`inputs` must be a dense tensor: .* a RaggedTensor of shape \\(4, None\\)"):
        TokenEmbedding(V, D, **options)(IDS)


def test_vectors_for_logits_must_be_dense():
    vectors = tf.RaggedTensor.from_tensor(normal(2, 3, D))
    for args, kwargs in (((), {"reverse": True}), ((None, None, None, True), {})):
        with pytest.raises(ValueError, match="`inputs` must be a dense tensor: .* a RaggedTensor"):
            TokenEmbedding(V, D)(vectors, *args, **kwargs)


def model_of(*layers, ragged=True):
    inputs = x = keras.Input((None,), dtype="int32", ragged=ragged)
    for layer in layers:
        x = layer(x)
    return randomize(keras.Model(inputs, x))


def test_a_model_with_an_input_declared_ragged_takes_dense_ids_and_ragged_ones_where_its_layers_do(tmp_path):
    embeds, encodes = model_of(TokenEmbedding(V, D)), model_of(TokenEmbedding(V, D), EncoderLayer(5, 2))
    dense = model_of(TokenEmbedding(V, D), EncoderLayer(5, 2), ragged=False)
    dense.set_weights(encodes.get_weights())
    ids = IDS.to_tensor()
    for model in (embeds, encodes):
        model.save(tmp_path / "one.keras")
        loaded = keras.saving.load_model(tmp_path / "one.keras")
        assert loaded.inputs[0].ragged
        assert_close(loaded(ids), model(ids), atol=0)
        assert_close(loaded.predict(ids, verbose=0), model(ids), atol=2e-6)
    assert_close(encodes(ids), dense(ids), atol=0)
    rows = embeds(IDS)
    assert rows.row_lengths().numpy().tolist() == [len(row) for row in ROWS]
    assert_close(rows.flat_values, TokenEmbedding.call(embeds.layers[1], np.array([sum(ROWS, [])]))[0], atol=0)


@pytest.mark.parametrize("layer", [EncoderLayer(5, 2), FeedForward(5)])
def test_a_layer_in_a_model_with_an_input_declared_ragged_refuses_ragged_tensors(layer):
    model = model_of(TokenEmbedding(V, D), layer)
    for call in (model, tf.function(model), lambda ids: model.predict(ids, verbose=0)):
        with pytest.raises(ValueError, match="`inputs` must be a dense tensor: .* a RaggedTensor of shape"):
            call(IDS)


class Sums(FeedForward):
    def call(self, inputs, *others, factor=1):
        return super().call(sum(others, inputs)) * factor


def test_the_error_names_arguments_without_a_name_and_tensors_without_a_known_rank():
    x = normal(2, 3, D)
    ragged = tf.RaggedTensor.from_tensor(x)
    for place, name in enumerate(("inputs", "others\\[0\\]", "others\\[1\\]")):
        with pytest.raises(ValueError, match=f"^`{name}` must be a dense tensor: .* of shape \\(2, 3, 6\\)"):
            Sums(5)(*[ragged if one == place else x for one in range(3)])

    @tf.function(input_signature=[tf.SparseTensorSpec(None, "float32")], autograph=False)
    def check(x):
        check_dense(Sums(5), (x,), {})

    with pytest.raises(ValueError, match="^`inputs` must be a dense tensor: .* of shape <unknown>"):
        check(tf.sparse.from_dense(x))


@pytest.mark.parametrize("make", [lambda: TokenEmbedding(V, D), lambda: EncoderLayer(5, 2), lambda: FeedForward(5)])
def test_the_arguments_of_a_call_are_checked_once(make, monkeypatch):
    from keras_tx.layers import configs, embeddings, masked_layer
    from keras_tx.layers.attention import arguments

    layer, checked = make(), []
    for module in (configs, embeddings, masked_layer, arguments):
        monkeypatch.setattr(module, "check_dense", lambda one, *_: checked.append(one))
    layer(np.ones((1, 3), "int32") if isinstance(layer, TokenEmbedding) else normal(1, 3, D))
    assert [one.path for one in checked].count(layer.path) == 1
    assert len({id(one) for one in checked}) == len(checked)
