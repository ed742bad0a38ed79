"""Arguments that do not fit each other are refused before anything is written; checkpoints are exported as they are."""

import importlib
import json

import keras
import numpy as np
import pytest

from keras_tx.generation import Greedy, Sample, Speculative, generate
from keras_tx.internals.keras_models import layers_within
from keras_tx.layers.projection import HeadProjection, Projection
from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving import check, export
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.exporters import exporter_for
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.text import BertTokenizer
from tests.serving.conftest import BEAM, VOCABULARY, only_signatures, small_generator
from tests.serving.test_warmup import requests
from tests.serving.user_models import TableTokenizer, bag
from tests.tools import assert_close, has_int8_products, randomize, to_numpy

pytestmark = pytest.mark.tensorflow

SIZE = len(VOCABULARY)


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        ({"pad_id": None}, "`tokenizer` must have a padding token. Received: tokenizer.pad_id=None"),
        ({"max_length": None}, "`tokenizer` must have a `max_length`.* Received: tokenizer.max_length=None"),
        ({"vocabulary_size": 72}, "more tokens than the model. Received: .*=72, vocabulary_size=71"),
        ({"pad_id": 3}, "the id that the model takes for padding. Received: tokenizer.pad_id=3, padding_id=0"),
    ],
)
def test_a_tokenizer_that_does_not_fit_a_users_model_is_refused(tmp_path, tokenizer, message):
    made = TableTokenizer(["a"])
    for name, value in {"vocabulary_size": 1, **tokenizer}.items():
        setattr(made, name, value)
    with pytest.raises(ValueError, match=message):
        export(bag(), tmp_path, tokenizer=made)


def test_a_tokenizer_that_does_not_run_in_a_graph_says_why(tmp_path):
    made = TableTokenizer(["a"])
    made.in_graph, made.not_in_graph = False, "a step that only Python has"
    with pytest.raises(
        TypeError, match="runs in a TensorFlow graph.*of type TableTokenizer: a step that only Python has"
    ):
        export(bag(), tmp_path, tokenizer=made)
    model = CausalLM(SIZE, num_layers=1, hidden_dim=4, num_heads=2)
    for name in ("tokenizer", "source_tokenizer"):
        with pytest.raises(TypeError, match=f"`{name}` must be one that runs in a TensorFlow graph"):
            export(model, tmp_path, **{name: made})


@pytest.fixture(scope="module")
def masked():
    return MaskedLM(SIZE, num_layers=1, hidden_dim=4, num_heads=2)


def test_a_masked_model_needs_a_mask_token_and_no_labels(masked, tmp_path):
    without = BertTokenizer([token for token in VOCABULARY if token != "[MASK]"])
    with pytest.raises(ValueError, match="must have a mask token.* Received: tokenizer.mask_id=None"):
        export(masked, tmp_path, tokenizer=without)
    with pytest.raises(
        ValueError, match="`labels` are for models over classes. Received: labels=\\['a'\\] for a model that fills"
    ):
        export(masked, tmp_path, labels=["a"])


def test_options_of_generation_are_not_for_encoder_models(masked, make, tokenizer, tmp_path):
    options = {"max_new_tokens": 3}
    for model in (masked, make()):
        message = f"`generation` is for models that generate. Received: .*3}}, model of type {type(model).__name__}"
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path, generation=options)
        with pytest.raises(ValueError, match="`source_tokenizer` is for models that generate"):
            export(model, tmp_path, source_tokenizer=tokenizer)
    generator = CausalLM(SIZE, num_layers=1, hidden_dim=4, num_heads=2)
    with pytest.raises(
        ValueError, match="`labels` are for models over classes.*labels=\\['a'\\] for a model that generates"
    ):
        export(generator, tmp_path, labels=["a"])


@pytest.mark.parametrize("max_batch", [0, -1, 2.5, True])
def test_the_largest_batch_is_a_number(masked, tmp_path, max_batch):
    with pytest.raises(ValueError, match=f"`max_batch` must be a positive integer. Received: max_batch={max_batch}"):
        export(masked, tmp_path, max_batch=max_batch)


