"""What an export finds in a user's model: inputs by their roles, outputs by names, and whether it sees padding."""

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder, LearnedPositionalEncoding, TokenEmbedding
from keras_tx.layers.exported_weights import exported_weights
from keras_tx.models import MaskedLM
from keras_tx.serving.text_encoder import TextEncoder
from keras_tx.text import BertTokenizer
from tests.tools import assert_close, to_numpy

pytestmark = pytest.mark.tensorflow


def inputs(*names, dtype="int32", shape=(None,)):
    return [keras.Input(shape, dtype=dtype, name=name) for name in names]


def pooled(ids):
    """Bags of vectors (B, 3) that do not see zeros."""
    return keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(13, 3, mask_zero=True)(ids))


def added(tensors):
    """A model with all these inputs, of which the first one is looked up."""
    tables = [keras.layers.Embedding(13, 3, mask_zero=True)(x) for x in tensors[:2]]
    others = [keras.ops.cast(x, "float32")[:, :, None] for x in tensors[2:]]
    total = sum([*tables[1:], *others], start=tables[0])
    return keras.Model(tensors, keras.layers.Dense(2, name="head")(keras.ops.sum(total, axis=1)))


@pytest.mark.parametrize(
    "names, roles",
    [
        (["x"], ["ids"]),
        (["x", "a"], ["ids", "segments"]),  # by position
        (["token_type_ids", "input_ids"], ["segments", "ids"]),  # by name
        (["segment_ids", "x"], ["segments", "ids"]),
        (["token_ids", "x", "padding_mask"], ["ids", "segments", "mask"]),
        (["x", "attention_mask"], ["ids", "mask"]),
        (["input_word_ids", "input_mask", "input_type_ids"], ["ids", "mask", "segments"]),
        (["token_ids", "token_mask"], ["ids", "mask"]),
        (["mask", "token_ids"], ["mask", "ids"]),
    ],
)
def test_inputs_are_known_by_name_or_by_position(names, roles):
    encoder = TextEncoder(added(inputs(*names)))
    assert list(encoder.roles.values()) == roles
    ids, segments = np.array([[3, 5, 0]], "int32"), np.array([[1, 0, 2]], "int32")
    given = {"ids": ids, "segments": segments, "mask": np.array([[1, 1, 0]], "int32")}
    expected = encoder.model([given[role] for role in roles])
    assert_close(encoder(ids, segments)["head"], expected)


@pytest.mark.parametrize(
    "names", [["a", "b", "c"], ["input_ids", "token_ids"], ["segment_ids"], ["a", "attention_mask", "padding_mask"]]
)
def test_other_inputs_are_refused_by_their_names(names):
    with pytest.raises(ValueError, match="`model` must take token ids, and besides them at most") as error:
        TextEncoder(added(inputs(*names)))
    assert f"Received: inputs {names}" in str(error.value)


@pytest.mark.parametrize("name", ["mask", "mask_of_words"])
def test_an_input_of_booleans_with_the_name_of_a_mask_is_one(name):
    (ids,), (mask,) = inputs("token_ids"), inputs(name, dtype="bool")
    weights = keras.ops.cast(mask, "float32")[:, :, None]
    total = keras.ops.sum(keras.layers.Embedding(13, 3)(ids) * weights, axis=1)
    model = keras.Model({"token_ids": ids, name: mask}, {"total": total})
    encoder, rows = TextEncoder(model), np.array([[3, 5, 0], [7, 0, 0]], "int32")
    assert encoder.roles == {"token_ids": "ids", name: "mask"}
    table = to_numpy(model.weights[0])
    assert_close(encoder(rows)["total"], np.stack([table[3] + table[5], table[7]]))


@pytest.mark.parametrize(("name", "dtype"), [("importance", "int32"), ("position_ids", "int32"), ("is_name", "bool")])
def test_an_input_that_no_embedding_looks_up_is_not_taken_for_segment_ids(name, dtype):
    (ids,), (other,) = inputs("token_ids", shape=(7,)), inputs(name, shape=(7,), dtype=dtype)
    numbers = keras.ops.cast(other, "float32")[:, :, None]
    message = (
        f"at most segment ids and a padding mask. Received: the input '{name}', which no embedding looks up; if it"
    )
    with pytest.raises(ValueError, match=message):
        TextEncoder(keras.Model([ids, other], keras.layers.Embedding(13, 3)(ids) + numbers))


def test_positions_in_a_small_table_are_not_taken_for_segment_ids():
    ids, positions = inputs("token_ids", "position_ids", shape=(7,))
    total = keras.layers.Embedding(13, 3)(ids) + keras.layers.Embedding(7, 3)(positions)
    with pytest.raises(ValueError, match="the input 'position_ids', which has the name of positions"):
        TextEncoder(keras.Model([ids, positions], total))


