"""An exported classifier answers as the Keras model does."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import layers_within
from keras_tx.layers.exported_weights import MOST_ARRANGED_ROWS, exported_weights
from keras_tx.layers.projection import HeadProjection, Projection
from keras_tx.serving import check, export
from keras_tx.serving.exporters import exporter_for
from keras_tx.serving.parity import FILE as PARITY_FILE
from keras_tx.serving.warmup import serialized
from keras_tx.text import BertTokenizer
from tests.serving.conftest import only_signatures
from tests.serving.test_warmup import requests
from tests.serving.user_models import bag
from tests.tools import assert_close, has_int8_products, randomize, skip_without_int8_products, to_numpy

pytestmark = pytest.mark.tensorflow
PROJECTIONS = (HeadProjection, Projection)
export_module = sys.modules["keras_tx.serving.export"]  # the package has the function under this name
LABELS = ["bad", "so-so", "good"]

TEXTS = [
    "",
    "the cat sat",
    "Not wonderful but dull, cafés 🎬 電影",
    b"\xff\xfe cat \x80",
    "the [SEP] cat [PAD] sat [MASK]",
    "one two three " * 40,  # longer than the tokenizer lets through
]


def run(signature, **inputs):
    """A signature's answers as NumPy arrays."""
    return {
        name: to_numpy(x)
        for name, x in signature(**{k: keras.ops.convert_to_tensor(v) for k, v in inputs.items()}).items()
    }


def strings(values):
    return [value.decode() for value in np.ravel(values)]


def load(path):
    import tensorflow as tf

    return tf.saved_model.load(str(path)).signatures


def assert_answers_texts(signature, model, tokenizer, live, labels, atol=1e-6):
    """In one batch and one by one, against Keras with each text alone."""
    import tensorflow as tf

    together = signature(text=tf.constant(TEXTS))
    for i, text in enumerate(TEXTS):
        features = tokenizer(text)
        if not model.embedding.num_segments:
            features = {"token_ids": features["token_ids"]}
        expected = live(model, **features)
        alone = signature(text=tf.constant([text]))
        for answer, row in ((together, i), (alone, 0)):
            assert_close(answer["probabilities"][row], expected, atol=atol, rtol=0)
            assert answer["label"][row].numpy().decode() == labels[int(np.argmax(expected))]


def test_the_default_signature_answers_texts_as_the_live_model_does(exported, tokenizer, live):
    assert_answers_texts(
        exported.signatures["serving_default"], exported.model, tokenizer, live, ["bad", "so-so", "good"]
    )


def test_what_stands_beyond_the_lengths_does_not_count(exported, live):
    """A server fills short rows up with their first value, so padding may be any id."""
    generator = np.random.default_rng(0)
    lengths = np.array([1, 4, 7, 2], "int32")
    real = [generator.integers(1, exported.model.vocabulary_size, n) for n in lengths]
    expected = [live(exported.model, token_ids=row) for row in real]
    for width in (7, 11):
        for fill in ("zeros", "first value", "garbage"):
            token_ids = generator.integers(0, exported.model.vocabulary_size, (4, width)).astype("int32")
            for i, row in enumerate(real):
                if fill != "garbage":
                    token_ids[i] = row[0] if fill == "first value" else 0
                token_ids[i, : len(row)] = row
            answer = run(exported.signatures["tokens"], token_ids=token_ids, lengths=lengths)
            assert_close(answer["probabilities"], expected, atol=1e-6, rtol=0)


def test_a_row_of_length_zero_and_no_columns_at_all_get_the_answer_of_padding(exported, live):
    expected = live(exported.model, token_ids=[0])
    for token_ids in (np.full((1, 3), 9, "int32"), np.zeros((1, 0), "int32")):
        answer = run(exported.signatures["tokens"], token_ids=token_ids, lengths=np.zeros(1, "int32"))
        assert_close(answer["probabilities"][0], expected)


