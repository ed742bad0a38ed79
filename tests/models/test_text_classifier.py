"""TextClassifier: ids to logits, saved, loaded, compiled, masked; pooling by hand."""

import functools

import keras
import numpy as np
import pytest

from keras_tx.layers import SinusoidalPositionalEncoding
from keras_tx.models import TextClassifier
from keras_tx.models.pooling import TokenPooling
from tests import forked
from tests.tools import assert_close, normal, randomize, to_numpy

V, C = 31, 3
IDS = np.array([[3, 4, 5, 0, 0], [7, 1, 22, 2, 9]], "int32")
OPTIONS = {"num_layers": 2, "hidden_dim": 12, "num_heads": 3, "intermediate_dim": 17}
KINDS = {
    "default": {},
    "segments": {"embedding_options": {"num_segments": 2, "normalization": "layer_norm"}},
    "learned": {"embedding_options": {"position_encoding": "learned", "max_length": 9}, "pooling": "first"},
    "concatenated": {
        "embedding_options": {"position_encoding": SinusoidalPositionalEncoding(layout="concatenated"), "scale": True},
        "encoder_options": {"normalize_first": True, "gated": True, "attention_options": {"num_key_value_heads": 1}},
        "pooling": "max",
    },
    "bfloat16": {"dtype": "mixed_bfloat16", "activation": "softmax"},
}


def classifier(kind="default", **arguments):
    return randomize(TextClassifier(V, C, **{**OPTIONS, **KINDS[kind], **arguments}), scale=0.1)


@functools.cache
def shared():
    """A model that several tests call and none changes."""
    return classifier()


def test_pooling_by_hand():
    x = np.array([[[1.0, -5.0], [3.0, -7.0], [100.0, 100.0]], [[9.0, 9.0], [2.0, 4.0], [4.0, 8.0]]], "float32")
    mask = np.array([[True, True, False], [False, True, True]])
    assert to_numpy(TokenPooling("first")(x, mask=mask)).tolist() == [[1, -5], [2, 4]]
    assert to_numpy(TokenPooling("mean")(x, mask=mask)).tolist() == [[2, -6], [3, 6]]
    assert to_numpy(TokenPooling("max")(x, mask=mask)).tolist() == [[3, -5], [4, 8]]
    assert to_numpy(TokenPooling("max")(x)).tolist() == [[100, 100], [9, 9]]


@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
def test_pooling_of_nothing_is_zero(pooling):
    x = normal(2, 3, 5)
    mask = np.array([[False] * 3, [True] * 3])
    pooled = to_numpy(TokenPooling(pooling)(x, mask=mask))
    assert not pooled[0].any() and pooled[1].all()
    empty = to_numpy(TokenPooling(pooling)(x[:, :0], mask=mask[:, :0]))
    assert empty.shape == (2, 5) and not empty.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_without_custom_objects_and_trains_on(kind, tmp_path):
    model = classifier(kind, num_layers=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=kind != "bfloat16")
    eagerly = keras.backend.backend() == "tensorflow" and kind != "segments"  # a graph is traced for one kind only
    model.compile("adam", loss, jit_compile=False, run_eagerly=eagerly)
    features = {"token_ids": IDS, "segment_ids": IDS % 2}
    model.fit(features, np.array([0, 2]), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again) is TextClassifier
    assert_close(again.predict(features, verbose=0), model.predict(features, verbose=0), atol=0)
    options = ("pooling", "dropout", "activation", "encoder_options", "intermediate_dim", "dtype")
    assert [again.get_config()[name] for name in options] == [model.get_config()[name] for name in options]
    assert again.optimizer.iterations == 1
    again.fit(features, np.array([0, 2]), verbose=0)
    assert again.optimizer.iterations == 2