@pytest.mark.parametrize("name", ["sides", "composition"])
def test_segments_may_be_cast_before_they_are_looked_up(name):
    ids, sides = inputs("token_ids", name)
    total = keras.layers.Embedding(13, 3)(ids) + keras.layers.Embedding(2, 3)(keras.ops.clip(sides, 0, 1))
    encoder = TextEncoder(keras.Model([ids, sides], total))
    assert encoder.roles == {"token_ids": "ids", name: "segments"} and encoder.num_segments == 2


def test_segments_of_a_token_embedding_may_have_any_name():
    words, kinds = inputs("words", "kinds")
    embedding = TokenEmbedding(97, 4, num_segments=2)
    model = keras.Model([words, kinds], keras.ops.sum(embedding(words, segment_ids=kinds), axis=1))
    assert list(TextEncoder(model).roles.values()) == ["ids", "segments"]


@pytest.mark.parametrize("shared", [True, False])
def test_a_second_text_is_not_taken_for_segment_ids(shared):
    tensors = inputs("question", "answer")
    first = keras.layers.Embedding(97, 3)
    second = first if shared else keras.layers.Embedding(89, 3)
    joined = keras.ops.sum(first(tensors[0]), 1) + keras.ops.sum(second(tensors[1]), 1)
    with pytest.raises(ValueError, match="one input of token ids.*the input 'answer', whose ids are below .* name it"):
        TextEncoder(keras.Model(tensors, joined))


def test_an_optional_input_of_another_name_is_left_out():
    ids = keras.Input((None,), dtype="int32", name="input_ids")
    positions = keras.Input((None,), dtype="int32", name="position_ids", optional=True)
    model = keras.Model({"input_ids": ids, "position_ids": positions}, _Maybe()(pooled(ids), positions))
    encoder = TextEncoder(model)
    assert encoder.roles == {"input_ids": "ids", "position_ids": None}
    (answer,) = encoder(np.array([[3, 5]], "int32")).values()
    assert_close(answer, model({"input_ids": np.array([[3, 5]]), "position_ids": None}))


class _Maybe(keras.layers.Layer):
    def call(self, x, positions=None):
        return x if positions is None else 0 * x


def test_floats_are_no_ids_unless_they_are_looked_up():
    (x,) = inputs("x", dtype="float32")
    assert TextEncoder(keras.Model(x, pooled(x))).roles == {"x": "ids"}  # Keras' own examples have such inputs
    with pytest.raises(ValueError, match="needs dtype='int32'. .* Received: input 'x' of dtype float32"):
        TextEncoder(keras.Model(x, keras.layers.Dense(3)(x[:, :, None])))


@pytest.mark.parametrize("count", [1, 3])
def test_the_errors_about_inputs_of_numbers_name_the_export_of_keras(count):
    (ids,), numbers = inputs("token_ids"), inputs(*"xyz"[:count], dtype="float32", shape=(5,))
    model = keras.Model([ids, *numbers], keras.layers.Dense(2)(keras.layers.Concatenate()([pooled(ids), *numbers])))
    with pytest.raises(ValueError, match=r'such as numbers, with `model.export\("NAME/1"\)`. Received: input'):
        TextEncoder(model)


@pytest.mark.parametrize("shape, batch", [((), None), ((None, 4), None), ((7,), 2)])
def test_inputs_are_rows_of_ids(shape, batch):
    x = keras.Input(shape, batch_size=batch, dtype="int32", name="x")
    with pytest.raises(ValueError, match=r"ids of any number of rows, \(B, T\). Received: input 'x' of shape") as error:
        TextEncoder(keras.Model(x, keras.layers.Embedding(13, 3)(x)))
    assert str((batch, *shape)) in str(error.value)


def test_what_is_known_of_the_layer_that_looks_ids_up_also_in_nested_models():
    (ids,) = inputs("ids")
    x = TokenEmbedding(17, 4, padding_id=5, position_encoding=LearnedPositionalEncoding(11))(ids)
    inner = keras.Model(ids, Encoder(1, 3, 2)(x))
    outer = keras.Input((None,), dtype="int32", name="outer")
    for encoder in (TextEncoder(inner), TextEncoder(keras.Model(outer, inner(outer)))):
        assert (encoder.vocabulary_size, encoder.padding_id, encoder.max_length, encoder.fixed_length) == (
            17,
            5,
            11,
            None,
        )
    sequential = TextEncoder(keras.Sequential([keras.Input((9,), dtype="int32"), keras.layers.Embedding(13, 3)]))
    known = (sequential.vocabulary_size, sequential.padding_id, sequential.max_length, sequential.fixed_length)
    assert known == (13, None, 9, 9)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_the_layer_that_looks_up_ids_is_found_behind_a_cast(dtype):
    """`TokenEmbedding` itself casts ids of the default dtype of `keras.Input`."""
    (ids,) = inputs("ids", dtype=dtype)
    given = ids if dtype == "float32" else keras.ops.cast(ids, "int32")
    model = keras.Model(ids, Encoder(1, 3, 2)(TokenEmbedding(17, 4, padding_id=5)(given)))
    encoder = TextEncoder(model)
    assert (encoder.vocabulary_size, encoder.padding_id) == (17, 5)
    rows = np.array([[3, 16, 5, 5]], "int32")
    (answer,) = encoder(keras.ops.convert_to_tensor(rows), padding_id=5).values()
    assert_close(answer[:, :2], model(rows[:, :2]))