def test_ids_and_texts_get_the_same_answer(exported, tokenizer):
    import tensorflow as tf

    token_ids = to_numpy(tokenizer(TEXTS[:4])["token_ids"])
    lengths = (token_ids != tokenizer.pad_id).sum(1).astype("int32")
    by_ids = run(exported.signatures["tokens"], token_ids=token_ids, lengths=lengths)
    by_text = exported.signatures["serving_default"](text=tf.constant(TEXTS[:4]))
    assert_close(by_ids["probabilities"], by_text["probabilities"], atol=0, rtol=0)
    assert strings(by_ids["label"]) == strings(to_numpy(by_text["label"]))


def test_explain_shows_the_tokens_and_where_each_looks(exported, tokenizer):
    import tensorflow as tf

    texts = [text for text in TEXTS if "[PAD]" not in str(text)]
    answer = {name: to_numpy(x) for name, x in exported.signatures["explain"](text=tf.constant(texts)).items()}
    token_ids = to_numpy(tokenizer(texts)["token_ids"])
    assert strings(answer["tokens"]) == [tokenizer.vocabulary[i] for i in token_ids.ravel()]
    batch, length = token_ids.shape
    scores = answer["scores"]  # (B, L, N, T, T)
    assert scores.shape == (batch, 2, 2, length, length)
    for row, count in enumerate((token_ids != 0).sum(1)):
        assert_close(scores[row, :, :, :count, :].sum(-1), np.ones((2, 2, count)))
        assert not scores[row, :, :, :, count:].any()
    assert_close(scores, exported.model.attention_scores(token_ids))
    default = exported.signatures["serving_default"](text=tf.constant(texts))
    assert_close(answer["probabilities"], default["probabilities"])


def test_examples_get_the_probabilities_of_their_texts(exported):
    import tensorflow as tf

    answer = exported.signatures["classify"](inputs=tf.constant([serialized(text) for text in TEXTS]))
    default = exported.signatures["serving_default"](text=tf.constant(TEXTS))
    assert_close(answer["scores"], default["probabilities"], atol=1e-7)
    assert answer["classes"].numpy().tolist() == [[b"bad", b"so-so", b"good"]] * len(TEXTS)


def test_embed_gives_what_the_head_gets(exported, tokenizer):
    import tensorflow as tf

    answer = to_numpy(exported.signatures["embed"](text=tf.constant(TEXTS[:3]))["embedding"]).astype("float64")
    kernel, bias = (to_numpy(weight).astype("float64") for weight in exported.model.get_layer("head").weights)
    exponentials = np.exp(answer @ kernel + bias)
    default = exported.signatures["serving_default"](text=tf.constant(TEXTS[:3]))
    assert_close(exponentials / exponentials.sum(-1, keepdims=True), default["probabilities"])
    hidden = to_numpy(
        exported.model.encoder(exported.model.embedding(to_numpy(tokenizer(TEXTS[1])["token_ids"])[None]))
    )
    assert_close(answer[1], hidden[0].mean(0))


def test_an_empty_batch_has_an_empty_answer(exported):
    import tensorflow as tf

    for name in ("serving_default", "explain", "embed", "classify"):
        inputs = {"inputs" if name == "classify" else "text": tf.constant([], tf.string)}
        answer = exported.signatures[name](**inputs)
        assert {len(x) for x in answer.values()} == {0}
    for name in ("serving_default", "explain"):
        answer = exported.signatures[name](text=tf.constant([], tf.string))
        assert answer["probabilities"].shape == (0, 3) and answer["label"].shape == (0,)
    none = {"token_ids": np.zeros((0, 4), "int32"), "lengths": np.zeros(0, "int32")}
    assert run(exported.signatures["tokens"], **none)["probabilities"].shape == (0, 3)


