"""The card and the batching file say what a version is, and how a server may batch."""

import json
from importlib import metadata

import keras
import numpy as np
import pytest
from google.protobuf import text_format

import keras_tx
from keras_tx.generation import Beam, Sample
from keras_tx.models import TextClassifier
from keras_tx.serving.card import (
    BATCHING,
    FILE,
    _compute_dtypes,
    _formatted,
    _precision_of_products,
    _to_json,
    write_entries,
)
from keras_tx.serving.parity import FILE as PARITY
from tests.serving.conftest import LABELS, VOCABULARY
from tests.serving.protos import message

pytestmark = pytest.mark.tensorflow

NOTHING = {"tokenizers": {}, "labels": None, "multi_label": False, "backend": "tensorflow"}


@pytest.fixture(scope="module")
def card(exported):
    return json.loads((exported.path / FILE).read_text(encoding="utf-8"))


def test_the_card_has_the_signatures_as_a_server_sees_them(card, exported):
    assert set(card["signatures"]) == set(exported.signatures)
    for name, function in exported.signatures.items():
        for side, specs in (
            ("inputs", function.structured_input_signature[1]),
            ("outputs", function.structured_outputs),
        ):
            expected = {key: {"dtype": spec.dtype.name, "shape": spec.shape.as_list()} for key, spec in specs.items()}
            assert card["signatures"][name][side] == expected
    assert card["signatures"]["tokens"]["inputs"]["token_ids"] == {"dtype": "int32", "shape": [None, None]}


def test_the_card_says_what_the_version_was_made_of(card, exported):
    weights = sum(int(np.prod(weight.shape)) for weight in exported.model.weights)
    assert card["name"] == "reviews" and card["labels"] == LABELS and "generation" not in card
    assert card["multi_label"] is False
    assert card["model"] == {
        "kind": "TextClassifier",
        "parameters": weights,
        "dtypes": ["float32"],
        "backend": "tensorflow",
    }
    tokenizer = card["tokenizer"]
    assert tokenizer["kind"] == "BertTokenizer" and tokenizer["vocabulary_size"] == len(VOCABULARY)
    assert tokenizer["options"]["max_length"] == 16 and "vocabulary" not in tokenizer["options"]
    assert card["versions"]["keras_tx"] == keras_tx.__version__
    assert all(card["versions"][name] == metadata.version(name) for name in ("keras", "tensorflow", "tensorflow-text"))
    assert card["warmup_requests"] == 16 and card["exported"].endswith("+00:00")


def test_the_card_has_the_largest_difference_to_the_live_model(card, exported):
    import tensorflow as tf

    rows = json.loads((exported.path / PARITY).read_text())["signatures"]["serving_default"]
    largest = 0
    for row in rows:
        answer = exported.signatures["serving_default"](text=tf.constant(row["inputs"]["text"]))
        largest = max(largest, np.abs(answer["probabilities"] - np.array(row["outputs"]["probabilities"])).max())
        assert [label.decode() for label in answer["label"].numpy()] == row["outputs"]["label"]
    figures = card["parity"]["serving_default"]
    assert figures["largest_difference"] == pytest.approx(largest, abs=1e-9)
    assert figures["tolerance"] == 1e-5 and figures["others_equal"] and set(card["parity"]) == set(exported.signatures)


def test_the_card_is_short_enough_to_read(exported):
    lines = (exported.path / FILE).read_text().splitlines()
    assert len(lines) < 60 and sum(line.startswith('    "embed"') for line in lines) == 2


def test_formatted_are_json():
    value = {"a": {"b": [1, {"c": "é\n"}], "d": {}}, "e": None, "f": {"g": {"h": 1}}}
    assert json.loads(_formatted(value, 2)) == value and len(_formatted(value, 2).splitlines()) == 10


def test_options_of_any_kind_become_json():
    options = {
        "strategy": Beam(3, length_penalty=0.5),
        "other": Sample(0.7, top_p=0.5),
        "stop_tokens": np.array([3, 5]),
        "forced_tokens": {-1: np.int64(7)},
        "forbidden_tokens": ((1, 2), 3),
        "sets": [{5, (1, 2)}, frozenset([5, 3]), range(2)],
        "none": None,
        "path": complex(1, 2),
    }
    converted = _to_json(options)
    assert json.loads(json.dumps(converted)) == converted
    assert converted["strategy"] == {
        "kind": "Beam", "num_beams": 3, "length_penalty": 0.5, "early_stopping": False, "num_return_sequences": 1
    }  # fmt: skip
    assert (
        converted["other"]["top_p"] == 0.5
        and converted["stop_tokens"] == [3, 5]
        and converted["forced_tokens"] == {"-1": 7}
    )
    assert converted["sets"] == [[5, [1, 2]], [3, 5], [0, 1]]
    assert converted["forbidden_tokens"] == [[1, 2], 3] and converted["path"] == "(1+2j)"


@pytest.mark.parametrize(
    ("dtype", "products"),
    [("mixed_bfloat16", "bfloat16"), ("float64", "float64"), ("some", "float16, float32")],
)
def test_products_have_the_dtypes_in_which_layers_compute(dtype, products):
    dtypes = ("mixed_float16", "float32") if dtype == "some" else (dtype, dtype)
    layers = [keras.layers.Embedding(11, 3, dtype=dtypes[0]), keras.layers.Dense(2, dtype=dtypes[1])]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    assert _compute_dtypes(model) == products


def small_classifier(**options):
    return TextClassifier(31, 2, num_layers=1, hidden_dim=12, num_heads=3, intermediate_dim=7, **options)


def test_the_dtypes_are_those_of_the_layers_and_not_of_the_model_object(tmp_path):
    write_entries(tmp_path, "name", small_classifier(dtype="float64"), {}, **NOTHING)
    assert json.loads((tmp_path / FILE).read_text())["model"]["dtypes"] == ["float64"]


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_quantized_model_has_the_precision_of_its_quantization(tmp_path, mode):
    model = small_classifier()
    model.quantize(mode)
    assert _precision_of_products(model, "float32") == mode
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert _precision_of_products(loaded, "float32") == mode
    dtypes = []
    for one in (model, loaded):  # layers around quantized ones have a map of policies in the second one
        write_entries(tmp_path, "name", one, {}, **NOTHING)
        dtypes.append(json.loads((tmp_path / FILE).read_text())["model"]["dtypes"])
    assert dtypes[0] == dtypes[1] and len(dtypes[0]) == 2
    assert dtypes[0][0] == "float32" and dtypes[0][1].startswith(mode)


def test_a_model_of_which_one_layer_is_quantized_has_both_precisions():
    layers = [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    assert _precision_of_products(model, "bfloat16") == "bfloat16"
    model.layers[0].quantize("int8")
    assert _precision_of_products(model, None) == "float32, int8"
    assert _precision_of_products(model, "bfloat16") == "bfloat16, int8"


def test_a_package_under_another_name_has_no_version(monkeypatch):
    from keras_tx.serving import card

    def missing(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(card.metadata, "version", missing)
    assert card._versions(["tensorflow"])["tensorflow"] is None


def test_a_server_reads_how_to_batch(exported):
    parameters = text_format.Parse((exported.path / BATCHING).read_text(), message("BatchingParameters")())
    assert parameters.max_batch_size.value == 5 and parameters.pad_variable_length_inputs
    assert parameters.HasField("batch_timeout_micros") and parameters.batch_timeout_micros.value == 0
    assert parameters.max_enqueued_batches.value >= 100
