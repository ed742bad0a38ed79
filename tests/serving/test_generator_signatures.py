"""Generative models as graphs: texts, ids and scores of `generate`, whatever the batch; what is refused, and how."""

import re

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam, Greedy, Sample, Speculative, generate
from keras_tx.generation.speculative import without_drafts
from keras_tx.internals.tensorflow_graphs import shared_shapes
from keras_tx.layers import DecoderLayer, TokenEmbedding
from keras_tx.layers import exported_weights as exported_weights_module
from keras_tx.layers.exported_weights import exported_weights
from keras_tx.models import CausalLM, Seq2Seq
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.text import BertTokenizer
from tests.serving.conftest import VOCABULARY
from tests.serving.generative import FEW_RULES, MODELS, NEW, RULES, SIZES, STOP, TEXTS, V
from tests.tools import assert_close, randomize, to_numpy

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

STRATEGIES = {
    "language_model": Speculative(num_draft_tokens=2),
    "translator": Beam(3, length_penalty=0.7),
    "put_together": Sample(1.3, top_p=0.9, seed=-5),
}


class Traced:
    """Signatures, each traced once, when it is asked for, as `export` traces them."""

    def __init__(self, *arguments):
        self.functions, self._traced = generator_signatures(*arguments), {}

    def __getitem__(self, name):
        if name not in self._traced:
            with shared_shapes():
                self._traced[name] = self.functions[name].get_concrete_function()
        return self._traced[name]


@pytest.fixture(scope="module")
def models(generative_models):
    return generative_models


@pytest.fixture(scope="module")
def signatures(models, tokenizer):
    """The signatures of each model."""
    options = {name: {"strategy": strategy, **rules_of(models[name])} for name, strategy in STRATEGIES.items()}
    return {name: Traced(model, tokenizer, None, options[name]) for name, model in models.items()}


def strings(tensor):
    return np.vectorize(lambda text: text.decode(), otypes=[object])(tensor.numpy()).tolist()


def rules_of(model):
    """All rules for the language model, whose signatures try every kind of strategy; few for the others."""
    return RULES if isinstance(model, CausalLM) else FEW_RULES


def live(model, texts, tokenizer, strategy=None, **options):
    options = {**rules_of(model), **options}
    return generate(model, texts, strategy, tokenizer=tokenizer, jit_compile=False, **options)


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_generate_alone_and_in_any_batch(name, models, signatures, tokenizer):
    answer, strategy = signatures[name]["serving_default"], without_drafts(STRATEGIES[name])
    texts = strings(answer(tf.constant(TEXTS))["text"])
    if isinstance(strategy, Sample):  # each row draws what it draws alone
        assert texts[3] == live(models[name], TEXTS[3], tokenizer, strategy)
    else:
        assert texts == live(models[name], TEXTS, tokenizer, strategy)
    assert [strings(answer(tf.constant([text]))["text"])[0] for text in TEXTS] == texts
    assert strings(answer(tf.constant(TEXTS[::-1]))["text"]) == texts[::-1]
    assert answer(tf.constant([], tf.string))["text"].shape == (0,)