def test_an_export_holds_no_gradients(exported):
    """Those of functions with a gradient of their own would be saved with it."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((exported.path / "saved_model.pb").read_bytes())
    names = [one.signature.name for one in saved.meta_graphs[0].graph_def.library.function]
    assert len(names) > 5 and not [name for name in names if "grad" in name]


def test_each_weight_is_saved_once_and_the_optimizer_is_not(exported):
    import tensorflow as tf

    variables = tf.train.list_variables(str(exported.path / "variables" / "variables"))
    shapes = [tuple(shape) for name, shape in variables if not name.startswith("_CHECKPOINTABLE")]
    projections = [layer for layer in layers_within(exported.model) if isinstance(layer, PROJECTIONS)]
    constants = [weight for layer in projections for weight in layer.weights]
    others = [weight for weight in exported.model.weights if not any(weight is one for one in constants)]
    # The signatures that few use have variables, and the others constants of the graph.
    of_model, needed = (Counter(tuple(one.shape) for one in some) for some in (exported.model.weights, others))
    assert needed <= Counter(shapes) <= of_model
    size = sum(4 * np.prod(weight.shape) for weight in constants)
    card = json.loads((exported.path / "MODEL_CARD.json").read_text())
    assert card["precision"]["products"] == "float32"
    assert card["precision"]["megabytes_of_constants"] == round(size / 1e6, 3)


def test_a_loaded_model_with_segments_and_probabilities_is_exported_like_the_original(make, tokenizer, live, tmp_path):
    """It also skips padding, which a server with XLA off does by other operations."""
    options = dict(num_segments=2, position_encoding="learned", max_length=16, normalization="layer_norm")
    kwargs = dict(activation="softmax", pooling="first", embedding_options=options)
    model = make(encoder_options={"skip_padding": True}, **kwargs)
    plain = make(**kwargs)
    plain.set_weights(model.get_weights())
    model.save(tmp_path / "model.keras")
    with only_signatures("serving_default", "tokens", "explain"):
        path = export(keras.saving.load_model(tmp_path / "model.keras"), tmp_path / "reviews", tokenizer=tokenizer)
    signatures = load(path)
    assert_answers_texts(signatures["serving_default"], plain, tokenizer, live, ["0", "1", "2"])
    ids = np.array([[2, 6, 7, 3]], "int32")
    answer = run(signatures["tokens"], token_ids=ids, lengths=np.array([4], "int32"))
    assert_close(answer["probabilities"][0], plain({"token_ids": ids, "segment_ids": 0 * ids})[0])
    functions = signatures["serving_default"].graph.as_graph_def().library.function
    assert {"GatherNd", "ScatterNd"} <= {node.op for one in functions for node in one.node_def}


def test_half_precision_becomes_float32_with_a_tolerance_of_its_own(make, tokenizer, live, tmp_path):
    model = make(dtype="float16")
    path = export(model, tmp_path / "reviews", tokenizer=tokenizer)
    signatures = load(path)
    assert_answers_texts(signatures["serving_default"], model, tokenizer, live, ["0", "1", "2"], atol=8e-3)
    dtypes = {x.dtype.name for signature in signatures.values() for x in signature.structured_outputs.values()}
    assert dtypes == {"float32", "string"}
    answers = json.loads((path / PARITY_FILE).read_text())
    assert answers["tolerance"] == 8 * np.finfo("float16").eps
    card = json.loads((path / "MODEL_CARD.json").read_text())["precision"]
    assert card["products"] == "float16, float32" and card["megabytes_of_constants"] == 0


@pytest.fixture
def logged(monkeypatch):
    """The lines of TensorFlow's logger, as in a notebook, where it shows those at the level INFO too."""
    import tensorflow as tf

    lines, logger = [], tf.get_logger()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield lines
    logger.removeHandler(handler)
    assert not logger.filters


def test_two_exports_at_once_are_two_versions_and_without_a_tokenizer_ids_are_the_default(make, live, tmp_path, logged):
    models = [make(dtype="mixed_bfloat16"), randomize(make(), seed=5)]
    paths = [None, None]

    def write(i):
        paths[i] = export(models[i], tmp_path)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in paths} == {"1", "2"} and not logged
    row = np.array([[2, 6, 7, 3]], "int32")
    for model, path, atol in zip(models, paths, (0.03, 1e-6), strict=True):
        signatures = load(path)
        assert set(signatures) == {"serving_default", "tokens"}
        assert set(json.loads((path / PARITY_FILE).read_text())["signatures"]) == {"tokens"}
        card = json.loads((path / "MODEL_CARD.json").read_text())["precision"]
        assert (card["megabytes_of_constants"] == 0) is (path == paths[0])  # that of bfloat16
        answer = run(signatures["serving_default"], token_ids=row, lengths=np.array([3], "int32"))
        assert answer["probabilities"].dtype == "float32"
        assert_close(answer["probabilities"][0], live(model, token_ids=row[0, :3]), atol=atol)


