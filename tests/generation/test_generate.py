"""`generate`: the tokens that a Python loop over the whole model finds, from and to ids, arrays and texts."""

import itertools

import keras
import numpy as np
import pytest

import keras_tx
from keras_tx.generation import Beam, Greedy, Sample, generate, stream
from keras_tx.generation.incremental_model import IncrementalModel
from tests.generation import built
from tests.generation.built import LENGTH, SOURCE_V, V, logits_of, naive
from tests.tools import assert_close, randomize

PROMPTS = [[5, 7, 11, 3, 17], [9], [2, 2, 13]]
SOURCES = [[4, 3, 21], [8, 30, 6, 1, 36], [12]]
PADDED = np.array([[4, 3, 21, 0, 0], [8, 30, 6, 1, 36], [12, 0, 0, 0, 0]], "int32")
NEW, START = 6, 1
BEAM = Beam(4, num_return_sequences=3, length_penalty=0.0)
FAST = {"max_new_tokens": NEW, "forbidden_tokens": [0], "jit_compile": False}
WRITE = {**FAST, "start_token": START}
SHORT, SHORT_WRITE = ({**options, "max_new_tokens": 2} for options in (FAST, WRITE))


@pytest.fixture(autouse=True)
def eager_unless_compiled(request):
    if "compiled" not in request.fixturenames:
        request.getfixturevalue("eager")


@pytest.fixture
def compiled(lm, translator):
    """Tests with this run the loop as users do."""
    for model in (lm, translator):
        vars(model).pop("_keras_tx_loops", None)
    yield
    for model in (lm, translator):
        vars(model).pop("_keras_tx_loops", None)


@pytest.fixture(scope="module")
def lm():
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    return built.made("untied")


@pytest.fixture(scope="module")
def translator():
    keras.utils.set_random_seed(7)
    return randomize(built.translator(tie_embeddings=False), scale=0.4)


class Letters:
    """A tokenizer of letters: "a" is 3."""

    cls_id, sep_id, pad_id = 1, 2, 0

    def tokenize(self, texts):
        return [[ord(letter) - 94 for letter in text] for text in texts]

    def __call__(self, texts):
        rows = [[self.cls_id, *row, self.sep_id] for row in self.tokenize(texts)]
        return {"token_ids": np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], "int32")}

    def decode(self, rows):
        return ["".join(chr(token + 94) for token in row if token > 2) for row in rows]


@pytest.mark.usefixtures("compiled")
def test_greedy_generates_what_the_whole_model_finds_likeliest(lm, translator):
    expected = naive(lm, PROMPTS, NEW)
    assert generate(lm, PROMPTS, **FAST) == lm.generate(PROMPTS, Greedy(), **FAST) == expected
    pieces = np.stack(list(stream(lm, PROMPTS, **FAST)), 1)
    assert pieces.tolist() == [row[-NEW:] for row in expected]
    expected = naive(translator, [[START]] * 3, NEW, sources=PADDED)
    assert generate(translator, SOURCES, **WRITE) == [row[1:] for row in expected]