def test_the_signatures_hold_nothing_that_a_server_cannot_run(signatures):
    expected = {"serving_default", "generate", "beam", "score", "tokens"}
    assert set(signatures["put_together"].functions) == expected
    assert set(signatures["language_model"].functions) == expected | {"explain", "embed"}
    signatures = signatures["translator"]
    assert set(signatures.functions) == expected | {"explain", "embed"}
    for traced in map(signatures.__getitem__, signatures.functions):
        assert all(spec.shape[0] is None for spec in traced.structured_input_signature[0])
        assert all(output.shape[0] is None for output in traced.structured_outputs.values())
        definition = traced.graph.as_graph_def()
        nodes = [*definition.node, *(node for one in definition.library.function for node in one.node_def)]
        assert not [node.op for node in nodes if re.search("Xla|PyFunc|Detokenize|Trim", node.op)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_product_with_weights_in_an_export_has_a_bias(precision):
    """oneDNN keeps the layout of a kernel only for a product that is fused with its bias."""
    options = {"normalization": "rms_norm", "use_bias": False}
    model = CausalLM(V, num_layers=2, hidden_dim=12, num_heads=3, decoder_options=options)
    with exported_weights(precision, constants=False):
        definition = Traced(model, None, None, {"max_new_tokens": NEW})["tokens"].graph.as_graph_def()
    products = 0
    for nodes in (definition.node, *(one.node_def for one in definition.library.function)):
        found = {node.name for node in nodes if node.op == "MatMul"}
        # For few rows it is a sum, which TensorFlow fuses like `BiasAdd`, but by oneDNN alone.
        assert found <= {node.input[0].split(":")[0] for node in nodes if node.op in ("BiasAdd", "AddV2")}
        products += len(found)
    # Prefill and decode steps, each of two layers and the logits. In float32, products of a single token have one form
    # for few rows and one for many; in bfloat16, that of query, key and value is one.
    assert products == {"float32": (2 * 6 + 1) * 3 + 1, "bfloat16": (2 * 4 + 1) * 2}[precision]


def test_all_layers_of_a_decode_step_have_the_same_mask():
    """The first layer has one of its own, since it also knows which queries are real."""

    def masks(num_layers):
        model = CausalLM(V, num_layers=num_layers, hidden_dim=6, num_heads=2)
        definition = Traced(model, None, None, {"max_new_tokens": NEW})["tokens"].graph.as_graph_def()
        (body,) = (one for one in definition.library.function if "while_body" in one.signature.name)
        nodes = [node for node in body.node_def if "decoder" in node.name]
        updates = sum(node.op == "TensorStridedSliceUpdate" for node in nodes)
        assert updates == 2 * num_layers
        return sum(node.op in ("LessEqual", "LogicalAnd", "Range", "Any") for node in nodes)

    assert 0 < masks(2) == masks(4)


def test_each_row_has_its_own_numbers(models, signatures, tokenizer):
    model, answer, texts = models["language_model"], signatures["language_model"]["generate"], TEXTS[:3]
    rows = [
        {"max_new_tokens": 7, "temperature": 0.0, "top_k": 5, "top_p": 0.3, "seed": 1},
        {"max_new_tokens": 3, "temperature": 1.2, "top_k": 6, "top_p": 0.9, "seed": 2**40 + 3},
        {"max_new_tokens": 7, "temperature": 1.2, "top_k": 6, "top_p": 0.9, "seed": -9},
    ]
    numbers = {key: [row[key] for row in rows] for key in rows[0]}
    got = answer(tf.constant(texts), **{key: tf.constant(values, _dtype(key)) for key, values in numbers.items()})
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        strategy = Greedy()
        if row["temperature"]:
            strategy = Sample(row["temperature"], top_k=row["top_k"], top_p=row["top_p"], seed=row["seed"])
        options = {"max_new_tokens": row["max_new_tokens"], "return_scores": True}
        expected, score = live(model, text, tokenizer, strategy, **options)
        assert strings(got["text"])[index] == expected
        assert_close(got["score"][index], score, atol=1e-4)
        alone = answer(tf.constant([text]), **{key: tf.constant([row[key]], _dtype(key)) for key in row})
        assert strings(alone["text"]) == [expected]
        assert alone["num_tokens"].numpy() == got["num_tokens"].numpy()[index] <= row["max_new_tokens"]


def test_a_row_that_has_ended_stays_within_the_learned_positions(tokenizer):
    """It waits for the longer one, which generates more tokens than there are positions for it."""
    embedding = {"position_encoding": "learned", "max_length": 9}
    model = randomize(CausalLM(V, num_layers=1, **SIZES, embedding_options=embedding), seed=3)
    options = {"max_new_tokens": NEW, "min_new_tokens": 3}
    answer = generator_signatures(model, tokenizer, None, options)["generate"]
    texts, limits = ["the cat sat on", "the"], [3, NEW]
    row = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}

    def answers(places):
        numbers = {key: tf.constant([value] * len(places), _dtype(key)) for key, value in row.items()}
        limit = tf.constant([limits[place] for place in places])
        return strings(answer(tf.constant([texts[place] for place in places]), max_new_tokens=limit, **numbers)["text"])

    assert answers([0, 1]) == answers([0]) + answers([1])


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_with_a_seed_a_shorter_text_is_the_beginning_of_a_longer_one(signatures, temperature):
    lengths = list(range(FEW_RULES["min_new_tokens"], NEW + 1))
    row = {"temperature": temperature, "top_k": 6, "top_p": 0.9, "seed": 4}
    numbers = {key: tf.constant([value] * len(lengths), _dtype(key)) for key, value in row.items()}
    answer = signatures["translator"]["generate"](
        tf.constant(TEXTS[:1] * len(lengths)), max_new_tokens=tf.constant(lengths), **numbers
    )
    texts = strings(answer["text"])
    assert len(set(texts)) > 2
    assert all(longer.startswith(shorter) for shorter, longer in zip(texts, texts[1:], strict=False))