@pytest.mark.parametrize(
    "token_ids, lengths, message",
    [
        ([[2, 81]], [2], r"token_ids must be in \[0, 71\).*81"),
        ([[2, -1]], [1], r"token_ids must be in \[0, 71\).*-1"),
        ([[2, 3]], [3], r"lengths must be between 0 and the width of token_ids.*3"),
        ([[2, 3]], [-1], r"lengths must be between 0 and the width of token_ids.*-1"),
        ([[2, 3], [2, 3]], [2], r"lengths must be one for each row of token_ids.*2"),
        ([[2, 3]], [2, 2], r"lengths must be one for each row of token_ids.*2 2"),
    ],
)
def test_ids_and_lengths_that_cannot_be_are_refused_by_the_graph(exported, token_ids, lengths, message):
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        exported.signatures["tokens"](token_ids=tf.constant(token_ids), lengths=tf.constant(lengths))


class Subclassed(keras.Model):
    """Keras would export it with float32 inputs of one length."""

    def call(self, token_ids):
        return keras.ops.one_hot(token_ids, 3)


def test_only_a_functional_model_can_be_exported(tmp_path):
    rule = "`model` must be a TextClassifier.* functional keras.Model, .* Received: model of type Subclassed"
    with pytest.raises(TypeError, match=rule):
        export(Subclassed(), tmp_path)
    unbuilt = keras.Sequential([keras.layers.Embedding(11, 3), keras.layers.GlobalAveragePooling1D()])
    for model in (keras.Sequential(), unbuilt):
        with pytest.raises(
            ValueError, match="`model` must be built: .*Received: model of type Sequential, which is not"
        ):
            export(model, tmp_path)


def test_a_model_whose_outputs_are_no_distribution_is_refused(make, tmp_path):
    with pytest.raises(ValueError, match="`activation` must be None, 'softmax' or, .* Received: activation=relu"):
        export(make(activation="relu"), tmp_path)


def test_a_model_without_padding_is_refused(make, tmp_path):
    with pytest.raises(ValueError, match="`model` must have a padding id.*padding_id=None"):
        export(make(embedding_options={"padding_id": None}), tmp_path)


@pytest.mark.parametrize(
    "labels", [["a", "b"], ["a", "b", "c", "d"], [0, 1, 2], ["a", "b", None], ["a", "b", "b"], "abc", 3]
)
def test_labels_must_be_a_string_for_each_class(exported, tmp_path, labels):
    with pytest.raises(ValueError, match="`labels` must be a list of 3 different strings") as error:
        export(exported.model, tmp_path, labels=labels)
    assert f"Received: labels={labels!r}" in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"vocabulary": [*"abc"]},
            "more tokens than the model. Received: tokenizer.vocabulary_size=74, vocabulary_size=71",
        ),
        ({"pad_token": "[UNK]", "unknown_token": "[PAD]"}, "for padding. Received: tokenizer.pad_id=1, padding_id=0"),
        ({"max_length": 17}, "longer than the positions .* tokenizer.max_length=17, and 16 positions"),
    ],
)
@pytest.mark.parametrize("as_layer", [False, True])
def test_a_tokenizer_that_does_not_fit_is_refused(make, tokenizer, tmp_path, options, message, as_layer):
    from keras_tx.layers import LearnedPositionalEncoding

    layer = {"position_encoding": LearnedPositionalEncoding(16)}
    model = make(embedding_options=layer if as_layer else {"position_encoding": "learned", "max_length": 16})
    more = [token.upper() for token in options.get("vocabulary", [])]
    config = tokenizer.get_config() | options | {"vocabulary": tokenizer.vocabulary + more}
    with pytest.raises(ValueError, match="`tokenizer` must .*" + message):
        export(model, tmp_path, tokenizer=BertTokenizer(**config))
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_kind_is_refused(exported, tmp_path):
    with pytest.raises(TypeError, match="such as BertTokenizer. Received: tokenizer of type function"):
        export(exported.model, tmp_path, tokenizer=lambda texts: texts)