@pytest.mark.parametrize("draft", [False, True])
def test_samples_need_a_seed_where_operations_are_deterministic(tmp_path, draft):
    import tensorflow as tf

    model, strategy = small_generator(), Speculative(Sample()) if draft else Sample()
    try:
        tf.config.experimental.enable_op_determinism()
        with pytest.raises(ValueError, match="`Sample` with a `seed`.*op_determinism.* Received: strategy=Sample"):
            export(model, tmp_path, generation={"strategy": strategy, "max_new_tokens": 3})
    finally:
        importlib.import_module("tensorflow.python.framework.config").disable_op_determinism()
    assert not list(tmp_path.iterdir())


# Models that do not answer alike


class Noise(keras.layers.Layer):
    """Dropout that is never off."""

    def call(self, x):
        return keras.random.dropout(x, 0.5)


def test_a_model_that_draws_lots_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="`model` must give the same answer every time. Received: output 'noise"):
        export(bag(layer=Noise()), tmp_path, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_model_that_answers_otherwise_as_a_graph_is_refused(tmp_path):
    import tensorflow as tf

    layer = keras.layers.Lambda(lambda x: x + float(tf.inside_function()))
    with pytest.raises(ValueError, match="must give the same answers live and as a graph.*'tokens' that differ by 1.0"):
        export(bag(layer=layer), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_answers_nan_is_refused(tokenizer, tmp_path):
    model = bag(layer=lambda x: {"root": keras.ops.sqrt(x - 100)})
    with pytest.raises(ValueError, match="must answer with numbers. Received: NaN in the output 'root'"):
        export(model, tmp_path, tokenizer=tokenizer)


def test_a_text_that_the_model_fails_on_is_named(tokenizer, tmp_path):
    import tensorflow as tf

    class Short(keras.layers.Layer):
        """Fails on the word "two"."""

        def call(self, ids):
            with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(ids == 13), ["not this one"])]):
                return tf.identity(ids)

    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Embedding(SIZE, 3, mask_zero=True)(Short()(ids)))
    with pytest.raises(ValueError, match="that `tokenizer` accepts. Received: 'one two .* fails: .*not this one"):
        export(model, tmp_path, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


# Generative models


def test_a_generative_model_is_exported_with_warmup_card_and_parity(generator, tokenizer):
    import tensorflow as tf

    path = generator.path
    served = tf.saved_model.load(str(path)).signatures
    expected = generate(generator.model, ["the cat sat"], tokenizer=tokenizer, jit_compile=False, **BEAM)[0][0]
    assert served["serving_default"](text=tf.constant(["the cat sat"]))["text"].numpy()[0].decode() == expected
    card = json.loads((path / CARD).read_text())
    assert card["generation"]["strategy"]["kind"] == "Beam" and card["generation"]["max_new_tokens"] == 3
    assert card["parity"]["serving_default"]["others_equal"] and card["parity"]["serving_default"]["examples"] == 3
    asked = [(name, inputs) for _, name, inputs in requests(path)]
    assert {name for name, _ in asked} == set(served) == {"serving_default", "generate", "tokens", "score"}
    numbers = next(inputs for name, inputs in asked if name == "generate")
    assert numbers["max_new_tokens"].tolist() == [3] and numbers["top_k"].dtype == "int32"


def test_an_exported_graph_has_each_constant_once(generator):
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((generator.path / "saved_model.pb").read_bytes())
    functions = [
        [(node.attr["value"].SerializeToString(deterministic=True), *node.input) for node in one.node_def]
        for one in saved.meta_graphs[0].graph_def.library.function
        if not one.signature.name.startswith("__inference__traced")  # those that save and restore weights
    ]
    constants = [[value for value in function if value[0]] for function in functions]
    assert all(len(values) == len(set(values)) for values in constants) and sum(map(len, constants)) > 100


@pytest.mark.parametrize(
    "options, names",
    [
        ({"start_token": False, "stop_tokens": ()}, ("serving_default", "tokens", "score")),
        ({"embedding_options": {"padding_id": 1}}, ("tokens",)),  # without a tokenizer
    ],
)
def test_requests_for_the_parity_file_are_answered_whatever_the_options(options, names, tokenizer):
    if "embedding_options" in options:
        model, tokenizer, generation = small_generator(**options), None, None
    else:
        model, generation = small_generator(), {"max_new_tokens": 3, **options}
    exporter = exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, generation, None)
    made = exporter.signatures()
    signatures = {name: made[name] for name in ("serving_default", *names)}
    rows = exporter.parity(signatures)["signatures"]
    assert set(rows) == set(signatures) and all(row["outputs"] for one in rows.values() for row in one)