def test_outputs_have_the_names_of_a_dict_or_of_their_layers():
    (ids,) = inputs("ids")
    x, y = pooled(ids), keras.layers.Embedding(13, 3, name="table")(ids)
    struct = {"pooler_output": x, "hidden_states": (y, y + 1), "a": {"b": x}}
    named = TextEncoder(keras.Model(ids, struct))
    assert set(named.outputs) == {"pooler_output", "hidden_states_0", "hidden_states_1", "a_b"}
    twice = keras.layers.Dense(2, name="head")
    listed = TextEncoder(keras.Model(ids, [twice(x), twice(x), y]))
    assert list(listed.outputs) == ["head", "head_1", "table"]
    answer = named(np.array([[3, 1]], "int32"))
    assert_close(answer["hidden_states_1"] - answer["hidden_states_0"], np.ones((1, 2, 3)))


def test_an_output_without_the_batch_is_refused():
    (ids,) = inputs("ids")
    x = pooled(ids)
    for output, shape in ((keras.ops.mean(x), "()"), (keras.ops.mean(x, axis=0), "(3,)")):
        with pytest.raises(ValueError, match="outputs with the batch as first axis.*output 'number'") as error:
            TextEncoder(keras.Model(ids, {"number": output}))
        assert f"of shape {shape}" in str(error.value)


def test_half_precision_becomes_float32():
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 3, dtype="mixed_bfloat16")(ids)
    encoder = TextEncoder(keras.Model(ids, {"half": x, "ids": keras.ops.argmax(x, axis=-1)}))
    answer = encoder(np.array([[3, 5]], "int32"))
    assert encoder.half_dtype == "bfloat16" and answer["half"].dtype == "float32" and answer["ids"].dtype == "int32"


@pytest.mark.parametrize("length", [3, 11])
def test_an_export_has_pairs_of_tokens_of_the_length_of_its_rows(length):
    """Elsewhere it widens short rows, and cuts the outputs again."""
    import tensorflow as tf

    (ids,) = inputs("ids")
    x = keras.layers.Embedding(13, 6, mask_zero=True)(ids)
    x, scores = keras.layers.MultiHeadAttention(2, 3)(x, x, return_attention_scores=True)
    for outputs in ({"x": x, "scores": scores}, {"pairs": keras.layers.Dot(axes=2)([x, x])}, {"x": x}):
        encoder = TextEncoder(keras.Model(ids, outputs))
        row = np.arange(1, length + 1, dtype="int32")[None]
        with exported_weights():
            found = tf.function(encoder, input_signature=[tf.TensorSpec([None, None], tf.int32)])(row)
        for name, expected in encoder(row).items():
            assert found[name].shape == expected.shape
            assert_close(found[name], expected)


class WithOneBefore(keras.layers.Layer):
    """Puts the sum of the vectors before them."""

    def call(self, x):
        return keras.ops.concatenate([keras.ops.sum(x, axis=1, keepdims=True), x], axis=1)


def of_other_lengths():
    """A model whose outputs have T, T + 1 and 2T entries, and those symbolic outputs."""
    (ids,) = inputs("ids")
    x = keras.layers.Embedding(13, 6, mask_zero=True)(ids)
    x = Encoder(1, 5, 2)(x)
    return keras.Model(ids, {"x": x, "before": WithOneBefore()(x), "twice": keras.layers.UpSampling1D(2)(x)})


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking:UserWarning")
@pytest.mark.parametrize("length", [3, 11])
def test_an_export_keeps_outputs_of_other_lengths_than_the_rows(length):
    """No padding is added to rows whose outputs could not be cut again."""
    import tensorflow as tf

    model, row = of_other_lengths(), np.arange(1, length + 1, dtype="int32")[None]
    encoder = TextEncoder(model)
    parts = {name: encoder.up_to(tensor) for name, tensor in encoder.outputs.items()}
    with exported_weights():
        spec = [tf.TensorSpec([None, None], tf.int32)]
        whole = tf.function(encoder, input_signature=spec)(row)
        alone = {name: tf.function(part, input_signature=spec)(row) for name, part in parts.items()}
    for name, expected in model(row).items():
        assert whole[name].shape == expected.shape == alone[name].shape
        assert_close(whole[name], expected)
        assert_close(alone[name], expected)