@pytest.mark.parametrize("limit", [0, 3000])
def test_a_full_disk_raises_os_error_and_leaves_nothing(make, tmp_path, limit):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # bytes of a file, as if no more fitted on the disk
    try:
        with pytest.raises(
            OSError, match="`path` must be a folder that can be written. Received: path='.*/reviews'.*large"
        ):
            export(make(), tmp_path / "reviews")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any((tmp_path / "reviews").iterdir())


@pytest.mark.parametrize(("precision", "constants"), [("bfloat16", False), ("int8", None)])
def test_a_lower_precision_of_products_answers_nearly_the_same_from_smaller_files(
    make, tokenizer, live, tmp_path, precision, constants
):
    skip_without_int8_products(precision)
    model = make(hidden_dim=64, intermediate_dim=128)
    options = {"tokenizer": tokenizer, "labels": LABELS}
    # Of what shares no constants, two parts of the model are enough: one for classes, and one for vectors.
    with only_signatures("serving_default", "embed") if constants is False else contextlib.nullcontext():
        path = export(model, tmp_path / "reviews", **options, precision=precision, constant_weights=constants)
    signature = load(path)["serving_default"]
    assert_answers_texts(signature, model, tokenizer, live, LABELS, atol=0.05)
    exact = np.array([live(model, token_ids=tokenizer(text)["token_ids"]) for text in TEXTS])
    import tensorflow as tf

    difference = np.abs(signature(text=tf.constant(TEXTS))["probabilities"] - exact).max()
    assert 1e-6 < difference < 0.05
    card = json.loads((path / "MODEL_CARD.json").read_text())["precision"]
    elements = sum(np.prod(one.kernel.shape) for one in layers_within(model) if isinstance(one, PROJECTIONS))
    size = {"bfloat16": 2, "int8": 1}[precision]
    assert card["products"] == precision
    file = "saved_model.pb" if constants is None else "variables/variables.data-00000-of-00001"
    if constants is None:
        assert size * elements < 1e6 * card["megabytes_of_constants"] < 1.4 * size * elements
    else:
        assert card["megabytes_of_constants"] == 0
    assert (path / file).stat().st_size > size * elements
    if constants is False:  # the float32 weights of projections are in no file
        others = 4 * (sum(np.prod(one.shape) for one in model.weights) - elements)
        assert (path / file).stat().st_size < 1.4 * size * elements + others
    total = sum(one.stat().st_size for one in path.rglob("*") if one.is_file() and one.name != "MODEL_CARD.json")
    assert abs(card["megabytes_on_disk"] - total / 1e6) < 0.01
    report = check(path)
    assert report.ok, str(report)


def test_weights_that_fit_into_no_graph_stay_variables_or_are_refused(make, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "LARGEST", 500)
    monkeypatch.setattr(export_module, "MOST_BY_ITSELF", 500)
    model, options = make(), {"tokenizer": tokenizer}
    for precision in ("float32", "bfloat16", *(["int8"] if has_int8_products() else [])):
        message = f"put[s] the weights into the graph, .*constant_weights=True, precision='{precision}' for a model of"
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "reviews", **options, constant_weights=True, precision=precision)
    assert not (tmp_path / "reviews").exists() or not list((tmp_path / "reviews").iterdir())
    with only_signatures("serving_default"):  # the others share its constants, or have none
        path = export(model, tmp_path / "reviews", **options, precision="bfloat16")
    card = json.loads((path / "MODEL_CARD.json").read_text())["precision"]
    assert card["products"] == "bfloat16" and card["megabytes_of_constants"] == 0


@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"constant_weights": True}])
@pytest.mark.parametrize("kind", ["of_keras", "quantized"])
def test_what_no_product_of_a_model_can_have_is_refused(make, tmp_path, kind, options):
    """Of the layers of Keras, and of quantized ones, products stay as they are."""
    model = bag() if kind == "of_keras" else make()
    if kind == "quantized":
        model.quantize("int8")
    name, value = next(iter(options.items()))
    with pytest.raises(
        ValueError, match=f"matrix products of layers of keras_tx.* Received: .*{name}={value!r}.* without"
    ):
        export(model, tmp_path / "reviews", **options)
    assert not (tmp_path / "reviews").exists()