def _dtype(name):
    return {"max_new_tokens": "int32", "top_k": "int32", "seed": "int64"}.get(name, "float32")


def test_samples_come_as_often_as_the_model_says():
    model = randomize(CausalLM(11, num_layers=1, **SIZES), seed=2, scale=0.5)
    options = {"max_new_tokens": 1, "stop_tokens": (), "forbidden_tokens": [0]}
    count, k, temperature = 3000, 6, 1.7
    prompt = np.tile(np.array([[4, 7, 2]], "int32"), (count, 1))
    options["strategy"] = Sample(temperature, top_k=k)
    answer = Traced(model, None, None, options)["tokens"]
    drawn = answer(token_ids=tf.constant(prompt), lengths=tf.fill([count], 3))["token_ids"].numpy()[:, 0]
    logits = to_numpy(model(prompt[:1], training=False))[0, -1].astype("float64")
    logits[0] = -np.inf
    logits[logits < np.sort(logits)[-k]] = -np.inf
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = np.bincount(drawn, minlength=11) / count
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)
    again = answer(token_ids=tf.constant(prompt), lengths=tf.fill([count], 3))["token_ids"].numpy()[:, 0]
    assert (again != drawn).any()  # without a seed


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("translator", Beam(3, length_penalty=0.7, num_return_sequences=3)),
        ("language_model", Beam(4, num_return_sequences=4)),  # whose strategy has no beams
    ],
)
def test_beam_gives_the_best_results_with_their_scores(name, strategy, models, signatures, tokenizer):
    texts, scores = live(models[name], TEXTS, tokenizer, strategy, return_scores=True)
    got = signatures[name]["beam"](tf.constant(TEXTS))
    assert strings(got["text"]) == texts
    assert_close(got["scores"], scores, atol=1e-4)


@pytest.mark.parametrize("name", ["language_model", "translator"])
def test_ids_in_give_ids_out(name, models, signatures):
    rows = [[7, 9, 21, 5], [30], [12, 40, 8]]
    padded = np.array([row + [99] * (4 - len(row)) for row in rows]) % V  # what a server pads with is not padding
    answer = signatures[name]["tokens"]
    got = answer(token_ids=tf.constant(padded, tf.int32), lengths=tf.constant([4, 1, 3]))
    start = {} if name == "language_model" else {"start_token": 2}
    options = {**start, "stop_tokens": STOP, "jit_compile": False, **rules_of(models[name])}
    expected = generate(models[name], rows, without_drafts(STRATEGIES[name]), **options)
    if name == "language_model":
        expected = [row[len(prompt) :] for row, prompt in zip(expected, rows, strict=True)]
    assert got["lengths"].numpy().tolist() == list(map(len, expected))
    for ids, row in zip(got["token_ids"].numpy().tolist(), expected, strict=True):
        assert ids == row + [0] * (NEW - len(row))


def test_without_a_tokenizer_there_are_ids_alone(models):
    signatures = generator_signatures(models["translator"], generation={"max_new_tokens": 3, "start_token": 2})
    assert set(signatures) == {"serving_default", "tokens"} and signatures["serving_default"] is signatures["tokens"]


