"""The loss against its formula in float64, against Keras' losses, and with padding against without."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Perplexity
from tests.tools import assert_close, normal, to_numpy

B, T, V = 3, 5, 7
LABELS = np.array([[1, 6, 2, 0, 0], [4, 0, 5, 5, 3], [0, 0, 0, 0, 0]], "int32")
LOGITS = 3 * normal(B, T, V)
WEIGHTS = np.abs(normal(B, T)) + 0.5


def by_the_formula(labels, logits, padding_id=0, smoothing=0.0):
    """The loss of each token in float64: the target of the label is 1 - e + e/V, that of every other token e/V."""
    labels, logits = np.asarray(labels), np.asarray(logits, "float64")
    losses = np.zeros(labels.shape)
    for place in zip(*np.where(labels != padding_id), strict=True):
        row = logits[place] - logits[place].max()
        target = np.full(len(row), smoothing / len(row))
        target[labels[place]] += 1 - smoothing
        losses[place] = -(target * (row - np.log(np.exp(row).sum()))).sum()
    return losses


def gradient(function, x):
    """d function / dx on each backend."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x)
        return tape.gradient(value, x)
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)(ops.convert_to_tensor(x))
    import torch

    x = torch.tensor(x, requires_grad=True)
    return torch.autograd.grad(function(x), x)[0]


@given(
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(1, 9),
    st.sampled_from([0, 2, -100]),
    st.sampled_from([0.0, 0.1, 0.7]),
    st.integers(0, 99),
)
def test_the_loss_is_the_mean_over_real_tokens(batch, length, size, padding_id, smoothing, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, size, (batch, length)).astype("int32")
    labels = np.where(generator.random(labels.shape) < 0.3, padding_id, np.minimum(labels, size - 1)).astype("int32")
    labels[labels >= size] = padding_id
    logits = generator.normal(size=(batch, length, size)).astype("float32") * 5
    loss = PaddedCrossentropy(padding_id=padding_id, label_smoothing=smoothing)
    expected = by_the_formula(labels, logits, padding_id, smoothing)
    count = (labels != padding_id).sum()
    assert_close(loss(labels, logits), expected.sum() / count if count else 0.0, atol=2e-6, rtol=2e-6)
    assert_close(loss.call(labels, logits), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("from_logits", [True, False])
def test_it_is_keras_loss_on_one_hot_labels(smoothing, from_logits):
    outputs = LOGITS if from_logits else np.exp(LOGITS)  # Keras scales probabilities to the sum 1
    labels = np.maximum(LABELS, 1)
    theirs = keras.losses.CategoricalCrossentropy(from_logits=from_logits, label_smoothing=smoothing)
    ours = PaddedCrossentropy(from_logits=from_logits, label_smoothing=smoothing)
    one_hot = np.eye(V, dtype="float32")[labels]
    assert_close(ours(labels, outputs), theirs(one_hot, outputs), rtol=2e-6)
    assert_close(
        gradient(lambda x: ours(labels, x), outputs), gradient(lambda x: theirs(one_hot, x), outputs), atol=2e-7
    )


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None])
@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS[:, 0]])
def test_it_reduces_as_keras_does_with_the_mask_of_the_labels(reduction, weights):
    theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    masked = ops.convert_to_tensor(LOGITS)
    masked._keras_mask = ops.convert_to_tensor(LABELS != 0)
    ours = PaddedCrossentropy(reduction=reduction)
    expected = theirs(
        LABELS, masked, weights if weights is None or weights.ndim == 2 else np.repeat(weights[:, None], T, 1)
    )
    assert_close(ours(LABELS, LOGITS, weights), expected, rtol=2e-6)


def test_the_mask_of_the_input_changes_nothing():
    for mask in (np.zeros((B, T), bool), np.arange(T) < 2 * np.ones((B, 1)), np.ones((B, T), bool)):
        logits = ops.convert_to_tensor(LOGITS)
        logits._keras_mask = ops.convert_to_tensor(mask)
        for function in (PaddedCrossentropy(), PaddedAccuracy(), Perplexity()):
            assert_close(function(LABELS, logits), function(LABELS, LOGITS), atol=0, rtol=0)