class OwnPositions(keras.layers.Layer):
    """Adds vectors of 5 positions, of which nothing outside of the layer tells."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(5, 3)
        self.table.build(None)
        self.supports_masking = True

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


@pytest.mark.parametrize("names", [["pooled"], ["pooled", "x"]])
def test_an_export_adds_no_columns_beyond_the_positions_of_a_layer_of_the_user(names):
    import tensorflow as tf

    (ids,) = inputs("ids")
    x = keras.layers.Embedding(13, 3, mask_zero=True)(ids)
    pooled = keras.layers.GlobalAveragePooling1D()(OwnPositions()(x))
    outputs = {"pooled": pooled, "x": x}
    model, row = keras.Model(ids, {name: outputs[name] for name in names}), np.array([[3, 11, 2, 7, 5]], "int32")
    with exported_weights():
        found = tf.function(TextEncoder(model), input_signature=[tf.TensorSpec([None, None], tf.int32)])(row)
    for name, expected in model(row).items():
        assert_close(found[name], expected)


def test_the_trial_of_more_columns_leaves_weights_constants():
    """It runs outside of the graph that is traced, and makes no weights of the export there."""
    import tensorflow as tf

    model = MaskedLM(13, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=5)
    with exported_weights():
        function = tf.function(TextEncoder(model), input_signature=[tf.TensorSpec([None, None], tf.int32)])
        graph = function.get_concrete_function().graph
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    assert len(products) > 3 and {op.inputs[1].op.type for op in products} == {"Const"}


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking:UserWarning")
def test_an_axis_of_tokens_is_found_by_calls():
    encoder = TextEncoder(of_other_lengths())
    assert {name: encoder.have_token_axis([x]) for name, x in encoder.outputs.items()} == {
        "x": True,
        "before": False,
        "twice": False,
    }
    ids = keras.Input((7,), dtype="int32")
    x = keras.layers.Embedding(13, 3)(ids)
    fixed = TextEncoder(keras.Model(ids, [x, WithOneBefore()(x)]))
    assert [fixed.have_token_axis([one]) for one in fixed.outputs.values()] == [True, False]
    failing = TextEncoder(keras.Model(ids, OnlyInGraphs()(x)))
    assert not failing.have_token_axis(list(failing.outputs.values()))


class OnlyInGraphs(keras.layers.Layer):
    def call(self, x):
        import tensorflow as tf

        if tf.executing_eagerly():
            raise ValueError("no graph")
        return x


def test_a_part_of_a_model_answers_for_itself():
    ids, segments = inputs("token_ids", "segment_ids")
    x = keras.layers.Embedding(13, 3)(ids) + keras.layers.Embedding(2, 3)(segments)
    model = keras.Model({"token_ids": ids, "segment_ids": segments}, keras.layers.Dense(2)(x))
    encoder, rows = TextEncoder(model), np.array([[3, 5, 1]], "int32")
    part = to_numpy(encoder.up_to(x)(rows))
    (table, other), (kernel, bias) = model.weights[:2], model.weights[2:]
    assert_close(part[0], to_numpy(table)[rows[0]] + to_numpy(other)[0])
    (whole,) = encoder(rows).values()
    assert_close(whole, part @ to_numpy(kernel) + to_numpy(bias))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("fixed_length", [5, 9])
def test_texts_are_truncated_to_the_smaller_limit_and_padded_to_a_fixed_length(tokenizer, fixed_length, pairs):
    short = BertTokenizer(tokenizer.vocabulary, max_length=7)
    words = "the cat sat not wonderful but dull one two three"
    texts = [[words, "the cat"], [words, "dull"]] if pairs else [[words, "the cat"]]
    layers = [keras.Input((fixed_length,), dtype="int32"), keras.layers.Embedding(80, 3, mask_zero=True)]
    ids, segments = TextEncoder(keras.Sequential(layers)).tokenize(short, *texts)
    expected = short(*texts, max_length=min(7, fixed_length), padding="max_length")
    for found, rows in ((ids, expected["token_ids"]), (segments, expected["segment_ids"])):
        rows = to_numpy(rows)
        assert found.shape == (2, fixed_length)
        np.testing.assert_array_equal(found, np.pad(rows, [[0, 0], [0, fixed_length - rows.shape[1]]]))
    assert np.count_nonzero(ids[0]) == min(7, fixed_length)