@pytest.mark.parametrize("name", ["language_model", "translator"])
def test_the_score_of_a_target_is_the_sum_of_its_log_probabilities(name, models, signatures, tokenizer):
    targets = ["dull cat .", "one", "", "two three wonderful"]
    got = signatures[name]["score"](tf.constant(TEXTS), tf.constant(targets))
    for index, (text, target) in enumerate(zip(TEXTS, targets, strict=True)):
        ids = [*tokenizer.tokenize(target).numpy(), STOP]
        before = [2] if name != "language_model" else [2, *_without_padding(tokenizer.tokenize(text))]
        inputs = np.array([before + ids[:-1]], "int32")
        if name != "language_model":
            inputs = [np.array([_without_padding(tokenizer(text)["token_ids"])], "int32"), inputs]
        logits = to_numpy(models[name](inputs, training=False))[0, len(before) - 1 :].astype("float64")
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = log_probs[np.arange(len(ids)), ids]
        assert_close(got["token_log_probabilities"][index, : len(ids)], expected, atol=1e-4)
        assert_close(got["log_probability"][index], expected.sum(), atol=1e-4)
        assert strings(got["tokens"])[index][: len(ids)] == [VOCABULARY[token] for token in ids]
        assert got["num_tokens"][index] == len(ids) and not np.any(got["token_log_probabilities"][index, len(ids) :])


def _without_padding(ids):
    return [int(token) for token in to_numpy(ids) if token != 0]


def test_explain_shows_what_the_model_looks_at(models, signatures, tokenizer):
    answer = signatures["translator"]["explain"]
    got = answer(tf.constant(TEXTS))
    assert strings(got["text"]) == live(models["translator"], TEXTS, tokenizer)
    source = _without_padding(tokenizer(TEXTS[0])["token_ids"])
    assert strings(got["source_tokens"])[0][: len(source)] == [VOCABULARY[token] for token in source]
    tokens = strings(got["tokens"])[0]
    target = [VOCABULARY.index(token) for token in tokens if token != "[PAD]"]
    assert target[0] == 2 and tokenizer.decode([target])[0] == strings(got["text"])[0]
    scores = models["translator"].attention_scores([np.array([source]), np.array([target])])
    for name, one in scores.items():
        shape = one.shape
        assert_close(got[f"{name}_scores"][:1, :, :, : shape[3], : shape[4]], one, atol=1e-5)

    got = signatures["language_model"]["explain"](tf.constant(TEXTS))
    tokens = strings(got["tokens"])[1]
    ids = [VOCABULARY.index(token) for token in tokens if token != "[PAD]"]
    alone = models["language_model"].attention_scores(np.array([ids]))
    assert_close(got["scores"][1:2, :, :, : len(ids), : len(ids)], alone, atol=1e-5)
    assert strings(got["text"])[1] == tokenizer.decode([ids])[0]


@pytest.fixture
def rows_of_products(monkeypatch):
    """For each product of a graph that is traced from now on, the set of the numbers of its rows."""
    seen, few = [], "_float32_product_of_few"

    def noting(product):
        def noted(rows, kernel, bias):
            counts = set()
            seen.append(counts)

            def note(count):
                counts.add(int(count))
                return np.int32(0)

            with tf.control_dependencies([tf.numpy_function(note, [tf.shape(rows)[0]], tf.int32)]):
                return product(tf.identity(rows), kernel, bias)

        return noted

    products = exported_weights_module._PRODUCTS
    monkeypatch.setitem(products, "float32", noting(products["float32"]))
    monkeypatch.setattr(exported_weights_module, few, noting(getattr(exported_weights_module, few)))
    return seen


@pytest.mark.parametrize("kind", [CausalLM, Seq2Seq])
def test_no_product_of_decoding_has_both_few_and_many_rows(kind, rows_of_products):
    """In float32, oneDNN would lay out the kernel anew in each call of the other kind."""
    model = kind(V, num_layers=1, hidden_dim=12, num_heads=3)
    options = {"max_new_tokens": 3, **({"start_token": 2, "stop_tokens": 3} if kind is Seq2Seq else {})}
    with exported_weights(constants=False):
        answer = Traced(model, None, None, options)["tokens"]
    for num_rows, length in ((1, 2), (3, 3), (5, 1), (13, 7)):
        ids = tf.ones([num_rows, length], tf.int32)
        answer(token_ids=4 * ids, lengths=tf.fill([num_rows], length))
    run = [counts for counts in rows_of_products if counts]
    assert {1, 3} in run and any(max(counts) >= 13 * 7 for counts in run)
    assert all(max(counts) <= 4 or min(counts) >= 8 for counts in run), run