@pytest.mark.slow
@pytest.mark.process
def test_a_saved_model_loads_in_another_process_after_import_keras_tx(tmp_path):
    model = classifier("concatenated")
    model.save(tmp_path / "model.keras")
    code = (
        "import sys, keras, keras_tx, numpy as np; model = keras.saving.load_model(sys.argv[1]); "
        "ids = np.array([[3, 4, 5, 0, 0], [7, 1, 22, 2, 9]]); "
        "np.save(sys.argv[2], keras.ops.convert_to_numpy(model(ids)))"
    )
    assert forked.start("-c", code, tmp_path / "model.keras", tmp_path / "out.npy", new=True).wait() == 0
    assert_close(np.load(tmp_path / "out.npy"), model(IDS), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("default", "mean"), ("segments", "max"), ("learned", "first"), ("concatenated", "max"), ("default", "first")],
)
def test_padding_left_or_right_changes_no_logit(kind, pooling):
    model = classifier(kind, pooling=pooling)
    features = lambda ids: {"token_ids": np.array([ids]), "segment_ids": np.zeros((1, len(ids)), "int32")}
    alone = model(features([3, 4, 5]))
    assert_close(model(features([3, 4, 5, 0, 0])), alone, atol=2e-6)
    assert_close(model(features([0, 0, 0, 3, 4, 5])), alone, atol=2e-6)


def test_ids_may_come_as_a_tensor_or_in_a_dict_with_more_keys():
    model = shared()
    assert_close(model({"token_ids": IDS, "segment_ids": IDS * 0}), model(IDS), atol=0)
    assert_close(model.predict({"token_ids": IDS, "other": IDS}, verbose=0), model.predict(IDS, verbose=0), atol=0)


def test_softmax_is_the_softmax_of_the_logits():
    logits, probabilities = classifier(), classifier(activation="softmax")
    probabilities.set_weights(logits.get_weights())
    exponentials = np.exp(to_numpy(logits(IDS)).astype("float64"))
    assert_close(probabilities(IDS), exponentials / exponentials.sum(-1, keepdims=True))


def test_the_output_is_float32_under_a_half_precision_policy():
    model = classifier("bfloat16")
    assert model.encoder.compute_dtype == "bfloat16"
    assert keras.backend.standardize_dtype(model(IDS).dtype) == "float32"


def test_attention_scores_are_those_that_the_model_computes_with():
    model = shared()
    scores = to_numpy(model.attention_scores(IDS))
    assert scores.shape == (2, 2, 3, 5, 5)
    assert not scores[0, ..., 3:].any() and not scores[0, ..., 3:, :].any()
    assert_close(scores[1].sum(-1), np.ones((2, 3, 5)))
    assert_close(model.attention_scores({"token_ids": IDS, "other": IDS}), scores, atol=0)
    _, expected = model.encoder(model.embedding(IDS), return_attention_scores=True)
    assert_close(scores, expected, atol=0)


POSITIONS = {"name": "sinusoidal", "layer": SinusoidalPositionalEncoding()}
POSITIONS["config"] = keras.saving.serialize_keras_object(POSITIONS["layer"])


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_tokens_are_not_lost_among_positions_at_first(positions):
    for size in (32, 128):
        options = {"embedding_options": {"position_encoding": positions}}
        model = TextClassifier(V, C, hidden_dim=size, num_layers=1, num_heads=2, dropout=0.0, **options)
        tokens = to_numpy(model.embedding(np.arange(1, V)[:, None]))[:, 0]  # the position is the same for all
        assert 0.8 < np.std(tokens - tokens.mean(0)) < 1.2
        initializer = TextClassifier.from_config(model.get_config()).embedding.get_config()["embeddings_initializer"]
        assert initializer["config"]["stddev"] == 1.0


@pytest.mark.parametrize(
    "given",
    [{"position_encoding": None}, {"scale": False}, {"scale": True}, {"embeddings_initializer": "uniform"}],
    ids=str,
)
def test_embeddings_begin_as_in_keras_with_other_positions_or_if_their_size_is_given(given):
    table = TextClassifier(V, C, **OPTIONS, embedding_options=given).embedding.tokens.embeddings
    assert np.abs(to_numpy(table)).max() <= 0.05


