"""What losses, metrics and updates of models count: examples and real tokens, whatever the batches they come in."""

import warnings

import keras
import numpy as np
import pytest

from keras_tx.data.padding_rows import fill_arrays
from keras_tx.models import CausalLM
from keras_tx.models.checked_data import CheckedModel
from keras_tx.pretrained import PretrainedModel
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Perplexity
from tests.tools import assert_close

ROWS, LENGTH, VOCABULARY = 13, 5, 11
LENGTHS = np.array([5, 5, 5, 5, 1, 0, 1, 2, 4, 3, 5, 1, 2])
WEIGHTS = np.random.default_rng(1).uniform(0.5, 2, ROWS).astype("float32")
EAGERLY = keras.backend.backend() == "tensorflow"  # which takes seconds to trace a graph


def ids(seed):
    values = np.random.default_rng(seed).integers(1, VOCABULARY, (ROWS, LENGTH))
    return np.where(np.arange(LENGTH) < LENGTHS[:, None], values, 0).astype("int32")


X, Y, CLASSES = ids(1), ids(2), ids(3)[:, 0] % 3
IGNORED = np.where(np.arange(ROWS) % 5 < 2, -1, CLASSES)


def tokens(mask_zero=False):
    keras.utils.set_random_seed(5)
    x = keras.Input((None,), dtype="int32", name="token_ids")
    hidden = keras.layers.Embedding(VOCABULARY, 6, mask_zero=mask_zero)(x)
    return CheckedModel(x, keras.layers.Dense(VOCABULARY)(hidden))


def classes():
    keras.utils.set_random_seed(5)
    x = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(VOCABULARY, 6)(x))
    return CheckedModel(x, keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))(pooled))


def two_outputs():
    keras.utils.set_random_seed(5)
    x = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(VOCABULARY, 6)(x))
    return CheckedModel(x, [keras.layers.Dense(3, name="whole")(pooled), keras.layers.Dense(1, name="half")(pooled)])


def causal():
    keras.utils.set_random_seed(5)
    sizes = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 4}
    return CausalLM(VOCABULARY, **sizes, dropout=0.0)


def sparse(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def assert_equal_weights(model, other, atol=2e-6):
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=atol, rtol=0)


CASES = {
    "tokens": (tokens, Y, PaddedCrossentropy, None),
    "weights": (tokens, Y, lambda: PaddedCrossentropy(reduction="mean_with_sample_weight"), WEIGHTS),
    "sum": (tokens, Y, lambda: PaddedCrossentropy(reduction="sum"), None),
    "chunks": (causal, Y, lambda: PaddedCrossentropy(chunk_size=7), None),
    "examples": (classes, CLASSES, sparse, WEIGHTS),
    "sum_of_examples": (classes, CLASSES, lambda: sparse(reduction="sum"), None),
    "weights_of_examples": (classes, CLASSES, lambda: sparse(reduction="mean_with_sample_weight"), WEIGHTS),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_give_the_update_of_one_batch(case):
    """4 + 4 + 4 + 1 examples, with 20, 4, 13 and 2 tokens, for 4 updates; some in a graph."""
    make, y, loss, weights = CASES[case]
    whole, parts = make(), make()
    eagerly = EAGERLY and case not in ("tokens", "chunks")
    whole.compile(keras.optimizers.SGD(0.1, global_clipnorm=2.0), loss(), run_eagerly=eagerly)
    accumulated = keras.optimizers.SGD(0.1, global_clipnorm=2.0, gradient_accumulation_steps=4)
    parts.compile(accumulated, loss(), run_eagerly=eagerly)
    begun = make().get_weights()
    whole.fit(X, y, sample_weight=weights, batch_size=ROWS, shuffle=False, epochs=4, verbose=0)
    parts.fit(X, y, sample_weight=weights, batch_size=4, shuffle=False, epochs=4, verbose=0)
    assert max(np.abs(one - two).max() for one, two in zip(begun, whole.get_weights(), strict=True)) > 0.01
    assert_equal_weights(whole, parts)


def test_a_cycle_goes_on_after_the_end_of_fit_and_in_a_loaded_model(tmp_path):
    """3 + 3 batches, of which 5 make an update: also the tokens counted so far are saved with the optimizer."""
    whole, parts = tokens(), tokens()
    whole.compile(keras.optimizers.SGD(0.5), PaddedCrossentropy(), run_eagerly=EAGERLY)
    accumulated = keras.optimizers.SGD(0.5, gradient_accumulation_steps=5)
    parts.compile(accumulated, PaddedCrossentropy(), run_eagerly=EAGERLY)
    whole.train_on_batch(X, Y)
    begun = tokens()
    parts.fit(X[:9], Y[:9], batch_size=3, shuffle=False, verbose=0)
    assert_equal_weights(parts, begun, atol=0)
    parts.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"CheckedModel": CheckedModel})
    for model in (parts, loaded):
        model.fit(X[9:], Y[9:], batch_size=2, shuffle=False, verbose=0)
        assert_equal_weights(model, whole)