def test_padding_and_the_cut_into_batches_change_nothing():
    alone = [(LABELS[:1, :3], LOGITS[:1, :3]), (LABELS[1:2, [0, 2, 3, 4]], LOGITS[1:2, [0, 2, 3, 4]])]
    tokens = [3, 4]
    loss = PaddedCrossentropy(label_smoothing=0.1)
    parts = [float(to_numpy(loss(*pair))) for pair in alone]
    assert_close(loss(LABELS, LOGITS), np.dot(parts, tokens) / 7)
    perplexity, accuracy = Perplexity(), PaddedAccuracy()
    for pair in alone:
        perplexity.update_state(*pair)
        accuracy.update_state(*pair)
    assert_close(perplexity.result(), Perplexity()(LABELS, LOGITS), rtol=2e-6)
    assert_close(accuracy.result(), PaddedAccuracy()(LABELS, LOGITS))


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf])
def test_rubbish_at_padding_and_at_weight_zero_reaches_neither_loss_nor_gradient(rubbish, smoothing, from_logits):
    outputs = LOGITS if from_logits else np.exp(LOGITS)
    weights = np.ones((B, T), "float32")
    weights[0, 1] = 0
    skipped = (LABELS == 0) | (weights == 0)
    spoilt = np.where(skipped[..., None], np.float32(rubbish), outputs)
    loss = PaddedCrossentropy(label_smoothing=smoothing, from_logits=from_logits)
    assert_close(loss(LABELS, spoilt, weights), loss(LABELS, outputs, weights))
    slope = to_numpy(gradient(lambda x: loss(LABELS, x, weights), spoilt))
    assert np.isfinite(slope).all() and not slope[skipped].any() and slope[~skipped].all()
    assert_close(slope, gradient(lambda x: loss(LABELS, x, weights), outputs))
    if not smoothing:
        perplexity = Perplexity(from_logits=from_logits)
        assert_close(perplexity(LABELS, spoilt, weights), Perplexity(from_logits=from_logits)(LABELS, outputs, weights))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_of_padding_alone_gives_zero_and_no_gradient(smoothing):
    loss = PaddedCrossentropy(label_smoothing=smoothing)
    labels = np.zeros((B, T), "int32")
    assert float(to_numpy(loss(labels, LOGITS))) == 0
    assert not to_numpy(gradient(lambda x: loss(labels, x), LOGITS)).any()
    assert float(to_numpy(loss(labels[:0], LOGITS[:0]))) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_taken_as_float32(dtype):
    rough = ops.cast(LOGITS * 30, dtype)  # sums of exp overflow in float16
    labels = np.maximum(LABELS, 1)
    exact = by_the_formula(labels, to_numpy(ops.cast(rough, "float32"))).mean()
    loss = PaddedCrossentropy()(labels, rough)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    assert_close(loss, exact, rtol=2e-6)


