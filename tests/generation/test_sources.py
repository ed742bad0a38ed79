"""`generate` with sources: inputs beside their ids, and encoders that their padding would change."""

import operator

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_tx.generation import generate
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.layers import DecoderLayer, Encoder, LearnedPositionalEncoding, TokenEmbedding
from tests.generation import built
from tests.generation.asked import START, WRITE, Letters
from tests.generation.built import SOURCE_V, D, F, N, V, ids_of
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.usefixtures("eager")

IDS = [[4, 3, 21, 9, 5], [8, 30, 6], [1, 36]]
SEGMENTS = [[0, 0, 1, 1, 0], [0, 2, 2], [1, 0]]
REAL = [[1, 0, 1, 1, 1], [0, 1, 1], [1, 1]]


def with_memory(*sources, memory):
    """A model that writes from the vectors `memory` of symbolic `sources`; its steps are tried out for the `tanh`."""
    target = ids_of("target")
    x = DecoderLayer(F, N, cross_attention=True)(TokenEmbedding(V, D)(target), memory)
    return randomize(keras.Model([*sources, target], layers.Dense(V)(ops.tanh(x))), scale=0.6)


def embedded(ids, segment_ids=None, **options):
    return TokenEmbedding(SOURCE_V, D, position_encoding="sinusoidal", **options)(ids, segment_ids=segment_ids)


def with_segments():
    ids, segments = ids_of("source"), ids_of("segments")
    x = embedded(ids, segments, num_segments=3)
    return with_memory(ids, segments, memory=Encoder(1, F, N)(x))


def with_added(embedding, join=operator.add):
    ids, segments = ids_of("source"), ids_of("segments")
    return with_memory(ids, segments, memory=Encoder(1, F, N)(join(embedded(ids), embedding(segments))))


def with_mask():
    ids, real = ids_of("source"), ids_of("real")
    return with_memory(ids, real, memory=Encoder(1, F, N)(embedded(ids), mask=real))


def with_inverted_mask():
    ids, hidden = ids_of("source"), ids_of("hidden")
    return with_memory(ids, hidden, memory=Encoder(1, F, N)(embedded(ids), mask=ops.equal(hidden, 0)))


def row_scores(model, sources, length=WRITE["max_new_tokens"]):
    """The log-probability of the greedy tokens for one row, by the whole model on arrays without padding."""
    row, score = [START], 0.0
    for _ in range(length):
        logits = to_numpy(model([*[np.array([one]) for one in sources], np.array([row])]))[0, -1].astype("float64")
        row.append(int(logits[1:].argmax()) + 1)  # the id 0 is forbidden
        score += logits[row[-1]] - np.log(np.exp(logits).sum())
    return row[1:], score


def check(model, inputs, rows):
    """Compares what is generated for `inputs` with the whole model on each of `rows`: an id row for each source."""
    found, scores = generate(model, inputs, return_scores=True, **WRITE)
    for ids, score, sources in zip(found, scores, rows, strict=True):
        expected_ids, expected = row_scores(model, sources)
        assert list(ids) == expected_ids
        assert_close(score, expected, atol=2e-5, rtol=1e-5)


def right(rows, value=0):
    return np.array([row + [value] * (5 - len(row)) for row in rows])


def left(rows, value=0):
    return np.array([[value] * (5 - len(row)) + row for row in rows])


def test_segments_follow_the_padding_of_their_ids():
    model, rows = with_segments(), list(zip(IDS, SEGMENTS, strict=True))
    check(model, {"source": IDS, "segments": SEGMENTS}, rows)
    check(model, {"source": right(IDS), "segments": right(SEGMENTS, 2)}, rows)
    check(model, {"source": left(IDS), "segments": left(SEGMENTS, 1)}, rows)
    for of_row in (list, np.array):
        found = generate(model, {"source": of_row(IDS[1]), "segments": of_row(SEGMENTS[1])}, **WRITE)
        assert list(found) == row_scores(model, rows[1])[0]


def in_a_list(x, y):
    return layers.Add()([x, y])


def side_by_side(x, y):
    return layers.Dense(D)(layers.Concatenate()([y * 2.0, x]))


@pytest.mark.filterwarnings("ignore:.*mask", "ignore:Padding may change the outputs")
@pytest.mark.parametrize("join", [operator.add, in_a_list, ops.multiply, side_by_side])
@pytest.mark.parametrize("padding_id", [0, None])
def test_embeddings_that_are_added_keep_their_columns(join, padding_id):
    """The zeros of segments are no padding, whatever their embedding takes for it."""
    model = with_added(TokenEmbedding(3, D, padding_id=padding_id), join)
    assert IncrementalModel(model).buckets_sources is (join is not side_by_side)
    check(model, {"source": IDS[:1], "segments": SEGMENTS[:1]}, [(IDS[0], SEGMENTS[0])])
    for side in (left, right):
        check(model, {"source": side([IDS[1]]), "segments": side([[0, 0, 2]])}, [(IDS[1], [0, 0, 2])])


