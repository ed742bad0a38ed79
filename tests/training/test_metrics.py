"""Metrics over real tokens; and losses, metrics and schedules in a model that is trained, saved and loaded."""

import inspect
import json

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.training import Muon, NoamSchedule, PaddedAccuracy, PaddedCrossentropy, Perplexity
from keras_tx.training.metrics import TokenMean
from tests.tools import assert_close, normal, to_numpy
from tests.training.test_losses import by_the_formula


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_an_epoch_is_one_mean_over_its_real_tokens(batches, weighted, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 5, (sum(batches), 3)).astype("int32")
    logits = generator.normal(size=(sum(batches), 3, 5)).astype("float32")
    weights = generator.random(labels.shape[: generator.integers(1, 3)]).astype("float32") if weighted else None
    perplexity, accuracy = Perplexity(), PaddedAccuracy()
    start = 0
    for size in batches:
        part = slice(start, start + size)
        for metric in (perplexity, accuracy):
            metric.update_state(labels[part], logits[part], None if weights is None else weights[part])
        start += size
    each = np.ones(labels.shape) if weights is None else weights.reshape(len(weights), -1) * np.ones(labels.shape)
    each = each * (labels != 0)
    losses, right = by_the_formula(labels, logits), logits.argmax(-1) == labels
    count = each.sum()
    assert_close(accuracy.result(), (right * each).sum() / count if count else 0, atol=2e-6)
    assert_close(perplexity.result(), np.exp((losses * each).sum() / count) if count else 1, rtol=2e-5)
    perplexity.reset_state()
    assert float(to_numpy(perplexity.result())) == 1


def test_before_the_first_token_accuracy_is_0_and_perplexity_1():
    padding = np.zeros((2, 3), "int32"), np.full((2, 3, 5), np.nan, "float32")
    for metric, empty in ((PaddedAccuracy(), 0), (Perplexity(), 1)):
        assert float(to_numpy(metric.result())) == empty
        metric.update_state(*padding)
        assert float(to_numpy(metric.result())) == empty


def test_perplexity_of_a_uniform_model_is_the_size_of_the_vocabulary():
    labels = np.array([[3, 1, 0], [2, 0, 0]])
    assert_close(Perplexity()(labels, np.zeros((2, 3, 11), "float32")), 11, rtol=1e-6)
    assert_close(Perplexity(from_logits=False)(labels, np.full((2, 3, 11), 1 / 11, "float32")), 11, rtol=1e-6)


def test_other_padding():
    labels = np.array([[0, 1, -100]])
    logits = np.log(np.array([[[0.5, 0.2, 0.3], [0.1, 0.25, 0.65], [1, 1, 1]]], "float32"))
    assert_close(PaddedAccuracy(padding_id=-100)(labels, logits), 0.5)
    assert_close(Perplexity(padding_id=-100)(labels, logits), np.sqrt(2 * 4), rtol=2e-6)


@pytest.mark.parametrize(
    "made",
    [
        PaddedCrossentropy(padding_id=-1, from_logits=False, label_smoothing=0.2, reduction="sum", name="n"),
        PaddedCrossentropy(padding_id=-1, label_smoothing=0.2, chunk_size=5, reduction="sum", name="n"),
        PaddedAccuracy(padding_id=-1, name="n"),
        Perplexity(padding_id=-1, from_logits=False, name="n"),
        NoamSchedule(12, warmup_steps=3, scale=0.5),
    ],
)
def test_config_is_the_signature_and_gives_the_object_again(made):
    config = made.get_config()
    parameters = inspect.signature(type(made).__init__).parameters.values()
    assert list(config) == [p.name for p in parameters if p.name != "self"]
    same = [p.name for p in parameters if p.default is not p.empty and config.get(p.name, p) == p.default]
    assert len(same) < 2 and {*same} <= {"from_logits", "chunk_size"}  # which exclude each other
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert type(again) is type(made)
    for name, value in config.items():
        assert getattr(again, name) == getattr(made, name) == value


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PaddedCrossentropy, {"padding_id": -1, "label_smoothing": 0.25, "chunk_size": 5}),
        (PaddedAccuracy, {"padding_id": -1}),
        (Perplexity, {"padding_id": -1}),
        (NoamSchedule, {"hidden_dim": 12, "warmup_steps": 3, "scale": 0.5}),
        (Muon, {"learning_rate": 0.5, "weight_decay": 0.25, "adam_beta_1": 0.5, "ns_steps": 3}),
    ],
)
def test_numbers_of_numpy_are_numbers(kind, options):
    numpy_options = {
        name: np.float32(value) if isinstance(value, float) else np.int64(value) for name, value in options.items()
    }
    made = [kind(**x, **({"name": "n"} if kind is not NoamSchedule else {})) for x in (numpy_options, options)]
    ours, plain = (json.dumps(keras.saving.serialize_keras_object(one)) for one in made)
    assert ours == plain


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_model_trains_is_saved_and_evaluates_the_same(policy, tmp_path):
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(11, 7, mask_zero=True, dtype=policy)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(11, dtype=policy)(x))
    optimizer = keras.optimizers.Adam(NoamSchedule(7, warmup_steps=5))
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    metrics = [PaddedAccuracy(), Perplexity()]
    loss = PaddedCrossentropy(label_smoothing=0.1)
    eager = policy != "mixed_float16" and keras.backend.backend() != "jax"  # both ways, and mostly the faster one
    model.compile(optimizer, loss, metrics=metrics, weighted_metrics=[Perplexity(name="w")], run_eagerly=eager)
    ids = np.random.default_rng(0).integers(1, 11, (13, 5)).astype("int32")
    ids[:, 3:][::2] = 0
    ids[4] = 0
    labels = np.roll(ids, 1, axis=0)  # padded otherwise than the input
    weights = np.abs(normal(13, 5)).astype("float32")
    history = model.fit(ids, labels, sample_weight=weights, batch_size=4, epochs=3, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert history.history["perplexity"][-1] < history.history["perplexity"][0]
    expected = model.evaluate(ids, labels, sample_weight=weights, batch_size=13, verbose=0, return_dict=True)
    logits = to_numpy(keras.ops.cast(model(ids), "float32"))
    losses, real = by_the_formula(labels, logits), labels != 0
    rtol = 1e-5 if policy == "float32" else 2e-3  # a compiled model may round less often
    assert_close(expected["perplexity"], np.exp(losses.sum() / real.sum()), rtol=rtol)
    assert_close(expected["w"], np.exp((losses * weights).sum() / (weights * real).sum()), rtol=rtol)
    smoothed = by_the_formula(labels, logits, smoothing=0.1)
    assert_close(expected["loss"], (smoothed * weights).sum() / real.sum(), rtol=rtol)
    split = model.evaluate(ids, labels, sample_weight=weights, batch_size=3, verbose=0, return_dict=True)
    for name in ("accuracy", "perplexity", "w"):
        assert_close(split[name], expected[name], rtol=1e-5)
    model.save(tmp_path / "model.keras")
    opened = keras.saving.load_model(tmp_path / "model.keras")
    again = opened.evaluate(ids, labels, sample_weight=weights, batch_size=13, verbose=0, return_dict=True)
    assert again == pytest.approx(expected, rel=1e-6)


def test_a_metric_without_per_token_is_told():
    with pytest.raises(NotImplementedError, match="TokenMean must define `per_token`."):
        TokenMean(0, "mean").per_token(None, None, None)
