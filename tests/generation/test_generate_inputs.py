"""`generate`: what may go in, and what comes back for it: lists, arrays, texts, dictionaries, and errors."""

import keras
import numpy as np
import pytest

import keras_tx
from keras_tx.generation import Beam, Sample, generate, stream
from tests.generation import built
from tests.generation.asked import FAST, NEW, PROMPTS, SHORT, SHORT_WRITE, SOURCES, START, WRITE, Letters
from tests.generation.built import LENGTH, SOURCE_V, V, naive
from tests.tools import randomize

LM = "untied"

pytestmark = pytest.mark.usefixtures("eager")


def test_a_saved_model_generates_what_it_did_before(tmp_path):
    model = randomize(built.language_model(packed=True), scale=0.4)
    found = model.generate(PROMPTS, **FAST)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.generate(PROMPTS, **FAST) == found
    assert len(again.weights) == len(model.weights)


def test_prompts_in_a_batch_have_the_continuations_that_they_have_alone(lm, translator):
    together = generate(lm, PROMPTS, **SHORT)
    assert [generate(lm, prompt, **SHORT) for prompt in PROMPTS] == together
    together = generate(translator, SOURCES, **SHORT_WRITE)
    assert [generate(translator, source, **SHORT_WRITE) for source in SOURCES] == together


def test_one_token_and_more_than_the_first_bucket_can_be_generated(lm):
    assert generate(lm, PROMPTS, **{**FAST, "max_new_tokens": 1}) == naive(lm, PROMPTS, 1)
    assert generate(lm, PROMPTS, **{**FAST, "max_new_tokens": 18}) == naive(lm, PROMPTS, 18)
    long = [(7 * np.arange(18) % 27 + 1).tolist()]
    assert generate(lm, long, **FAST) == naive(lm, long, NEW)


def test_texts_come_back_for_texts(lm, translator):
    tokenizer = Letters()
    options = {**FAST, "tokenizer": tokenizer}
    (row,) = naive(lm, [[1, 3, 6, 5]], NEW, stop=(2,))
    assert generate(lm, ["adc"], **options) == tokenizer.decode([row])
    assert generate(lm, "adc", **options) == generate(lm, np.array("adc"), **options) == tokenizer.decode([row])[0]
    (row,) = naive(translator, [[1]], NEW, sources=[[1, 5, 4, 2]], stop=(2,))
    found = generate(translator, np.array(["cb"]), source_tokenizer=tokenizer, **options)
    assert found == tokenizer.decode([row])
    beam = Beam(3, num_return_sequences=2)
    several = generate(lm, "adc", beam, **options)
    assert len(several) == 2 and all(text.startswith("adc") for text in several)


def test_pieces_of_text_wait_for_what_may_still_change_them(lm):
    class Ligatures(Letters):
        def decode(self, rows):
            return [text.replace("abcd", "&") for text in super().decode(rows)]

    forced = dict(enumerate(token for (token,) in Letters().tokenize("fabcdg")))
    options = {**FAST, "tokenizer": Ligatures(), "forced_tokens": forced}
    pieces = list(stream(lm, "ee", **options))
    assert "ee" + "".join(pieces) == generate(lm, "ee", **options) == "eef&g"
    assert len(pieces) == NEW and pieces[:3] == ["", "", ""]