def test_what_is_added_must_have_a_row_for_each_example_of_the_same_length():
    model = with_added(TokenEmbedding(3, D))
    for segments, message in [
        ([[0, 1], [0, 2, 2], [1, 0]], r"must have a row of the same length .* \{'source': 5, 'segments': 2\}"),
        ([[0, 1, 3, 1, 0], [0, 2, 2], [1, 0]], r"`segments` must be in \[0, 3\). Received: 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, {"source": IDS, "segments": segments}, **WRITE)
    with pytest.raises(
        ValueError, match=r"token that is not padding in \['source', 'segments'\]. Received: \[\[0, 0\]"
    ):
        generate(model, {"source": [[0, 0]], "segments": [[0, 0]]}, **WRITE)


@pytest.mark.filterwarnings("ignore:.*mask", "ignore:Padding may change the outputs")
def test_sources_are_joined_behind_layers_too_but_not_by_attention():
    ids, kinds = ids_of("source"), ids_of("kinds")
    x, y = embedded(ids), TokenEmbedding(3, D)(kinds)
    behind = layers.MultiHeadAttention(2, 5)(x, x * 2.0) + y
    group = ["source", "kinds"]
    assert IncrementalModel(with_memory(ids, kinds, memory=behind)).joined == {"source": group, "kinds": group}
    attending = x + DecoderLayer(F, N, cross_attention=True)(x, y)
    assert IncrementalModel(with_memory(ids, kinds, memory=attending), "target").joined == {}


def beside_a_mean(x, y):
    return x + ops.mean(y, axis=1, keepdims=True)


def one_after_the_other(x, y):
    return layers.Concatenate(axis=1)([x, y])


@pytest.mark.filterwarnings("ignore:Padding may change the outputs")
@pytest.mark.parametrize("join", [beside_a_mean, one_after_the_other])
def test_sources_that_are_not_added_token_by_token_need_not_be_of_one_length(join):
    model = with_added(TokenEmbedding(7, D, padding_id=None), join)
    check(model, {"source": IDS[:1], "segments": [[3, 0]]}, [(IDS[0], [3, 0])])


@pytest.mark.parametrize(
    ("make", "name", "values", "at_padding"),
    [
        (with_mask, "real", REAL, 0),
        (with_inverted_mask, "hidden", [[1 - one for one in row] for row in REAL], 1),
    ],
)
def test_a_mask_follows_the_padding_of_its_ids(make, name, values, at_padding):
    model, rows = make(), list(zip(IDS, values, strict=True))
    for side in (right, left):
        check(model, {"source": side(IDS), name: side(values, at_padding)}, rows)
    check(model, {"source": IDS[1:2], name: values[1:2]}, rows[1:2])
    message = rf"`{name}` must have the shape \(B, S\) of `source`, .* Received: rows of lengths \[5, 3, 2\]"
    with pytest.raises(ValueError, match=message):
        generate(model, {"source": IDS, name: values}, **WRITE)


def test_a_number_for_a_whole_source_stays_one():
    ids, kind = ids_of("source"), ids_of("kind")
    x = embedded(ids) + ops.expand_dims(ops.cast(kind, "float32"), -1)
    model = with_memory(ids, kind, memory=Encoder(1, F, N)(x))
    check(
        model, {"source": right(IDS), "kind": np.array([[0], [3], [1]])}, list(zip(IDS, [[0], [3], [1]], strict=True))
    )


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (
            [[0, 1], [0, 2, 2], [1, 0]],
            "`segments` must have a number for each token of `source`. Received: 2 numbers for 5",
        ),
        (
            ["ab", "c", "d"],
            r"`segments` must have a number for each token of `source`. Received: texts, segments=\['ab'",
        ),
        ([[0, -1, 1, 1, 0], [0, 2, 2], [1, 0]], r"`segments` must be in \[0, 2147483648\). Received: -1"),
    ],
)
def test_what_does_not_fit_the_ids_is_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        generate(with_segments(), {"source": IDS, "segments": segments}, tokenizer=Letters(), **WRITE)


def test_inputs_that_belong_to_no_single_source_are_refused():
    first, second, real = (ids_of(name) for name in ("first", "second", "real"))
    memory = Encoder(1, F, N)(embedded(first), mask=real)
    x = DecoderLayer(F, N, cross_attention=True)(memory, embedded(second))
    with pytest.raises(ValueError, match=r"must be the `segment_ids` of one source. Received: the input 'real' "):
        IncrementalModel(with_memory(first, second, real, memory=x))
    target, segments = ids_of("target"), ids_of("segments")
    x = DecoderLayer(F, N)(TokenEmbedding(V, D, num_segments=2)(target, segment_ids=segments))
    model = keras.Model([target, segments], layers.Dense(V)(x))
    with pytest.raises(ValueError, match="the segments of `target`, .* the segments 'segments' of 'target'"):
        IncrementalModel(model, "target")


# Encoders that let padding change their outputs, and those that do not


