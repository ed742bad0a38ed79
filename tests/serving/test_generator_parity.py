"""What is compared of generative exports whose tokens rounding or chance may change, and what the reports say of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from keras_tx.generation import Sample
from keras_tx.serving import Report, check, export
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.serving.parity import generator_example
from tests.serving.conftest import only_signatures, small_generator

pytestmark = pytest.mark.tensorflow

NOT_COMPARED = {"examples": 0, "largest_difference": None, "tolerance": None, "others_equal": None}


def figures_of(path):
    return json.loads((path / CARD).read_text())["parity"]


def without_weights(path):
    """Writes zeros into the checkpoint of a version in place of all weights."""
    import tensorflow as tf

    prefix = str(path / "variables" / "variables")
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    names = sorted(name for name, dtype in dtypes.items() if dtype != tf.string)
    tensors = [tf.zeros_like(tf.constant(reader.get_tensor(name), dtypes[name])) for name in names]
    others = sorted(set(dtypes) - set(names))
    tensors += [tf.constant(reader.get_tensor(name)) for name in others]
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=[*names, *others], shape_and_slices=[""] * len(dtypes), tensors=tensors
    )


@pytest.fixture(scope="module")
def half(tokenizer, tmp_path_factory):
    """A language model in bfloat16, what `check` says of its version, and of it when all its weights are zero."""
    path = tmp_path_factory.mktemp("saved_models") / "half"
    with only_signatures("serving_default", "tokens", "score", "embed"):
        options = {"tokenizer": tokenizer, "generation": {"max_new_tokens": 3}, "precision": "bfloat16"}
        path = export(small_generator(), path, **options)
    report = check(path)
    figures = figures_of(path)
    without_weights(path)
    return SimpleNamespace(figures=figures, report=report, of_zeros=check(path))


@pytest.mark.process
def test_in_half_precision_scores_and_vectors_are_compared_and_chosen_tokens_are_not(half):
    assert half.figures["serving_default"] == half.figures["tokens"] == NOT_COMPARED
    for name in ("score", "embed"):
        assert half.figures[name]["examples"] == 1
        assert 1e-6 < half.figures[name]["largest_difference"] < half.figures[name]["tolerance"]
    assert half.report.ok and half.report.parity["texts"] == 2
    largest = max(half.figures[name]["largest_difference"] for name in ("score", "embed"))
    assert half.report.parity["difference"] == pytest.approx(largest, rel=0.1)


@pytest.mark.process
def test_a_version_in_half_precision_without_its_weights_is_not_in_order(half):
    (problem,) = half.of_zeros.problems
    assert problem.startswith("numbers differ from the Keras model's by ")


@pytest.mark.process
def test_of_samples_of_ids_nothing_is_compared_and_the_report_says_so(tmp_path):
    options = {"generation": {"strategy": Sample(seed=3), "max_new_tokens": 2}}
    path = export(small_generator(), tmp_path / "samples", **options)
    assert figures_of(path) == {"serving_default": NOT_COMPARED, "tokens": NOT_COMPARED}
    report = check(path)
    assert report.ok and report.parity["texts"] == 0 and report.parity["difference"] is None
    assert str(report).endswith("XLA off: no answers of the Keras model to compare with")


def test_answers_without_numbers_have_no_largest_difference():
    parity = {"texts": 3, "difference": None, "tolerance": None, "same_labels": True, "empty_batch": True}
    assert str(Report("1", parity=parity)).endswith("XLA off: 3 requests, strings and integers only")


@pytest.mark.parametrize("kind", ["language_model", "translator", "put_together"])
def test_every_kind_of_model_scores_by_keras_alone(generative_models, tokenizer, kind):
    """As its graph in float32 does."""
    import tensorflow as tf

    score = generator_signatures(generative_models[kind], tokenizer, None, {"max_new_tokens": 3})["score"]
    names = [spec.name for spec in score.input_signature]
    inputs = {name: tf.constant(["the cat" if name != "target" else "sat"]) for name in names}
    (row,) = generator_example("score", score, inputs, False, "bfloat16")
    for key, value in score(**inputs).items():
        if value.dtype.is_floating:
            np.testing.assert_allclose(row["outputs"][key], value, atol=2e-5)
    assert row["tolerance"] == pytest.approx(2**-4 * max(1, -row["outputs"]["log_probability"][0]), rel=1e-5)