def test_a_class_that_a_word_tells_is_learned_in_a_few_steps():
    """With embeddings much smaller than positions these steps are far too few."""
    random = np.random.default_rng(7)
    labels = random.integers(0, 2, 16 * 20)
    ids = random.integers(3, V, (len(labels), 24))
    ids[:, ::4] = 1 + labels[:, None]
    model = TextClassifier(V, 2, num_layers=2, hidden_dim=64, num_heads=2, dropout=0.0)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = model.fit(ids, labels, batch_size=16, epochs=2, verbose=0).history["loss"]
    assert losses[-1] < 0.2


@pytest.mark.slow
def test_word_order_is_learned_where_words_alone_say_nothing():
    rng = np.random.default_rng(0)
    pairs = rng.integers(1, V, size=(512, 2))
    ids = np.pad(np.concatenate([pairs, pairs[:, ::-1]]), ((0, 0), (0, 2)))
    labels = (ids[:, 0] < ids[:, 1]).astype("int32")
    keep = ids[:, 0] != ids[:, 1]
    model = TextClassifier(V, 2, num_layers=1, hidden_dim=32, num_heads=2, dropout=0.0)
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    history = model.fit(ids[keep], labels[keep], batch_size=64, epochs=15, verbose=0)
    assert history.history["accuracy"][-1] > 0.9


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[1.7, 2.0]]), "`token_ids` must be integers; .*Received: token_ids of dtype float"),
        (np.array([[2**32 + 1]]), r"`token_ids` must be in \[0, 31\)"),
        (np.array([[V]]), r"`token_ids` must be in \[0, 31\). Received: 31"),
        ({"token_ids": np.array([[-1]])}, r"`token_ids` must be in \[0, 31\). Received: -1"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    if keras.backend.backend() == "jax" and "Received" not in message:
        pytest.skip("JAX reads 64-bit integers as 32-bit ones before the model sees them")
    with pytest.raises(ValueError, match=message):
        shared()(ids)


def test_a_mask_that_half_the_model_would_ignore_is_refused():
    with pytest.raises(ValueError, match="`mask` cannot be given: .*Received: mask"):
        shared()(IDS, mask=np.ones_like(IDS, "bool"))


def test_the_summary_names_the_parts():
    lines = []
    shared().summary(print_fn=lambda text, **_: lines.append(text))
    for part in ("token_ids", "embedding", "encoder", "pooling", "dropout", "head"):
        assert part in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "`num_classes` must be at least 2: .* Received: num_classes=1"),
        ({"num_classes": 2.0}, "`num_classes` must be a positive integer. Received: num_classes=2.0"),
        ({"vocabulary_size": -1}, "`vocabulary_size` must be a positive integer. Received: vocabulary_size=-1"),
        ({"hidden_dim": 0}, "`hidden_dim` must be a positive integer. Received: hidden_dim=0"),
        ({"hidden_dim": 10}, "divisible by `num_heads`.* Received: hidden_dim=10, num_heads=3"),
        ({"num_layers": 0}, "`num_layers` must be a positive integer. Received: num_layers=0"),
        ({"intermediate_dim": -4}, "`intermediate_dim` must be a positive integer. Received: intermediate_dim=-4"),
        ({"encoder_options": {"num_layers": 1}}, "`encoder_options` must be a dict with keys among .*'num_layers': 1"),
        ({"embedding_options": {"dim": 1}}, "`embedding_options` must be a dict with keys among .*'dim': 1"),
        ({"num_layer": 12}, r"no argument `num_layer`. Did you mean `num_layers`\? Received: num_layer=12"),
        ({"pooling": "last"}, "`pooling` must be one of .*Received: pooling='last'"),
        ({"dropout": 1.5}, "`dropout` must be a number .*Received: dropout=1.5"),
    ],
)
def test_a_constructor_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextClassifier(**{"vocabulary_size": V, "num_classes": C, **OPTIONS, **arguments})