def test_weights_are_variables_if_asked_for(make, tokenizer, live, tmp_path, monkeypatch):
    model, options = make(), {"tokenizer": tokenizer, "labels": LABELS, "warmup": ["the cat"]}
    (tmp_path / "reviews").mkdir()
    monkeypatch.chdir(tmp_path / "reviews")
    with only_signatures("serving_default"):  # the others share its constants, or have none
        path = export(model, ".", **options, constant_weights=False)
    card = json.loads((path / "MODEL_CARD.json").read_text())
    assert card["precision"]["megabytes_of_constants"] == 0
    # The folder's name, also if the path does not have it.
    assert card["name"] == "reviews" and {name for name, _, _ in requests(path)} == {"reviews"}
    assert_answers_texts(load(path)["serving_default"], model, tokenizer, live, LABELS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "mixed_bfloat16"])
def test_products_of_a_model_in_another_dtype_keep_it(make, tokenizer, tmp_path, dtype):
    model = make(dtype=dtype)
    for given in ({"precision": "int8"}, {"constant_weights": True}):
        with pytest.raises(ValueError, match="need a model that computes in float32. Received: constant_weights="):
            export(model, tmp_path / "reviews", tokenizer=tokenizer, **given)
    if dtype == "mixed_bfloat16":  # which is exported above
        return
    with only_signatures("serving_default"):  # the others share its constants, or have none
        path = export(model, tmp_path / "reviews", tokenizer=tokenizer)
    assert json.loads((path / "MODEL_CARD.json").read_text())["precision"]["megabytes_of_constants"] == 0


def test_an_unknown_precision_is_refused(make, tmp_path):
    with pytest.raises(ValueError, match="`precision` must be one of.*Received: precision='float16'"):
        export(make(), tmp_path / "reviews", precision="float16")
    assert not list(tmp_path.iterdir())


def operations(function):
    """The operations of a concrete function and of all functions that it calls, as often as it calls them."""
    library = {one.signature.name: one for one in function.graph.as_graph_def().library.function}

    def within(nodes):
        for node in nodes:
            yield node.op
            for value in node.attr.values():
                if value.func.name:
                    yield from within(library[value.func.name].node_def)

    return Counter(within(function.graph.as_graph_def().node))


def test_another_layer_brings_one_condition_and_few_operations(make, tokenizer):
    """A text of some words costs mostly the products; TensorFlow starts each operation by itself.

    All counts are twice those of a call: the graph has one part for requests of few tokens, and one for others.
    """
    counts = []
    for num_layers in (2, 3):
        model = make(num_layers=num_layers)
        signatures = exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, None, LABELS).signatures()
        with exported_weights(constants=False):
            counts.append(operations(signatures["serving_default"].get_concrete_function()))
    more = counts[1] - counts[0]
    assert more["MatMul"] == 2 * 6
    assert more["BatchMatMulV2"] == more["BatchMatMulV3"] == 2 * 2  # attention of many and of few tokens
    assert more["StatelessIf"] == 2 * 1
    for free in ("Const", "Placeholder", "ReadVariableOp", "Identity", "NoOp"):
        del more[free]
    assert more.total() < 2 * 110  # those of both branches, of which one runs
    assert not {"If", "ScatterNd", "GatherNd", "Transpose"} & {*more}


def test_the_parts_for_few_and_for_many_tokens_answer_alike(make, tokenizer):
    """Requests of 63 and 65 tokens in all, where the graph has weights as variables, against Keras."""
    model = make(num_layers=2)
    settings = {"tokenizer": tokenizer, "source_tokenizer": None}
    with exported_weights(constants=False):
        signatures = exporter_for(model, settings, None, LABELS).signatures()
        functions = {name: signatures[name].get_concrete_function() for name in ("tokens", "embed")}
    tokens = functions["tokens"]
    for rows, length in ((7, 9), (5, 13), (0, 3), (3, 2)):
        ids = np.random.default_rng(rows).integers(1, tokenizer.vocabulary_size, (rows, length), "int32")
        answer = tokens(token_ids=keras.ops.convert_to_tensor(ids), lengths=keras.ops.full((rows,), length, "int32"))
        expected = keras.ops.softmax(model.predict(ids, verbose=0)) if rows else np.zeros((0, 3))
        assert_close(answer["probabilities"], expected, atol=1e-6, rtol=1e-6)
    short, long = ["the cat sat"] * 3, ["the cat sat"] * 31  # each text has five tokens
    vectors = [functions["embed"](text=keras.ops.convert_to_tensor(texts))["embedding"] for texts in (short, long)]
    assert_close(vectors[0][0], vectors[1][-1], atol=1e-6, rtol=1e-6)