def convolution(x, ids):
    return layers.Conv1D(D, 3, padding="same")(x)


def recurrent_without_mask(x, ids):
    return layers.LSTM(D, return_sequences=True)(x * 2.0)


def mean(x, ids):
    return ops.mean(x, axis=1, keepdims=True)


def beside_an_embedding_without_padding(x, ids):
    beside = Encoder(1, F, N)(TokenEmbedding(SOURCE_V, D, padding_id=None)(ids))
    return layers.Add()([Encoder(1, F, N)(layers.Dense(D)(x)), beside])


def behind_a_mask_of_another_id(x, ids):
    return Encoder(1, F, N)(x, mask=ids != 3)


def zero_at_first(x, ids):
    return x * 1.0 + layers.Conv1D(D, 3, padding="same", kernel_initializer="zeros")(x)


def of_five(x, ids):
    return ops.reshape(x, (-1, 5, D))


def at_three_positions(x, ids):
    return convolution(LearnedPositionalEncoding(3)(x), ids)


def source_model(encode):
    ids = ids_of("source")
    return with_memory(ids, memory=encode(embedded(ids), ids))


MIXING = [
    convolution,
    recurrent_without_mask,
    mean,
    beside_an_embedding_without_padding,
    behind_a_mask_of_another_id,
]
KEEPING_OUT = [
    lambda x, ids: Encoder(1, F, N)(x * 2.0),
    lambda x, ids: layers.LSTM(D, return_sequences=True)(x),
    lambda x, ids: layers.MultiHeadAttention(2, 5)(x, x),
]


@pytest.mark.filterwarnings("ignore:.*mask", "ignore:Padding may change the outputs")
@pytest.mark.parametrize("encode", MIXING)
def test_padding_that_would_change_the_encoder_is_left_out(encode):
    model = source_model(encode)
    check(model, {"source": IDS[:1]}, [(IDS[0],)])
    check(model, {"source": np.array([[*IDS[1], 0, 0]])}, [(IDS[1],)])
    assert not IncrementalModel(model).buckets_sources


@pytest.mark.parametrize("encode", KEEPING_OUT, ids=["encoder", "lstm", "attention"])
def test_padding_that_the_encoder_leaves_out_is_added(encode):
    model = source_model(encode)
    assert IncrementalModel(model).buckets_sources
    check(model, {"source": IDS}, [(row,) for row in IDS])


@pytest.mark.filterwarnings("ignore:.*mask", "ignore:Padding may change the outputs")
@pytest.mark.parametrize("encode", [zero_at_first, of_five, at_three_positions])
def test_a_trial_sees_what_weights_may_become_and_which_lengths_fit(encode):
    ids, target = ids_of("source"), ids_of("target")
    x = DecoderLayer(F, N, cross_attention=True)(TokenEmbedding(V, D)(target), encode(embedded(ids), ids))
    assert not IncrementalModel(keras.Model([ids, target], layers.Dense(V)(x))).buckets_sources


@pytest.mark.parametrize("name", ["encoder_and_decoder", "seq2seq", "shared"])
def test_models_of_known_layers_need_no_trial(monkeypatch, name):
    monkeypatch.setattr("keras_tx.generation.incremental_model.padding_changes_nothing", None)
    assert IncrementalModel(built.MODELS[name]()).buckets_sources
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        IncrementalModel(source_model(lambda x, ids: layers.LSTM(D, return_sequences=True)(x)))


@pytest.mark.parametrize("cast", [None, "int32"])
def test_ids_of_the_default_dtype_of_an_input_are_generated_as_integers_are(cast):
    """`TokenEmbedding` casts them, or the model itself; padding, segments and ids without embedding stay known."""
    source, target = TokenEmbedding(SOURCE_V, D, num_segments=3), TokenEmbedding(V - 2, D)
    encoder, decoder = Encoder(1, F, N), DecoderLayer(F, N, cross_attention=True)
    head = layers.Dense(V, bias_initializer=lambda shape, dtype=None: ops.cast(ops.arange(V) > V - 3, dtype))

    def model(dtype):
        given = [keras.Input((None,), dtype=dtype, name=name) for name in ("source", "segments", "target")]
        ids, segments, written = given if dtype == "int32" or cast is None else [ops.cast(x, cast) for x in given]
        x = decoder(target(written), encoder(source(ids, segment_ids=segments)))
        return keras.Model(given, head(x))

    whole, floats = model("int32"), model("float32")
    for layer in (source, target, encoder, decoder):
        randomize(layer, scale=0.6)
    expected, found = (IncrementalModel(one, "target") for one in (whole, floats))
    assert found.padding_ids == expected.padding_ids == {"source": 0, "segments": None, "target": 0}
    assert found.vocabulary_sizes == expected.vocabulary_sizes and found.beside == expected.beside
    options = {**WRITE, "target": "target"}
    sources = {"source": IDS, "segments": SEGMENTS}
    rows = generate(floats, sources, **options)
    assert rows == generate(whole, sources, **options) and max(map(max, rows)) < V - 2