BAD = [
    ({"max_new_tokens": 0}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=0"),
    ({"max_new_tokens": -3}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=-3"),
    ({"max_new_tokens": 2.0}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=2.0"),
    ({"max_new_tokens": 2**31}, f"positive integer, at most {2**30}. Received: max_new_tokens={2**31}"),
    ({"forbidden_tokens": np.array(3)}, r"`forbidden_tokens` must hold ids .*Received: forbidden_tokens=array\(3\)"),
    ({"forbidden_tokens": [np.array(3)]}, r"`forbidden_tokens` must hold ids .*forbidden_tokens=\[array\(3\)\]"),
    ({"strategy": Beam(V + 1)}, f"`num_beams` must not be above .*num_beams={V + 1}, vocabulary_size={V}"),
    ({"min_new_tokens": 7}, "`min_new_tokens` must not be above .*min_new_tokens=7, max_new_tokens=6"),
    ({"stop_tokens": [3, V]}, rf"`stop_tokens` must be ids in \[0, {V}\), .*Received: {V} in stop_tokens"),
    ({"stop_tokens": 2.5}, "`stop_tokens` must be integers. Received: stop_tokens=2.5"),
    ({"stop_tokens": [[3, 4], [5, 6]]}, r"an id or a flat list of ids; .*Received: stop_tokens=\[\[3, 4\], \[5, 6\]\]"),
    ({"stop_tokens": (3, [5, 6])}, r"`stop_tokens` must be an id or a flat list .*stop_tokens=\(3, \[5, 6\]\)"),
    ({"stop_tokens": [[]]}, r"`stop_tokens` must be an id or a flat list of ids; .*Received: stop_tokens=\[\[\]\]"),
    ({"stop_tokens": np.array([[3, 4]])}, r"sequences of ids are not supported. Received: stop_tokens=array\("),
    ({"inputs": []}, r"`token_ids` must have a token in each row. Received: \[\]"),
    ({"inputs": [[3], []]}, r"`token_ids` must have a token in each row. Received: \[\]"),
    ({"inputs": np.zeros((0, 5), "int32")}, r"`token_ids` must be rows of ids, .* not empty. Received: shapes \[\]"),
    ({"inputs": np.ones((2, 3, 5), "int32")}, r"`token_ids` must be rows of ids, .*Received: shapes \[\(3, 5\), "),
    ({"inputs": np.int32(5)}, r"`token_ids` must be rows of ids, .*Received: shapes \[\(\)\]"),
    ({"inputs": [[3, 4], [0, 0]]}, r"`token_ids` must have a token in each row. Received: \[0, 0\]"),
    ({"inputs": [[3, V]]}, rf"`token_ids` must be in \[0, {V}\). Received: {V}"),
    ({"inputs": [[-1, 3]]}, rf"`token_ids` must be in \[0, {V}\). Received: -1"),
    ({"inputs": [[3.0, 4.0]]}, "`token_ids` must be integers, or texts with a `tokenizer`. Received: dtype float64"),
    ({"inputs": ["adc"]}, r"`tokenizer` must be given for texts. Received: tokenizer=None, token_ids=\['adc'\]"),
    ({"inputs": {"others": [[3]]}}, r"`inputs` must have \['token_ids'\]. Received: \['others'\]"),
    ({"inputs": {3: [[3]], "others": [[3]]}}, r"`inputs` must have \['token_ids'\]. Received: \[3, 'others'\]"),
    (
        {"inputs": {"token_ids": [[3]], "attention_mask": [[1]]}},
        r"must have only the inputs that `generate` reads, \['token_ids'\]. Received: also \['attention_mask'\]",
    ),
    ({"start_token": V}, rf"`start_token` must be an id in \[0, {V}\). Received: start_token={V}"),
    ({"start_token": 3}, "`start_token` must be None for prompts that are ids: .*Received: start_token=3"),
    ({"start_token": "a"}, "`start_token` must be integers. Received: start_token='a'"),
    ({"target": "ids"}, r"`target` must be one of the inputs \['token_ids'\]. Received: target='ids'"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_generated_is_refused(lm, changed, message):
    arguments = {**FAST, "inputs": PROMPTS, **changed}
    with pytest.raises(ValueError, match=message):
        generate(lm, arguments.pop("inputs"), arguments.pop("strategy", None), **arguments)


@pytest.mark.parametrize("inputs", [None, {3, 4}, (row for row in PROMPTS), {"token_ids": iter([])}, object()])
def test_what_is_neither_text_nor_rows_is_named(lm, inputs):
    kind = type(inputs["token_ids"] if isinstance(inputs, dict) else inputs).__name__
    message = rf"`token_ids` must be texts, or rows of ids, \(P,\) or \(B, P\). Received: an object of type {kind}"
    with pytest.raises(TypeError, match=message):
        generate(lm, inputs, **FAST)


SYMBOLIC = "`inputs` must have values: .*, export the model with `keras_tx.serving.export`. Received: a "


def test_symbolic_inputs_are_refused(lm):
    ids = keras.Input((None,), dtype="int32")
    for inputs in (ids, {"token_ids": ids}, [ids]):
        with pytest.raises(TypeError, match=SYMBOLIC + "KerasTensor"):
            generate(lm, inputs, **FAST)
    if keras.backend.backend() == "jax":
        import jax

        with pytest.raises(TypeError, match=SYMBOLIC + r"\w+Tracer"):
            jax.jit(lambda x: generate(lm, x, **FAST))(np.array(PROMPTS[:1]))


def test_a_checkpoint_refuses_symbolic_inputs_too():
    sizes = {"vocab_size": V, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": LENGTH}
    model = keras_tx.pretrained.PretrainedModel({"model_type": "gpt2", **sizes}, "causal_lm")
    ids = keras.Input((None,), dtype="int32")
    for method in (model.generate, model.stream):
        with pytest.raises(TypeError, match=SYMBOLIC + "KerasTensor"):
            method({"input_ids": ids, "attention_mask": ids})


@pytest.mark.tensorflow
def test_within_a_graph_of_tensorflow_inputs_are_refused(lm):
    import tensorflow as tf

    with pytest.raises(TypeError, match=SYMBOLIC + r"\w*Tensor"):
        tf.function(lambda x: generate(lm, x, **FAST))(tf.constant(PROMPTS[:1]))
    with pytest.raises(TypeError, match=SYMBOLIC + "call within a TensorFlow function"):
        tf.function(lambda: generate(lm, PROMPTS, **FAST))()
    data = tf.data.Dataset.from_tensors(tf.constant(PROMPTS[:1]))
    with pytest.raises(TypeError, match=SYMBOLIC + r"\w*Tensor"):
        data.map(lambda x: generate(lm, x, **FAST))
    with pytest.raises(TypeError, match=r"or rows of ids, .*Received: an object of type _TensorDataset"):
        generate(lm, data, **FAST)


def test_what_is_no_tokenizer_is_refused_with_ids_too(lm):
    with pytest.raises(TypeError, match="`tokenizer` must have the method `tokenize`. Received: tokenizer=5"):
        generate(lm, PROMPTS, **FAST, tokenizer=5)


def test_stop_tokens_are_an_id_or_ids_of_any_kind(lm):
    from keras_tx.generation.config import GenerationConfig
    from keras_tx.generation.incremental_model import IncrementalModel

    model, tensor = IncrementalModel(lm), keras.ops.convert_to_tensor
    several = [
        [3, 4],
        (3, 4),
        np.array([3, 4]),
        tensor([3, 4]),
        [np.int64(3), 4],
        [tensor(3), np.array(4)],
        range(3, 5),
        {4, 3},
    ]
    for stop_tokens in several:
        assert GenerationConfig(model, max_new_tokens=2, stop_tokens=stop_tokens).stop_tokens == (3, 4)
    for stop_tokens in (3, np.int32(3), np.array(3), tensor(3), [3]):
        assert GenerationConfig(model, max_new_tokens=2, stop_tokens=stop_tokens).stop_tokens == (3,)
    for stop_tokens in ((), [], np.zeros(0, "int32")):
        assert GenerationConfig(model, max_new_tokens=2, stop_tokens=stop_tokens).stop_tokens == ()


BAD_SOURCES = [
    ({}, "`start_token` must be given: the id that begins a target. Received: start_token=None"),
    ({"start_token": V}, rf"`start_token` must be an id in \[0, {V}\). Received: start_token={V}"),
    ({"start_token": [1, 2]}, r"`start_token` must be an id in .* Received: start_token=\[1, 2\]"),
    ({"start_token": 1.0}, "`start_token` must be integers. Received: start_token=1.0"),
    ({"inputs": {"target_ids": [[1]]}}, r"`inputs` must have \['source_ids'\]. Received: \['target_ids'\]"),
    (
        {"inputs": {"source_ids": [[3]], "target_id": [[1]]}, "start_token": 1},
        r"only the inputs that `generate` reads, \['source_ids', 'target_ids'\]. Received: also \['target_id'\]",
    ),
    (
        {"inputs": {"source_ids": [[3], [4]], "target_ids": [[1]]}},
        "All `inputs` must have the same number of rows. Received: {'source_ids': 2, 'target_ids': 1}",
    ),
    (
        {"inputs": {"source_ids": [[3]], "target_ids": [[1]]}, "start_token": 2},
        "`start_token` must be None for prompts that are ids: .*Received: start_token=2",
    ),
    (
        {"inputs": {"source_ids": [[3], [4]], "target_ids": np.array([[0, 5], [0, 0]])}},
        r"`target_ids` must be a list of rows if targets begin with the padding id: .*Received: an array of shape "
        r"\(2, 2\) whose rows all begin with the padding id 0",
    ),
    ({"inputs": [[SOURCE_V]]}, rf"`source_ids` must be in \[0, {SOURCE_V}\). Received: {SOURCE_V}"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_SOURCES)
def test_what_cannot_be_translated_is_refused(translator, changed, message):
    arguments = {**FAST, "inputs": SOURCES, **changed}
    with pytest.raises(ValueError, match=message):
        generate(translator, arguments.pop("inputs"), **arguments)


@pytest.fixture(scope="module")
def keeping_and_losing_padding():
    """Two models with the same weights: in the first, nothing is padding; in the second, the id 0."""
    keras.utils.set_random_seed(3)
    models = [built.translator(embedding_options={"padding_id": padding_id}) for padding_id in (None, 0)]
    randomize(models[0], scale=0.4)
    models[1].set_weights(models[0].get_weights())
    return models


TARGETS = [[0, 7, 11], [0], [START, 0, 5], [13]]


@pytest.mark.parametrize("of_rows", [list, lambda rows: np.array([*rows, None], object)[:-1]], ids=["list", "objects"])
def test_a_target_may_begin_with_the_padding_id(keeping_and_losing_padding, of_rows):
    whole, model = keeping_and_losing_padding
    sources = [[4, 3, 21], [8, 30, 6], [1, 36, 5], [2, 2, 13]]
    expected = naive(whole, TARGETS, NEW, sources=sources)
    expected = [row[len(target) :] for row, target in zip(expected, TARGETS, strict=True)]
    inputs = {"source_ids": sources, "target_ids": of_rows(TARGETS)}
    assert generate(model, inputs, **FAST) == expected
    for one in (TARGETS[0], np.array(TARGETS[0])):  # of a single row, the length is known in an array, too
        assert list(generate(model, {"source_ids": sources[0], "target_ids": one}, **FAST)) == expected[0]
    assert generate(model, sources, **FAST, start_token=0)[1] == expected[1]
    padded = {"source_ids": sources[2:], "target_ids": np.array([[START, 5, 0], [0, 0, 13]])}
    assert generate(model, padded, **SHORT) == generate(model, {**padded, "target_ids": [[START, 5], [13]]}, **SHORT)


def test_a_text_may_begin_with_the_padding_id(keeping_and_losing_padding):
    whole, model = keeping_and_losing_padding
    tokenizer, sources = Letters(), [[4, 3, 21], [8, 30, 6]]
    expected = naive(whole, [[0, 3, 6], [0]], NEW, sources=sources)
    expected = tokenizer.decode([expected[0][3:], expected[1][1:]])
    options = {**FAST, "tokenizer": tokenizer, "start_token": 0, "stop_tokens": ()}
    assert generate(model, {"source_ids": sources, "target_ids": ["ad", ""]}, **options) == expected


def test_more_tokens_than_learned_positions_are_refused():
    model = built.made("learned")
    message = f"must fit into the learned positions. Received: max_new_tokens=20, a prompt of 5, max_length={LENGTH}"
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, **{**FAST, "max_new_tokens": 20})


def test_sources_without_padding_must_be_of_one_length():
    source, target = built.ids_of("source"), built.ids_of("target")
    layers = built.keras.layers
    memory = layers.Embedding(SOURCE_V, 12)(source)
    x = built.DecoderLayer(17, 3, cross_attention=True)(layers.Embedding(V, 12)(target), memory)
    model = randomize(keras.Model([source, target], layers.Dense(V)(x)))
    expected = naive(model, [[START]] * 2, NEW, sources=[[4, 0, 36], [1, 2, 3]])
    assert generate(model, [[4, 0, 36], [1, 2, 3]], **WRITE) == [row[1:] for row in expected]
    with pytest.raises(ValueError, match=r"`source` must have rows of the same length: .*Received: lengths \[1, 2\]"):
        generate(model, [[4, 3], [1]], **WRITE)


def test_what_is_no_strategy_is_refused(lm):
    with pytest.raises(ValueError, match=r"`stream` needs a `strategy` without beams. Received: strategy=Beam\("):
        stream(lm, PROMPTS, Beam(2), **FAST)
    with pytest.raises(ValueError, match=r"`stream` needs a `strategy` without beams. Received: strategy=Beam\("):
        stream(lm, PROMPTS, Beam(1), **FAST)
    for make, message in (
        (lambda: Sample(0.0), "`temperature` must be .*Received: temperature=0.0"),
        (lambda: Sample(top_p=0.0), "`top_p` must be .*Received: top_p=0.0"),
        (lambda: Sample(top_p=1.5), "`top_p` must be .*Received: top_p=1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_sources_may_have_a_tokenizer_of_their_own(translator):
    shifted = type("Shifted", (Letters,), {"tokenize": lambda self, texts: [[ord(x) - 90 for x in t] for t in texts]})()
    options = {**SHORT, "tokenizer": Letters()}
    ours = generate(translator, ["ab", "c"], source_tokenizer=shifted, **options)
    assert ours == generate(translator, ["ef", "g"], source_tokenizer=Letters(), **options)


def test_two_vocabularies_need_two_tokenizers(translator):
    sized = lambda size: type("Sized", (Letters,), {"vocabulary_size": size})()
    with pytest.raises(
        ValueError,
        match=rf"`source_tokenizer` must be given for texts .* vocabulary sizes \{{'\w+': {SOURCE_V}\}} .* and {V} of",
    ):
        generate(translator, ["ab"], tokenizer=sized(V), **SHORT)
    with pytest.raises(ValueError, match=f"`tokenizer` must not have more tokens .* vocabulary_size={V} of the input"):
        generate(translator, ["ab"], tokenizer=sized(SOURCE_V), source_tokenizer=sized(V), **SHORT)
    with pytest.raises(ValueError, match=f"`source_tokenizer` must not .* vocabulary_size={SOURCE_V} of the input"):
        generate(translator, ["ab"], tokenizer=sized(V), source_tokenizer=sized(SOURCE_V + 1), **SHORT)
    generate(translator, [[3, 4]], tokenizer=sized(V), **SHORT)  # ids need no tokenizer of the sources


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forced_tokens": {1: V}}, rf"`forced_tokens` must be ids in \[0, {V}\), which .*Received: {V} in forced"),
        ({"start_token": V}, rf"`start_token` must be an id in \[0, {V}\). Received: start_token={V}"),
        ({"inputs": [[5, V]]}, rf"`ids` must be in \[0, {V}\). Received: {V}"),
    ],
)
def test_ids_without_a_row_in_the_embedding_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        generate(built.padded_output(), **{"inputs": PROMPTS, **SHORT, **changed})


def test_a_text_prompt_may_begin_without_a_start_token(lm):
    options = {**SHORT, "stop_tokens": ()}
    with_ids = generate(lm, [[3, 4]], **options)
    assert generate(lm, ["ab"], tokenizer=Letters(), start_token=False, **options) == Letters().decode(with_ids)


def test_a_source_beyond_the_learned_positions_is_refused():
    options = {"position_encoding": "learned", "max_length": 20}
    model = built.translator(embedding_options=options)
    assert len(generate(model, [[3] * 20], **{**WRITE, "max_new_tokens": 1})[0]) == 1  # 32 slots do not fit, 20 do
    with pytest.raises(ValueError, match="`source_ids` must fit .* Received: source_ids of length 21, max_length=20"):
        generate(model, [[3] * 21], **WRITE)


def test_a_stream_has_no_scores_and_knows_its_arguments(lm):
    with pytest.raises(ValueError, match="`return_scores` must not be used with `stream`.* Received: True"):
        stream(lm, PROMPTS, return_scores=True, **FAST)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        stream(lm, PROMPTS, max_tokens=3, **FAST)
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'max_tokens'"):
        generate(lm, PROMPTS, max_tokens=3, **FAST)


@pytest.mark.parametrize("last", [keras.layers.Dense(V, activation="softmax"), keras.layers.Softmax()])
def test_probabilities_are_refused(last):
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(V, 8)(ids)
    model = keras.Model(ids, last(keras_tx.layers.Decoder(1, 8, 2)(x)))
    with pytest.raises(ValueError, match="must be logits, not probabilities. Received: a softmax in the last layer"):
        generate(model, PROMPTS, **FAST)


def test_a_packed_model_streams_and_generates_through_the_functions_too():
    model = randomize(built.language_model(packed=True), scale=0.4)
    found = generate(model, PROMPTS, **FAST)
    assert found == model.generate(PROMPTS, **FAST)
    pieces = np.stack(list(model.stream(PROMPTS, **FAST)), axis=1)
    assert [row.tolist() for row in pieces] == [row[len(prompt) :] for row, prompt in zip(found, PROMPTS, strict=True)]
    assert list(stream(model, PROMPTS[0], **FAST)) == found[0][len(PROMPTS[0]) :]


def test_rows_of_an_array_of_objects_are_ids_and_a_mixture_is_refused(lm):
    rows = np.array([*PROMPTS, None], object)[:-1]
    assert generate(lm, rows, **SHORT) == generate(lm, PROMPTS, **SHORT)
    with pytest.raises(ValueError, match=r"`inputs` must be only texts, or only rows of ids. Received: 5 among texts"):
        generate(lm, ["ab", 5], **SHORT, tokenizer=Letters())
    message = r"`token_ids` must be rows of ids, \(P,\) or \(B, P\). Received: \[\[5, 7\], 5\]"
    with pytest.raises(ValueError, match=message):
        generate(lm, [[5, 7], 5], **SHORT)


def test_padding_inside_a_prompt_is_left_out(lm):
    assert generate(lm, [[5, 0, 7, 11, 3, 17, 0]], **SHORT) == generate(lm, [PROMPTS[0]], **SHORT)