def test_a_cycle_of_padding_alone_changes_nothing():
    model = tokens()
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    model.compile(optimizer, PaddedCrossentropy(), run_eagerly=EAGERLY)
    begun = model.get_weights()
    model.fit(X[:4], 0 * Y[:4], batch_size=2, verbose=0)
    for one, two in zip(begun, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_batch_whose_gradients_overflow_is_no_part_of_an_update():
    """Batches of 3, 3, 3, 3 and 1 rows: with a loss scale, the first makes an update with the third, not the second."""

    def trained(optimizer, x, rows):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((3,))
        model = CheckedModel(inputs, keras.layers.Dense(2, kernel_regularizer="l2")(inputs))
        model.compile(optimizer, "mse", run_eagerly=EAGERLY)
        for batch in rows:
            model.train_on_batch(x[batch], y[batch])
        return model

    def adam(**options):
        return keras.optimizers.Adam(0.01, epsilon=1e-3, **options)

    x, y = (np.random.default_rng(seed).normal(size=(13, size)).astype("float32") for seed, size in ((1, 3), (2, 2)))
    parts = np.split(np.arange(13), [3, 6, 9, 12])
    whole = trained(adam(), x, [np.concatenate([parts[i], parts[j]]) for i, j in ((0, 2), (3, 4))])
    x[4] = 1e30
    scaled = keras.optimizers.LossScaleOptimizer(adam(gradient_accumulation_steps=2), initial_scale=8.0)
    assert_equal_weights(trained(scaled, x, parts), whole)
    assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 4


def of_tokens():
    return {"metrics": [PaddedAccuracy(), Perplexity()], "weighted_metrics": [PaddedAccuracy(name="weighted")]}


def of_keras():
    return {"metrics": ["accuracy"], "weighted_metrics": [sparse_metric()]}


def sparse_metric():
    return keras.metrics.SparseCategoricalCrossentropy(from_logits=True)


FILLED = {
    "tokens": (tokens, Y, PaddedCrossentropy, of_tokens, None),
    "ignored": (tokens, Y, lambda: PaddedCrossentropy(padding_id=-100), of_keras, None),
    "weights": (tokens, Y, lambda: PaddedCrossentropy(reduction="mean_with_sample_weight"), of_tokens, WEIGHTS),
    "mask": (lambda: tokens(mask_zero=True), Y, sparse, of_keras, None),
    "classes": (classes, CLASSES, sparse, of_keras, WEIGHTS),
    "mean": (classes, CLASSES, lambda: sparse(reduction="mean_with_sample_weight"), of_keras, WEIGHTS),
    "sum": (classes, CLASSES, lambda: sparse(reduction="sum"), of_keras, None),
    "ignored_classes": (classes, IGNORED, lambda: sparse(ignore_class=-1), dict, None),
    "ignored_zeros": (classes, CLASSES, lambda: sparse(ignore_class=0), dict, WEIGHTS),
}


@pytest.mark.parametrize("case", FILLED)
def test_rows_that_fill_batches_up_change_neither_updates_nor_losses_nor_metrics(case):
    make, y, loss, metrics, weights = FILLED[case]
    given = [(X[i : i + 5], y[i : i + 5], None if weights is None else weights[i : i + 5]) for i in (0, 5, 10)]
    plain, filled = make(), make()
    results = []
    for model, batches in ((plain, given), (filled, [fill_arrays(4, *batch) for batch in given])):
        model.compile(keras.optimizers.SGD(0.1), loss(), **metrics(), run_eagerly=True)
        history = model.fit(Batches(batches), validation_data=Batches(batches), shuffle=False, verbose=0)
        results.append(history.history)
    assert [len(batch[0]) for batch in batches] == [8, 8, 4]
    assert_equal_weights(plain, filled)
    assert results[0].keys() == results[1].keys() >= {"loss", "val_loss"}
    for name, values in results[0].items():
        np.testing.assert_allclose(results[1][name], values, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("reductions", [("mean", "mean"), ("mean", "sum"), (None, None)])
@pytest.mark.parametrize("is_filled", [False, True])
def test_the_loss_of_each_output_is_weighed_by_examples(reductions, is_filled):
    """With batches of 5, 5 and 3 rows in a graph, it equals what NumPy makes of the predictions."""
    y = [CLASSES, (CLASSES / 2).astype("float32")[:, None]]
    batches = [(X[i : i + 5], tuple(one[i : i + 5] for one in y), None) for i in (0, 5, 10)]
    model = two_outputs()
    first, second = reductions
    model.compile("sgd", [sparse(reduction=first), keras.losses.MeanSquaredError(reduction=second)])
    given = [fill_arrays(4, *batch) for batch in batches] if is_filled else batches
    found = model.evaluate(Batches(given), verbose=0, return_dict=True)
    logits, halves = model.predict(X, verbose=0)
    of_rows = np.log(np.exp(logits).sum(-1)) - logits[np.arange(ROWS), CLASSES]
    squares = ((halves - y[1]) ** 2)[:, 0]
    # The loss over an epoch weighs the sums of batches by their rows, as Keras does.
    of_batches = [5 * squares[:5].sum(), 5 * squares[5:10].sum(), 3 * squares[10:].sum()]
    expected = np.sum(of_batches) / ROWS if second == "sum" else squares.mean()
    np.testing.assert_allclose(found["whole_loss"], of_rows.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["half_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], of_rows.mean() + expected, rtol=1e-5)


def with_weights(weights, accumulated=False):
    """The weights, histories and results of a model of two outputs, the weights of one of which may be None."""
    model, y = two_outputs(), [CLASSES, (CLASSES / 2).astype("float32")[:, None]]
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2 if accumulated else None)
    model.compile(optimizer, [sparse(), "mse"], metrics=["accuracy", "mae"], weighted_metrics=["accuracy", "mae"])
    data = {"x": X, "y": y, "sample_weight": weights}
    history = model.fit(**data, batch_size=5, shuffle=False, validation_data=tuple(data.values()), verbose=0).history
    found = [model.evaluate(**data, batch_size=5, verbose=0), model.train_on_batch(**data), model.test_on_batch(**data)]
    return [*model.get_weights(), *history.values(), *found]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weights_in_a_column_count_as_in_a_row(reduction):
    """As for Keras' losses alone, where labels and weights come from the columns of a table."""
    found = []
    for weights in (WEIGHTS, WEIGHTS[:, None]):
        model, loss = classes(), sparse(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"], run_eagerly=True)
        expected = loss(CLASSES, model.predict(X, verbose=0), WEIGHTS) + sum(model.losses)
        assert_close(model.test_on_batch(X, CLASSES[:, None], weights)[0], expected, rtol=1e-5)
        model.fit(X, CLASSES, sample_weight=weights, batch_size=5, shuffle=False, verbose=0)
        found.append(model)
    assert_equal_weights(*found)


@pytest.mark.parametrize("accumulated", [False, True])
def test_an_output_without_weights_counts_as_one_whose_weights_are_ones(accumulated):
    found, expected = (with_weights([one, WEIGHTS], accumulated) for one in (None, np.ones(ROWS, "float32")))
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    for one, two in zip(with_weights([None, None]), with_weights(None), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


class Batches(keras.utils.PyDataset):
    """Batches with and without sample weights."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        x, y, weights = self.batches[index]
        return (x, y) if weights is None else (x, y, weights)


def test_weights_of_rows_meet_a_mask_of_tokens():
    """Keras would multiply weights (5,) and the mask (5, 5) along the wrong axis."""
    model = tokens(mask_zero=True)
    model.compile("sgd", sparse(), weighted_metrics=["accuracy"], run_eagerly=True)
    loss, accuracy = model.evaluate(X[:5], Y[:5], sample_weight=WEIGHTS[:5], verbose=0)
    logits = model.predict(X[:5], verbose=0)
    losses = PaddedCrossentropy(reduction=None)(Y[:5], logits)
    real = X[:5] != 0
    expected = (keras.ops.convert_to_numpy(losses) * WEIGHTS[:5, None] * real).sum() / real.sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    hits = ((logits.argmax(-1) == Y[:5]) & real) * WEIGHTS[:5, None]
    np.testing.assert_allclose(accuracy, hits.sum() / (real * WEIGHTS[:5, None]).sum(), rtol=1e-5)


def as_arrays(weights):
    return {"x": X, "y": Y, "sample_weight": weights, "batch_size": ROWS}


def as_dataset(weights):
    tf = pytest.importorskip("tensorflow")
    return {"x": tf.data.Dataset.from_tensors((X, Y, weights))}


def as_sequence(weights):
    return {"x": Batches([(X, Y, weights)])}


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        (as_arrays, PaddedCrossentropy),
        (as_sequence, sparse),
        pytest.param(as_dataset, PaddedCrossentropy, marks=pytest.mark.tensorflow),
    ],
)
def test_weights_of_rows_and_of_tokens_may_follow_one_another(given, loss):
    """Methods that have seen one kind of weights compute for the other kind what those of a new model do."""
    kinds = WEIGHTS, np.random.default_rng(2).uniform(0.5, 2, X.shape).astype("float32")
    expected = []
    for weights in kinds:
        model = tokens(mask_zero=True)
        model.compile(keras.optimizers.SGD(0.0), loss(), run_eagerly=EAGERLY)
        expected.append(model.fit(**given(weights), shuffle=False, verbose=0).history["loss"][0])
        np.testing.assert_allclose(model.evaluate(**given(weights), verbose=0), expected[-1], rtol=1e-6)
    assert abs(expected[0] - expected[1]) > 1e-3
    model = tokens(mask_zero=True)
    model.compile(keras.optimizers.SGD(0.0), loss())
    for index in (0, 1, 0):
        history = model.fit(**given(kinds[index]), shuffle=False, verbose=0, validation_data=(X, Y, kinds[1 - index]))
        np.testing.assert_allclose(history.history["loss"], expected[index], rtol=1e-6)
        np.testing.assert_allclose(model.evaluate(**given(kinds[index]), verbose=0), expected[index], rtol=1e-6)


SIZES = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 4}
BERT = {"model_type": "bert", "vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
BERT |= {"intermediate_size": 4, "max_position_embeddings": 8}


@pytest.mark.parametrize("make", [lambda dtype: CausalLM(11, **SIZES, dtype=dtype), lambda dtype: checkpoint(dtype)])
@pytest.mark.parametrize(
    ("layers", "everywhere", "scales"),
    [
        ("mixed_float16", "float32", True),
        (None, "mixed_float16", True),
        ("float32", "mixed_float16", False),
        (keras.dtype_policies.DTypePolicyMap("mixed_float16"), "float32", True),
        ("mixed_bfloat16", "float32", False),
    ],
    ids=str,
)
def test_the_loss_is_scaled_for_the_policy_of_the_layers(make, layers, everywhere, scales, tmp_path):
    keras.config.set_dtype_policy(everywhere)
    try:
        model = make(layers)
        for auto_scale_loss in (True, False):
            model.compile("adam", "mse", auto_scale_loss=auto_scale_loss)
            is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert is_scaled == (scales and auto_scale_loss)
            model.optimizer.build(model.trainable_variables)
            model.optimizer.iterations.assign(7)
            model.save(tmp_path / "model.keras")
            with warnings.catch_warnings(action="error"):
                again = keras.saving.load_model(tmp_path / "model.keras")
            assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer) == is_scaled
            assert int(again.optimizer.iterations) == 7
    finally:
        keras.config.set_dtype_policy("float32")


def checkpoint(dtype):
    return PretrainedModel(BERT, "base", dtype=dtype)


@keras.saving.register_keras_serializable(package="tests")
class Tempered(CausalLM):
    """A model with an argument of its own in `compile`."""

    def compile(self, optimizer, loss, temperature=1.0):
        self.temperature = temperature
        super().compile(optimizer, loss)


def test_a_class_with_a_compile_of_its_own_is_loaded_as_in_keras(tmp_path):
    model = Tempered(11, **SIZES)
    model.compile("adam", PaddedCrossentropy(), temperature=2.0)
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="`compile\\(\\)` was not called as part of model loading"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    assert getattr(again, "optimizer", None) is None