@pytest.mark.parametrize(
    ("generation", "number"),
    [
        ({}, 2),
        ({"min_new_tokens": 3}, 3),
        ({"forced_tokens": {4: 7}}, 5),
        ({"forced_tokens": {0: 8, -1: 7}}, 2),
        ({"forced_tokens": {2: 7}, "max_new_tokens": 6}, 6),
    ],
)
def test_example_requests_ask_for_as_many_tokens_as_the_rules_need(generation, number, tokenizer):
    tokenizers = {"tokenizer": tokenizer, "source_tokenizer": None}
    exporter = exporter_for(small_generator(), tokenizers, generation, None)
    assert exporter.request_defaults == {"max_new_tokens": number}
    made = exporter.signatures()["generate"]
    assert made(**exporter._request(made))["text"].shape == (1,)


def test_texts_of_a_model_in_half_precision_are_not_compared(tokenizer):
    """Rounding may change a token, whatever the precision of the export."""
    options = {"tokenizer": tokenizer, "source_tokenizer": None}, {"max_new_tokens": 3}, None
    exporter = exporter_for(small_generator(dtype="mixed_bfloat16"), *options)
    made = exporter.signatures()
    rows = exporter.parity({name: made[name] for name in ("serving_default", "score")})["signatures"]
    assert [row["outputs"] for row in rows["serving_default"]] == [{}] and rows["score"][0]["outputs"]


# Checkpoints


def test_a_checkpoint_that_classifies_is_exported_with_the_labels_of_its_config(tokenizer, tmp_path):
    import tensorflow as tf

    sizes = dict(hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, vocab_size=SIZE)
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "max_position_embeddings": 16,
        "id2label": {"0": "bad", "1": "so-so", "2": "good"},
        **sizes,
    }
    model = randomize(PretrainedModel(config), seed=2)
    assert set(signatures_of(model, tokenizer)) == {"serving_default", "tokens", "classify", "embed"}
    with only_signatures("serving_default"):
        path = export(model, tmp_path, tokenizer=tokenizer)
    served = tf.saved_model.load(str(path)).signatures
    texts = ["the cat sat", "", "not wonderful but dull"]
    answer = served["serving_default"](text=tf.constant(texts))
    for row, text in enumerate(texts):
        ids = tokenizer([text])["token_ids"]
        logits = to_numpy(model({"input_ids": ids, "attention_mask": tf.ones_like(ids)})["logits"])[0]
        assert_close(answer["probabilities"][row], np.exp(logits) / np.exp(logits).sum())
        assert answer["label"][row].numpy().decode() == ["bad", "so-so", "good"][logits.argmax()]
    del config["id2label"]  # as transformers 4 writes a config of two classes
    unnamed = randomize(PretrainedModel(config), seed=2)
    answer = signatures_of(unnamed, tokenizer)["serving_default"](text=tf.constant(texts))
    assert {label.decode() for label in answer["label"].numpy()} <= {"LABEL_0", "LABEL_1"}
    assert answer["probabilities"].shape == (3, 2)
    config["id2label"] = {"0": "bad", "1": "so-so", "2": "good"}
    multiple = PretrainedModel({**config, "problem_type": "multi_label_classification"})
    multiple.set_weights(model.get_weights())
    answer = signatures_of(multiple, tokenizer)["serving_default"](text=tf.constant(texts[:1]))
    ids = tokenizer(texts[:1])["token_ids"]
    expected = 1 / (1 + np.exp(-to_numpy(multiple({"input_ids": ids})["logits"])))
    assert_close(answer["probabilities"], expected)
    names = [label if p >= 0.5 else "" for label, p in zip(["bad", "so-so", "good"], expected[0], strict=True)]
    assert [label.decode() for label in answer["labels"][0].numpy()] == names
    number = PretrainedModel({**config, "problem_type": "regression"})
    assert exporter_for(number, {"tokenizer": None, "source_tokenizer": None}, None, None).labels is None


def signatures_of(model, tokenizer=None):
    """The signatures as they would be exported, not yet traced."""
    return exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, None, None).signatures()