@pytest.mark.parametrize("name", ["attention_and_operators", "biases_and_a_skip", "sequential", "encoder_and_decoder"])
def test_models_that_users_put_together_generate(name, tmp_path):
    model = built.made(name)
    sources = PADDED if name == "encoder_and_decoder" else None
    inputs = PROMPTS if sources is None else {"source": SOURCES, "target": PROMPTS}
    found = generate(model, inputs, **FAST)
    expected = naive(model, PROMPTS, NEW, sources=sources)
    if sources is not None:
        expected = [row[len(prompt) :] for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert found == expected
    if name == "attention_and_operators":
        model.save(tmp_path / "model.keras")
        assert generate(keras.saving.load_model(tmp_path / "model.keras"), inputs, **FAST) == found


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


def test_one_beam_is_greedy_and_scores_are_sums_of_log_probabilities(lm):
    greedy, score = generate(lm, PROMPTS, return_scores=True, **FAST)
    one, one_score = generate(lm, PROMPTS, Beam(1, length_penalty=0.0), return_scores=True, **FAST)
    assert one == greedy
    for text, prompt, total in zip(greedy, PROMPTS, score, strict=True):
        logits = logits_of(lm, [text])[0, len(prompt) - 1 : len(text) - 1].astype("float64")
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert_close(total, log_probs[np.arange(NEW), text[len(prompt) :]].sum(), atol=1e-4)
    assert_close(one_score, score, atol=1e-4)


def test_beams_come_best_first_as_many_as_asked_for(translator):
    rows, scores = generate(translator, SOURCES, BEAM, return_scores=True, **WRITE)
    assert [len(found) for found in rows] == [3, 3, 3] and scores.shape == (3, 3)
    assert (np.diff(scores) <= 0).all()
    ids = generate(translator, PADDED, BEAM, **WRITE)
    assert ids.shape == (3, 3, NEW) and ids.tolist() == rows
    one, alone = generate(translator, SOURCES[1], BEAM, return_scores=True, **WRITE)
    assert one == rows[1] and alone.shape == (3,)
    assert_close(alone, scores[1], atol=1e-5)
    greedy, score = generate(translator, SOURCES, return_scores=True, **WRITE)
    assert len(greedy) == 3 and (scores[:, 0] >= score - 1e-5).mean() > 0.5


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.usefixtures("compiled")
def test_xla_generates_what_the_graph_without_it_generates(translator):
    expected = generate(translator, SOURCES, BEAM, **WRITE)
    assert generate(translator, SOURCES, BEAM, **{**WRITE, "jit_compile": True}) == expected


@pytest.mark.tensorflow
@pytest.mark.usefixtures("compiled")
def test_a_second_call_compiles_nothing_for_prompts_in_the_same_bucket(lm, monkeypatch):
    calls, step = [], IncrementalModel.step

    def counted(self, *args, **kwargs):
        calls.append(1)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(IncrementalModel, "step", counted)
    generate(lm, PROMPTS, Sample(0.9, seed=1), **FAST)
    traced = len(calls)
    generate(lm, [[3] * 16, [4], [5, 6]], Sample(0.9, seed=2), **{**FAST, "max_new_tokens": 3})
    assert 0 < traced == len(calls) <= 4


def test_a_packed_model_keeps_what_was_compiled():
    model = built.language_model(packed=True)
    assert model._generation_model() is model._generation_model()


def test_weights_that_training_changed_are_used():
    model = built.made("causal_lm")
    before = generate(model, PROMPTS, **FAST)
    eager = keras.backend.backend() == "tensorflow"  # tracing would take longer than the step
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=eager)
    model.fit(np.array(PROMPTS[0])[None], np.array(PROMPTS[0])[None], verbose=0)
    after = generate(model, PROMPTS, **FAST)
    assert after == naive(model, PROMPTS, NEW) != before


def test_rows_end_with_the_first_of_the_stop_tokens(lm):
    plain = naive(lm, PROMPTS, NEW)
    new = [row[len(prompt) :] for row, prompt in zip(plain, PROMPTS, strict=True)]

    def lengths(stop):
        return {min([row.index(token) for token in stop if token in row], default=NEW) for row in new}

    stop = max(itertools.combinations(sorted(set(sum(new, []))), 2), key=lambda stop: len(lengths(stop)))
    expected = naive(lm, PROMPTS, NEW, stop=stop)
    assert len({len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True)}) > 1
    assert generate(lm, PROMPTS, stop_tokens=stop, **FAST) == expected
    prompts = np.array([row + [0] * (5 - len(row)) for row in PROMPTS])
    found = generate(lm, prompts, stop_tokens=stop, **FAST)
    width = 5 + max(len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True))
    assert found.shape == (3, width)
    for row, prompt, line in zip(expected, PROMPTS, found, strict=True):
        end = 5 + len(row) - len(prompt)
        assert line[5 - len(prompt) : end].tolist() == row
        assert not line[: 5 - len(prompt)].any() and not line[end:].any()