def test_logits_of_minus_infinity_are_no_tokens():
    logits = LOGITS.copy()
    logits[..., 3] = -np.inf
    labels = np.where(LABELS == 3, 2, LABELS)
    expected = by_the_formula(labels - (labels > 3), np.delete(LOGITS, 3, axis=-1)).sum() / 7
    assert_close(PaddedCrossentropy()(labels, logits), expected, rtol=2e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_graph_gives_what_eager_gives(compiled, smoothing):
    import tensorflow as tf

    loss = PaddedCrossentropy(label_smoothing=smoothing)
    spec = [tf.TensorSpec((None, None), "int32"), tf.TensorSpec((None, None, V))]
    graph = tf.function(lambda y, x: gradient(lambda x: loss(y, x), x), input_signature=spec, jit_compile=compiled)
    assert_close(graph(LABELS, LOGITS), gradient(lambda x: loss(LABELS, x), LOGITS))


@pytest.mark.tensorflow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_second_derivatives_are_those_of_the_formula(smoothing):
    labels = np.maximum(LABELS, 1)
    ours = PaddedCrossentropy(label_smoothing=smoothing)
    theirs = lambda labels, x: ops.mean(
        ops.logsumexp(x, -1) - (1 - smoothing) * ops.sum(x * ops.one_hot(labels, V), -1) - smoothing * ops.mean(x, -1)
    )
    direction = normal(B, T, V, seed=1)
    along = lambda loss: lambda x: ops.sum(gradient(lambda x: loss(labels, x), x) * direction)
    assert_close(gradient(along(ours), LOGITS), gradient(along(theirs), LOGITS), atol=2e-7)


@pytest.mark.tensorflow
@pytest.mark.parametrize("label", [V, 2**32 + 1, -(2**32) + 1])
def test_a_label_outside_is_refused_by_a_graph_and_nan_where_nothing_can_raise(label):
    import tensorflow as tf

    wrong = np.where(LABELS == 4, label, LABELS.astype("int64"))
    graph = tf.function(PaddedCrossentropy())
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not index into"):
        graph(tf.constant(wrong), tf.constant(LOGITS))
    compiled = tf.function(PaddedCrossentropy(), jit_compile=True)
    assert np.isnan(compiled(tf.constant(wrong), tf.constant(LOGITS)))
    assert np.isfinite(compiled(tf.constant(LABELS), tf.constant(LOGITS)))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX alone")
@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_is_nan_in_a_compiled_function_of_jax(label):
    import jax

    assert np.isnan(jax.jit(PaddedCrossentropy())(np.where(LABELS == 4, label, LABELS), LOGITS))


@pytest.mark.parametrize("function", [PaddedCrossentropy(), PaddedAccuracy(), Perplexity()])
def test_invalid_labels_are_refused(function):
    with pytest.raises(ValueError, match=r"in \[0, 7\) or the `padding_id`. Received: label 7, padding_id=0"):
        function(np.where(LABELS == 4, 7, LABELS), LOGITS)
    with pytest.raises(ValueError, match=r"Received: label -100, padding_id=0"):
        function(np.where(LABELS == 4, -100, LABELS), LOGITS)
    with pytest.raises(ValueError, match="`y_true` must be integers. Received: y_true of dtype float32"):
        function(LABELS.astype("float32"), LOGITS)
    with pytest.raises(ValueError, match=r"y_true.shape=\(3, 4\), y_pred.shape=\(3, 5, 7\)"):
        function(LABELS[:, :4], LOGITS)
    with pytest.raises(ValueError, match=r"y_true.shape=\(3,\), y_pred.shape=\(3, 5, 7\)"):
        function(LABELS[:, 0], LOGITS)
    with pytest.raises(ValueError, match=r"`sample_weight` must have the shape \(3, 5\) .*sample_weight.shape=\(5,\)"):
        function(LABELS, LOGITS, np.ones(5))
    with pytest.raises(ValueError, match=r"must be \(B, T, V\), for labels \(B, T\). For .*predictions.shape=\(3, 7\)"):
        function(LABELS[:, 0], LOGITS[:, 0])


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_any_integers_are_labels(dtype):
    assert_close(PaddedCrossentropy()(LABELS.astype(dtype), LOGITS), PaddedCrossentropy()(LABELS, LOGITS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding_id": 0.0}, "`padding_id` must be an integer. Received: padding_id=0.0"),
        ({"padding_id": True}, "`padding_id` must be an integer. Received: padding_id=True"),
        ({"label_smoothing": 1}, r"`label_smoothing` must be a number in \[0, 1\). Received: label_smoothing=1"),
        ({"reduction": "tokens"}, "`reduction` must be one of .* Received: reduction='tokens'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PaddedCrossentropy(**arguments)


@pytest.mark.parametrize("kind", [PaddedCrossentropy, Perplexity])
def test_from_logits_is_a_boolean(kind):
    assert kind(from_logits=np.False_).from_logits is False and kind(from_logits=np.True_).from_logits is True
    with pytest.raises(TypeError, match="`from_logits` must be True or False. Received: from_logits='no'"):
        kind(from_logits="no")


@pytest.mark.tensorflow
def test_under_a_strategy_keras_builds_from_floats():
    import tensorflow as tf

    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        averaged = PaddedCrossentropy()(LABELS.astype("float64"), LOGITS)
    assert_close(averaged, PaddedCrossentropy()(LABELS, LOGITS))


@pytest.mark.tensorflow
@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
def test_a_replica_returns_its_share_of_the_mean_over_all_tokens(monkeypatch, reduction):
    """Here the other replica has three times as many tokens."""
    import tensorflow as tf

    loss = PaddedCrossentropy(reduction=reduction)
    whole, total = loss(LABELS, LOGITS, WEIGHTS), PaddedCrossentropy(reduction="sum")(LABELS, LOGITS)
    context = SimpleNamespace(all_reduce=lambda op, value: 4 * value)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: SimpleNamespace(num_replicas_in_sync=2))
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    assert_close(loss(LABELS, LOGITS, WEIGHTS), whole / 4)
    assert_close(PaddedCrossentropy(reduction="sum")(LABELS, LOGITS), total)
    assert float(loss(LABELS * 0, LOGITS)) == 0
    monkeypatch.setattr(tf.distribute, "in_cross_replica_context", lambda: True)  # as Keras' own losses do there
    assert_close(loss(LABELS, LOGITS, WEIGHTS), whole / 2)


def test_rows_that_fill_a_batch_up_count_nothing():
    labels, weights = np.maximum(LABELS, 1), np.array([1, 2, -0.0], "float32")
    for options in ({}, {"padding_id": -100}, {"reduction": "mean_with_sample_weight"}, {"reduction": "sum"}):
        loss = PaddedCrossentropy(**options)
        assert_close(loss(labels, LOGITS, weights), loss(labels[:2], LOGITS[:2], weights[:2]))
    loss = PaddedCrossentropy(padding_id=-100)
    assert_close(
        loss(labels, LOGITS, np.abs(weights)) * 3 / 2, loss(labels, LOGITS, weights)
    )  # a 0 of one's own counts
    for metric in (PaddedAccuracy(padding_id=-100), Perplexity()):
        expected = metric(labels[:2], LOGITS[:2], weights[:2])
        metric.reset_state()
        assert_close(metric(labels, LOGITS, weights), expected)