@pytest.mark.parametrize("name", ["language_model", "translator"])
def test_one_short_text_alone_has_enough_rows_and_is_answered_as_without(
    name, models, signatures, tokenizer, rows_of_products
):
    """An export pads a prompt and a source of few tokens, which no answer shows. Decode steps have one row."""
    with exported_weights(constants=False):
        traced = Traced(models[name], tokenizer, None, {"max_new_tokens": 2, **rules_of(models[name])})
        functions = {signature: traced[signature] for signature in ("embed", "score", "explain")}
    for signature, function in functions.items():
        texts = [tf.constant(TEXTS[1:2])] * (2 if signature == "score" else 1)
        function(*texts)
        run = [counts for counts in rows_of_products if counts]
        assert run and all(
            counts == {1} if signature == "explain" and max(counts) < 8 else min(counts) >= 8 for counts in run
        )
        for counts in rows_of_products:
            counts.clear()
    options = {"strategy": STRATEGIES[name], **rules_of(models[name]), "max_new_tokens": 3}
    plain = Traced(models[name], tokenizer, None, options)
    with exported_weights(constants=False):
        functions["explain"] = Traced(models[name], tokenizer, None, options)["explain"]
    for signature, function in functions.items():
        texts = [tf.constant(TEXTS[:1]), *([tf.constant(["dull cat ."])] if signature == "score" else [])]
        expected = (plain if signature == "explain" else signatures[name])[signature](*texts)
        got = function(*texts)
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert got[key].shape == value.shape, key
            assert "tokens" not in key or len(value.shape) < 2 or value.shape[1] < 8  # fewer than an export computes
            if value.dtype == tf.string:
                assert strings(got[key]) == strings(value)
            else:
                assert_close(got[key], value, atol=1e-5)


def test_embeddings_are_means_over_real_tokens(models, signatures, tokenizer):
    got = signatures["translator"]["embed"](tf.constant(TEXTS))["embedding"]
    model = models["translator"]
    source = np.array([_without_padding(tokenizer(TEXTS[2])["token_ids"])])
    assert_close(got[2], to_numpy(model.encoder(model.embedding(source)))[0].mean(0), atol=1e-5)
    got = signatures["language_model"]["embed"](tf.constant(TEXTS))["embedding"]
    model = models["language_model"]
    ids = np.array([[2, *_without_padding(tokenizer.tokenize(TEXTS[0]))]])
    assert_close(got[0], to_numpy(model.decoder(model.embedding(ids)))[0].mean(0), atol=1e-5)
    assert_close(got[1], to_numpy(model.decoder(model.embedding(np.array([[2]]))))[0, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("language_model", ("generate", "explain")),
        ("translator", ("beam", "score", "tokens", "embed")),
    ],
)
def test_empty_batches_have_empty_answers(name, asked, signatures):
    for signature in asked:
        function = signatures[name][signature]
        specs = function.structured_input_signature[0]
        empty = [tf.zeros([0] * len(spec.shape), spec.dtype) for spec in specs]
        for key, value in function(*empty).items():
            assert value.shape[0] == 0, (signature, key)


def test_a_server_refuses_with_a_message_that_names_the_input(signatures):
    answer = signatures["translator"]["tokens"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"token_ids must be in \[0, {V}\)"):
        answer(token_ids=tf.constant([[V, 3]]), lengths=tf.constant([2]))


def test_a_model_with_several_sources_has_inputs_by_their_names(tokenizer):
    ids = {name: keras.Input((None,), dtype="int32", name=name) for name in ("question", "context", "reply")}
    embedding = TokenEmbedding(V, 12, position_encoding="sinusoidal")
    question, context, reply = (embedding(one) for one in ids.values())
    for memory in (question, context):
        reply = DecoderLayer(17, 6, cross_attention=True)(reply, memory)
    model = randomize(keras.Model(list(ids.values()), keras.layers.Dense(V)(reply)), scale=0.6)
    options = {"max_new_tokens": 4, "forbidden_tokens": [0]}
    signatures = Traced(model, tokenizer, None, options)
    questions, contexts = TEXTS[:2], TEXTS[2:]
    got = signatures["serving_default"](question=tf.constant(questions), context=tf.constant(contexts))
    inputs = {"question": questions, "context": contexts}
    assert strings(got["text"]) == generate(model, inputs, tokenizer=tokenizer, jit_compile=False, **options)
    names = [spec.name for spec in signatures.functions["tokens"].input_signature]
    assert names == ["question", "question_lengths", "context", "context_lengths"]