def test_one_token_and_more_than_the_first_bucket_can_be_generated(lm):
    assert generate(lm, PROMPTS, **{**FAST, "max_new_tokens": 1}) == naive(lm, PROMPTS, 1)
    assert generate(lm, PROMPTS, **{**FAST, "max_new_tokens": 18}) == naive(lm, PROMPTS, 18)
    long = [(7 * np.arange(18) % 27 + 1).tolist()]
    assert generate(lm, long, **FAST) == naive(lm, long, NEW)


def test_ids_come_back_as_they_came(lm, translator):
    expected = generate(lm, PROMPTS, **SHORT)
    left = np.array([[0] * (5 - len(row)) + row for row in PROMPTS])
    right = np.array([row + [0] * (5 - len(row)) for row in PROMPTS], "int64")
    for prompts in (left, right, keras.ops.convert_to_tensor(right)):
        found = generate(lm, prompts, **SHORT)
        assert isinstance(found, np.ndarray) and found.shape == (3, 5 + 2)
        assert found[:, 5:].tolist() == [row[-2:] for row in expected]
    assert generate(lm, np.array(PROMPTS[0]), **SHORT).tolist() == expected[0]
    assert generate(lm, [np.array(row) for row in PROMPTS], **SHORT) == expected
    found = generate(translator, {"source_ids": SOURCES, "target_ids": [[START, 3], [START], [START]]}, **SHORT)
    assert found[1:] == generate(translator, SOURCES, **SHORT_WRITE)[1:]
    assert generate(translator, PADDED, **SHORT_WRITE).tolist() == generate(translator, SOURCES, **SHORT_WRITE)


def test_texts_come_back_for_texts(lm, translator):
    tokenizer = Letters()
    options = {**FAST, "tokenizer": tokenizer}
    (row,) = naive(lm, [[1, 3, 6, 5]], NEW, stop=(2,))
    assert generate(lm, ["adc"], **options) == tokenizer.decode([row])
    assert generate(lm, "adc", **options) == tokenizer.decode([row])[0]
    (row,) = naive(translator, [[1]], NEW, sources=[[1, 5, 4, 2]], stop=(2,))
    found = generate(translator, np.array(["cb"]), source_tokenizer=tokenizer, **options)
    assert found == tokenizer.decode([row])
    beam = Beam(3, num_return_sequences=2)
    several = generate(lm, "adc", beam, **options)
    assert len(several) == 2 and all(text.startswith("adc") for text in several)


def test_pieces_of_a_stream_join_to_the_answer(lm, translator):
    expected = generate(lm, PROMPTS, **FAST)
    pieces = list(stream(lm, PROMPTS, **FAST))
    assert len(pieces) == NEW and np.stack(pieces, 1).tolist() == [row[-NEW:] for row in expected]
    one = list(stream(lm, PROMPTS[0], **FAST))
    assert PROMPTS[0] + one == expected[0] and type(one[0]) is int
    stop = [expected[0][7]]
    pieces = np.stack(list(stream(lm, PROMPTS, stop_tokens=stop, **FAST)), 1)
    stopped = generate(lm, PROMPTS, stop_tokens=stop, **FAST)
    for row, line, prompt in zip(stopped, pieces, PROMPTS, strict=True):
        assert line.tolist()[: len(row) - len(prompt)] == row[len(prompt) :]
        assert not line[len(row) - len(prompt) :].any()
    options = {**FAST, "tokenizer": Letters()}
    assert "adc" + "".join(stream(lm, "adc", **options)) == generate(lm, "adc", **options)
    options["source_tokenizer"] = Letters()
    pieces = zip(*stream(translator, ["cb"], **options), strict=True)
    assert ["".join(texts) for texts in pieces] == generate(translator, ["cb"], **options)