def test_a_graph_without_layers_of_this_package_has_no_parts_for_few_and_many_tokens():
    signatures = exporter_for(bag(), {"tokenizer": None, "source_tokenizer": None}, None, None).signatures()
    with exported_weights(constants=False):
        found = operations(signatures["tokens"].get_concrete_function())
    assert found["MatMul"] == 1 and not found["StatelessIf"]


def test_a_signature_computes_nothing_that_it_does_not_return(make, tokenizer):
    """To remove what is left over would take most of the time of a first call."""
    model = make(num_layers=2)
    signatures = exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, None, LABELS).signatures()
    products = {name: operations(one.get_concrete_function())["MatMul"] for name, one in signatures.items()}
    projections = sum(isinstance(one, PROJECTIONS) for one in layers_within(model))
    heads = products["serving_default"] - products["embed"]
    assert heads in (1, 2) and 0 < products["embed"] <= projections
    assert products["tokens"] == products["classify"] == products["serving_default"]
    assert products["explain"] > products["serving_default"]


REORDERS = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
import tensorflow_text
signatures = tf.saved_model.load(sys.argv[1]).signatures
for name, shape in zip(sys.argv[2::2], sys.argv[3::2]):
    rows, length = map(int, shape.split("x"))
    print("call", rows, length, flush=True)
    if name == "tokens":
        answer = signatures[name](token_ids=tf.ones((rows, length), "int32"), lengths=tf.fill([rows], length))
    else:
        answer = signatures[name](text=tf.fill([rows], "[UNK] " * (length - 2)))  # two tokens are added to a text
    print("answer", *answer["probabilities"].numpy().ravel(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("are_constants", [True, False])
def test_weights_are_laid_out_in_the_first_call_only(exported, tokenizer, tmp_path, are_constants):
    """Counts oneDNN's reorders of matrices in a new process: the weights are the only matrices that are reordered.

    Of constants, with any first call; of variables, where the environment says that they do not change, also if the
    first request has more tokens than one text.
    """
    if "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("oneDNN lays weights out anew on processors with AVX-512")
    environment = {**os.environ, "ONEDNN_VERBOSE": "1", "TF_ENABLE_ONEDNN_OPTS": "1"}
    environment.pop("TF_ONEDNN_ASSUME_FROZEN_WEIGHTS", None)
    path, shapes, names = exported.path, [(1, 2), (1, 9), (3, 7)], ["tokens"]
    if not are_constants:
        environment["TF_ONEDNN_ASSUME_FROZEN_WEIGHTS"] = "1"
        path = export(exported.model, tmp_path / "reviews", tokenizer=tokenizer, constant_weights=False)
        shapes, names = [(13, 11), (1, 2), (1, 9), (17, 11), (3, 7)], ["tokens", "explain"]
    command = [sys.executable, "-c", REORDERS, str(path)]
    command += [part for name in names for rows, length in shapes for part in (name, f"{rows}x{length}")]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    calls = lines.split("call ")[1:]
    is_few = [rows * length <= MOST_ARRANGED_ROWS for _ in names for rows, length in shapes]
    reorders = [bool(re.findall(r"exec,cpu,reorder.*,\d+x\d+,", call)) for call in calls]
    products = [bool(re.findall(r"exec,cpu,inner_product", call)) for call in calls]
    # Of many rows, TensorFlow does not fuse the products with their biases, and then keeps no weights.
    assert products == is_few
    assert [one for one, few in zip(reorders, is_few, strict=True) if few] == [True, False, False] * len(names)
    for call, shape in zip(calls, shapes, strict=False):
        answer = re.search("answer (.*)", call).group(1).split()
        expected = keras.ops.softmax(exported.model(np.ones(shape, "int32")))
        assert_close(np.array(answer, "float32"), to_numpy(expected).ravel(), atol=1e-5, rtol=1e-5)