def test_logits_that_are_no_numbers_are_refused():
    model = CausalLM(11, num_layers=1, **SIZES)
    model.set_weights([weight * np.nan for weight in model.get_weights()])
    answer = Traced(model, None, None, {"max_new_tokens": 2})["tokens"]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="The logits of `model` must not be NaN",
    ):
        answer(token_ids=tf.constant([[3]]), lengths=tf.constant([1]))


def test_arguments_that_do_not_fit_are_refused(models, tokenizer):
    model = models["language_model"]
    with pytest.raises(ValueError, match=r"`generation` must have keys among .* Received: \['jit_compile', 'no'\]"):
        generator_signatures(model, tokenizer, None, {"no": 1, "jit_compile": True})
    larger = BertTokenizer([*VOCABULARY, "more"])
    with pytest.raises(
        ValueError,
        match=f"`tokenizer` must not .*vocabulary_size={V + 1}, vocabulary_size={V} of the input 'token_ids'",
    ):
        generator_signatures(model, larger)
    with pytest.raises(
        ValueError, match=f"`source_tokenizer` must not .*_size={V + 1}, vocabulary_size={V} of the input 'source_ids'"
    ):
        generator_signatures(models["translator"], tokenizer, larger)
    two = Seq2Seq(V + 1, V, num_layers=1, **SIZES)
    with pytest.raises(ValueError, match="`source_tokenizer` must be given for texts .* source_tokenizer=None"):
        generator_signatures(two, tokenizer)
    turned = BertTokenizer([VOCABULARY[1], VOCABULARY[0], *VOCABULARY[2:]])
    with pytest.raises(ValueError, match="`source_tokenizer` must pad .* source_tokenizer.pad_id=1, padding_id=0"):
        generator_signatures(models["translator"], tokenizer, turned)
    with pytest.raises(ValueError, match="`start_token` must be given.* Received: start_token=None"):
        generator_signatures(models["translator"])
    without = Seq2Seq(V, num_layers=1, **SIZES, embedding_options={"padding_id": None})
    with pytest.raises(ValueError, match=r"`model` must have a padding id .* padding_id=None for \['source_ids'\]"):
        generator_signatures(without, tokenizer)
    source, kinds, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "kinds", "target"))
    memory = TokenEmbedding(V, 6)(source) + TokenEmbedding(3, 6)(kinds)
    x = DecoderLayer(7, 2, cross_attention=True)(TokenEmbedding(V, 6)(target), memory)
    added = keras.Model([source, kinds, target], keras.layers.Dense(V)(x))
    with pytest.raises(ValueError, match=r"must not add the embeddings of several .* of \['source', 'kinds'\]"):
        generator_signatures(added, None, None, {"start_token": 1})
    endless = BertTokenizer(VOCABULARY)
    endless.max_length = None
    with pytest.raises(ValueError, match="`tokenizer` must have a `max_length`.* tokenizer.max_length=None"):
        generator_signatures(model, endless)
    with pytest.raises(ValueError, match="`max_new_tokens` must be a positive integer. Received: max_new_tokens=0"):
        generator_signatures(model, tokenizer, None, {"max_new_tokens": 0})


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_becomes_float32(tokenizer, policy):
    model = randomize(CausalLM(V, num_layers=1, **SIZES, dtype=policy), scale=0.6)
    signatures = Traced(model, tokenizer, None, {"max_new_tokens": 5})
    if policy == "mixed_float16":  # that with the smaller range
        answer = signatures["serving_default"](tf.constant(TEXTS))["text"]
        assert strings(answer) == generate(model, TEXTS, tokenizer=tokenizer, max_new_tokens=5, jit_compile=False)
    given = {"embed": {"text": tf.constant(TEXTS[:1])}}  # outside of a graph, where nothing is traced
    given["score"] = {**given["embed"], "target": tf.constant(["cat"])}
    for name, inputs in given.items():
        outputs = signatures.functions[name].python_function(**inputs)
        assert all(output.dtype in (tf.float32, tf.string, tf.int32) for output in outputs.values())