def test_pieces_of_text_wait_for_what_may_still_change_them(lm):
    class Ligatures(Letters):
        def decode(self, rows):
            return [text.replace("abcd", "&") for text in super().decode(rows)]

    forced = dict(enumerate(token for (token,) in Letters().tokenize("fabcdg")))
    options = {**FAST, "tokenizer": Ligatures(), "forced_tokens": forced}
    pieces = list(stream(lm, "ee", **options))
    assert "ee" + "".join(pieces) == generate(lm, "ee", **options) == "eef&g"
    assert len(pieces) == NEW and pieces[:3] == ["", "", ""]


@pytest.mark.tensorflow
def test_a_bert_tokenizer_can_be_given(lm):
    from keras_tx.text import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "go", "##ne", ".", "a", "dog", "is", "not", "now"]
    tokenizer = BertTokenizer([*words, *[f"word{i}" for i in range(V - len(words))]])
    forced = dict(enumerate([words.index(word) for word in ("is", "not", "go", "##ne", ".", "[SEP]")]))
    options = {**FAST, "tokenizer": tokenizer, "forced_tokens": forced}
    assert generate(lm, ["A dog"], **options) == ["a dog is not gone."]
    assert "".join(stream(lm, "A dog", **options)) == " is not gone."


@pytest.mark.tensorflow
def test_ids_that_the_tokenizer_lacks_are_never_generated(lm):
    """Vocabularies of models are often larger, padded to a multiple of 64."""
    from keras_tx.text import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    tokenizer, prompts = BertTokenizer(words), ["the cat", "cat"]
    options = {"max_new_tokens": 9, "stop_tokens": (), "return_scores": True, "jit_compile": False}
    ids = [[tokenizer.cls_id, *row] for row in ([5, 6], [6])]
    for strategy in (Greedy(), Sample(seed=3), Beam(2)):
        texts, scores = generate(lm, prompts, strategy, tokenizer=tokenizer, **options)
        allowed = {"forbidden_tokens": range(len(words), V)}
        rows, expected = generate(lm, ids, strategy, **options, **allowed)
        assert texts == [tokenizer.decode(row[1:]) for row in rows]
        assert_close(scores, expected)
        assert max(map(max, generate(lm, ids, strategy, **options)[0])) >= len(words)  # else the test shows nothing
    stop = {**options, "stop_tokens": V - 1, "forced_tokens": {2: V - 1}}
    rows, _ = generate(lm, ids, tokenizer=tokenizer, **stop)
    assert [row[-1] for row in rows] == [V - 1, V - 1]  # what was asked for is not forbidden


def test_samples_depend_on_the_seed_and_the_row_alone(lm):
    sample = lambda prompts, seed: generate(lm, prompts, Sample(1.5, seed=seed), **FAST)
    first = sample(PROMPTS, 3)
    assert sample(PROMPTS, 3) == first != sample(PROMPTS, 4)
    assert sample(PROMPTS[0], 3) == first[0]
    assert np.stack(list(stream(lm, PROMPTS, Sample(1.5, seed=3), **FAST)), 1).tolist() == [x[-NEW:] for x in first]


def test_constraints_reach_what_is_generated(lm):
    plain = naive(lm, PROMPTS, NEW)
    never = (0, plain[0][len(PROMPTS[0])])
    assert generate(lm, PROMPTS, **{**FAST, "forbidden_tokens": never}) == naive(lm, PROMPTS, NEW, never=never)
    stop = [token for token in range(1, V) if token % 4 == 0]
    rules = {"forced_tokens": {1: 23, -1: 25}, "no_repeat_ngram_size": 1, "repetition_penalty": 1.1}
    found = generate(lm, PROMPTS[0], **FAST, **rules, stop_tokens=stop, min_new_tokens=NEW)
    new = found[len(PROMPTS[0]) :]
    assert (new[1], new[-1], len(set(found))) == (23, 25, len(PROMPTS[0]) + NEW)
    assert not set(stop) & set(new)