def test_a_checkpoint_that_fills_masks_fills_them(tokenizer, tmp_path):
    import tensorflow as tf

    sizes = dict(hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, vocab_size=SIZE)
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 16, **sizes}
    model = randomize(PretrainedModel(config), seed=2)
    ids = tokenizer(["the [MASK]"])["token_ids"]
    logits = to_numpy(model({"input_ids": ids})["logits"])[0, 2]
    answer = signatures_of(model, tokenizer)["serving_default"](text=tf.constant(["the [MASK]"]))
    best = [VOCABULARY[i] for i in np.argsort(-logits)[:5]]
    assert [word.decode() for word in answer["words"].numpy()[0, 0]] == best
    with pytest.raises(ValueError, match="Received: labels=\\['a'\\] for a model that fills masks"):
        export(model, tmp_path, labels=["a"])


def test_ids_of_a_checkpoint_without_a_tokenizer_are_tokens_up_to_their_lengths():
    import tensorflow as tf

    sizes = dict(hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, vocab_size=SIZE)
    config = {"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "pad_token_id": 1}
    config |= {**sizes, "max_position_embeddings": 16, "type_vocab_size": 1, "problem_type": "regression"}
    model = randomize(PretrainedModel(config), seed=2)
    ids = np.array([[0, 7, 8, 2], [0, 5, 9, 9]], "int32")
    tokens = signatures_of(model)["tokens"]
    answer = tokens(token_ids=tf.constant(ids), lengths=tf.constant([4, 2]))["logits"]
    for row, length, logits in zip(ids, (4, 2), answer.numpy(), strict=True):
        assert_close(logits, to_numpy(model(row[None, :length])["logits"])[0], atol=1e-5)


@pytest.mark.parametrize("kind", [TextClassifier, keras.Sequential])
def test_a_class_with_a_call_of_its_own_is_refused(kind, tokenizer):
    class Own(kind):
        def call(self, inputs, **options):
            return super().call(inputs, **options) * 2.0

    sizes = dict(num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
    layers = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(SIZE, 2), keras.layers.Flatten()]
    model = Own(SIZE, 2, **sizes) if kind is TextClassifier else Own(layers[:2])
    with pytest.raises(TypeError, match="whose class has no `call` of its own. Received: model of type Own"):
        signatures_of(model, tokenizer)


def test_rows_wider_than_the_positions_are_answered_by_their_lengths():
    import tensorflow as tf

    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    config = {"model_type": "bert", "vocab_size": 30, "max_position_embeddings": 8, **sizes}
    model = randomize(PretrainedModel(config, "sequence_classification"), seed=2)
    tokens = signatures_of(model)["tokens"]
    answer = tokens(token_ids=tf.fill([1, 11], 9), lengths=tf.constant([3]))
    logits = to_numpy(model(np.full((1, 3), 9))["logits"])
    assert_close(answer["probabilities"], np.exp(logits) / np.exp(logits).sum(), atol=1e-5)


def test_tokenizers_of_sources_need_sources(tokenizer):
    sizes = dict(num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
    for model, given in ((CausalLM(SIZE, **sizes), tokenizer), (Seq2Seq(SIZE, **sizes), None)):
        exporter = exporter_for(model, {"tokenizer": given, "source_tokenizer": tokenizer}, None, None)
        with pytest.raises(
            ValueError, match="`source_tokenizer` is only for models with sources, .* Received: source_token"
        ):
            exporter.signatures()


def test_a_text_beyond_the_learned_positions_has_no_vector(tokenizer):
    import tensorflow as tf

    options = {"position_encoding": "learned", "max_length": 8}
    model = CausalLM(SIZE, num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5, embedding_options=options)
    embed = generator_signatures(model, tokenizer, None, {"max_new_tokens": 2})["embed"]
    assert embed(text=tf.constant(["the cat sat"]))["embedding"].shape == (1, 6)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="text must fit into the 8 learned positions. Received: tok"
    ):
        embed(text=tf.constant(["the cat sat not wonderful but dull one two"]))


@pytest.mark.slow
def test_a_generative_model_in_a_lower_precision_shares_its_weights_and_scores_nearly_the_same(
    generative_models, tokenizer, tmp_path
):
    import tensorflow as tf

    model = generative_models["language_model"]
    options = {"tokenizer": tokenizer, "generation": {"max_new_tokens": 3}}
    with only_signatures("serving_default", "score"):  # one with a loop, and one without
        lower = "int8" if has_int8_products() else "bfloat16"
        version = export(model, tmp_path / "texts", precision=lower, **options)
    rows = {"text": tf.constant(["the cat", "not"]), "target": tf.constant([" sat", " dull , one two"])}
    loaded = tf.saved_model.load(str(version)).signatures
    float32 = generator_signatures(model, tokenizer, None, options["generation"])
    scores = [one["score"](**rows)["token_log_probabilities"].numpy() for one in (float32, loaded)]
    assert 1e-6 < np.abs(scores[1] - scores[0]).max() < 0.3
    assert loaded["serving_default"](text=rows["text"])["text"].shape == (2,)
    variables = tf.train.list_variables(str(version / "variables" / "variables"))
    # Each kernel is saved once for all signatures and their decode loops; biases of heads are vectors there.
    projections = [layer for layer in layers_within(model) if isinstance(layer, (HeadProjection, Projection))]
    of_heads = sum(np.prod(layer.bias.shape) for layer in projections if len(layer.bias.shape) > 1)
    size = sum(np.prod(shape) for _, shape in variables if len(shape) > 1)
    table = np.prod(model.embedding.tokens.embeddings.shape)  # ids look it up, and logits have it in bfloat16
    of_model = sum(np.prod(weight.shape) for weight in model.weights if len(weight.shape) > 1)
    assert of_heads > 0 and size == of_model - of_heads + table
    assert check(version).ok


def test_stop_tokens_outside_of_the_vocabulary_are_left_out_as_by_generate():
    sizes = {"vocab_size": 11, "n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 16}
    values = {"eos_token_id": [3, 50256]}
    model = PretrainedModel({"model_type": "gpt2", **sizes}, "causal_lm", generation_config=values)
    exporter = exporter_for(model, {"tokenizer": None, "source_tokenizer": None}, {"max_new_tokens": 3}, None)
    assert exporter._generator.config.stop_tokens == (3,)


def test_a_strategy_that_is_given_takes_the_place_of_one_that_is_not_supported():
    sizes = {"vocab_size": 11, "n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 16}
    values = {"num_return_sequences": 3}
    model = PretrainedModel({"model_type": "gpt2", **sizes}, "causal_lm", generation_config=values)
    tokenizers, options = {"tokenizer": None, "source_tokenizer": None}, {"max_new_tokens": 3}
    with pytest.raises(
        ValueError, match=r"`num_return_sequences` of the generation config must be 1; for more, pass a"
    ):
        exporter_for(model, tokenizers, options, None)
    exporter = exporter_for(model, tokenizers, options | {"strategy": Greedy()}, None)
    assert exporter._generator.config.strategy == Greedy()
    model.generation_config["max_length"] = "20"
    with pytest.raises(ValueError, match="max_length"):
        exporter_for(model, tokenizers, options, None)


def test_a_generative_model_with_constants_is_compared_with_the_live_one(tokenizer, tmp_path):
    """Its kernels have over 1,024 bytes, so that graphs in memory have no values of them."""
    sizes = {"num_layers": 1, "hidden_dim": 20, "num_heads": 2, "intermediate_dim": 34}
    model = randomize(CausalLM(tokenizer.vocabulary_size, **sizes), seed=5)
    options = {"generation": {"max_new_tokens": 3, "min_new_tokens": 1}, "tokenizer": tokenizer}
    with only_signatures("serving_default", "score"):
        version = export(model, tmp_path / "model", constant_weights=True, **options)
    card = json.loads((version / CARD).read_text())
    assert card["precision"]["megabytes_of_constants"] > 0 and check(version).ok


def test_scores_and_embeddings_are_float32_for_models_in_float64():
    tokenizer = BertTokenizer(VOCABULARY, max_length=7)
    options = {"num_layers": 1, "hidden_dim": 6, "num_heads": 3, "intermediate_dim": 7, "dtype": "float64"}
    classifier, language_model = TextClassifier(SIZE, num_classes=2, **options), CausalLM(SIZE, **options)
    texts = {"tokenizer": tokenizer, "source_tokenizer": None}
    for model, of_generation in ((classifier, None), (language_model, {"max_new_tokens": 2})):
        signatures = exporter_for(model, texts, of_generation, None).signatures()
        for name, output in (("embed", "embedding"), ("explain", "scores")):
            traced = signatures[name].get_concrete_function().structured_outputs
            assert traced[output].dtype == "float32", (type(model).__name__, name)