BAD = [
    ({"max_new_tokens": 0}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=0"),
    ({"max_new_tokens": -3}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=-3"),
    ({"max_new_tokens": 2.0}, "`max_new_tokens` must be a positive integer. Received: max_new_tokens=2.0"),
    ({"strategy": Beam(V + 1)}, f"`num_beams` must not be above .*num_beams={V + 1}, vocabulary_size={V}"),
    ({"min_new_tokens": 7}, "`min_new_tokens` must not be above .*min_new_tokens=7, max_new_tokens=6"),
    ({"stop_tokens": [3, V]}, rf"`stop_tokens` must be ids in \[0, {V}\), .*Received: {V} in stop_tokens"),
    ({"stop_tokens": 2.5}, "`stop_tokens` must be integers. Received: stop_tokens=2.5"),
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
    ({"start_token": V}, rf"`start_token` must be an id in \[0, {V}\). Received: start_token={V}"),
    ({"start_token": "a"}, "`start_token` must be integers. Received: start_token='a'"),
    ({"target": "ids"}, r"`target` must be one of the inputs \['token_ids'\]. Received: target='ids'"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_generated_is_refused(lm, changed, message):
    arguments = {**FAST, "inputs": PROMPTS, **changed}
    with pytest.raises(ValueError, match=message):
        generate(lm, arguments.pop("inputs"), arguments.pop("strategy", None), **arguments)


def test_what_is_no_tokenizer_is_refused_with_ids_too(lm):
    with pytest.raises(TypeError, match="`tokenizer` must have the method `tokenize`. Received: tokenizer=5"):
        generate(lm, PROMPTS, **FAST, tokenizer=5)
    with pytest.raises(TypeError, match="`source_tokenizer` must be callable with texts. Received: source_tokenizer=5"):
        generate(lm, PROMPTS, **FAST, source_tokenizer=5)


BAD_SOURCES = [
    ({}, "`start_token` must be given: the id that begins a target. Received: start_token=None"),
    ({"start_token": V}, rf"`start_token` must be an id in \[0, {V}\). Received: start_token={V}"),
    ({"start_token": [1, 2]}, r"`start_token` must be an id in .* Received: start_token=\[1, 2\]"),
    ({"start_token": 1.0}, "`start_token` must be integers. Received: start_token=1.0"),
    ({"inputs": {"target_ids": [[1]]}}, r"`inputs` must have \['source_ids'\]. Received: \['target_ids'\]"),
    (
        {"inputs": {"source_ids": [[3], [4]], "target_ids": [[1]]}},
        "All `inputs` must have the same number of rows. Received: {'source_ids': 2, 'target_ids': 1}",
    ),
    ({"inputs": [[SOURCE_V]]}, rf"`source_ids` must be in \[0, {SOURCE_V}\). Received: {SOURCE_V}"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_SOURCES)
def test_what_cannot_be_translated_is_refused(translator, changed, message):
    arguments = {**FAST, "inputs": SOURCES, **changed}
    with pytest.raises(ValueError, match=message):
        generate(translator, arguments.pop("inputs"), **arguments)


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


def test_logits_that_are_nan_are_an_error():
    model = built.language_model()
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(ValueError, match="must not be NaN, .*Received: no token to choose at the new token 1"):
        generate(model, PROMPTS, **FAST)


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


@pytest.mark.parametrize("name", ["mask", "value_mask"])
def test_a_mask_that_is_not_of_the_padding_is_refused(name):
    ids = built.ids_of()
    hidden, real = keras_tx.layers.TokenEmbedding(V, 8)(ids), ids != 3
    if name == "mask":
        hidden = keras_tx.layers.Decoder(1, 16, 2)(hidden, mask=real)
    else:
        hidden = keras_tx.layers.MultiHeadAttention(2, 4)(hidden, hidden, value_mask=real, use_causal_mask=True)
    model = keras.Model(ids, keras.layers.Dense(V)(hidden))
    with pytest.raises(ValueError, match=f"The `{name}` of layer .* Received: a mask of the id 3, padding_id=0"):
        generate(model, PROMPTS, **FAST)


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
