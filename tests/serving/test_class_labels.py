"""Whether a head returns logits or probabilities is found out, and the labels are checked against its classes."""

import keras
import numpy as np
import pytest

from keras_tx.serving.class_labels import check_labels, classifier_outputs, multi_label_kind
from keras_tx.serving.text_encoder import TextEncoder
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def classifier(*shape, activation=None, then=()):
    """A model of ids whose output has this shape behind the batch."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 3, mask_zero=True)(ids)
    x = x if len(shape) == 2 else keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dense(shape[-1], activation=activation)(x)
    for layer in then:
        x = layer(x)
    return keras.Model(ids, x)


@pytest.mark.parametrize(
    "activation, then",
    [
        ("softmax", ()),
        ("softmax", ("dropout",)),
        (None, ("softmax_layer",)),
        (None, ("softmax", "linear")),
        (None, ("softmax_operation",)),
        (None, ()),
        (None, ("dropout", "linear")),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_logits_are_told_from_probabilities(activation, then, nested):
    makers = {
        "dropout": lambda: keras.layers.Dropout(0.1),
        "linear": lambda: keras.layers.Activation("linear", dtype="float32"),
        "softmax": lambda: keras.layers.Activation("softmax"),
        "softmax_layer": keras.layers.Softmax,
        "softmax_operation": lambda: keras.ops.softmax,
    }
    is_probability = "softmax" in f"{activation} {then}"
    then = [makers[name]() for name in then]
    model = randomize(classifier(5, activation=activation, then=then))
    if nested:
        outer = keras.Input((None,), dtype="int32")
        model = keras.Model(outer, model(outer))
    encoder = TextEncoder(model)
    answer = classifier_outputs(encoder, check_labels(encoder, None))(np.array([[3, 1]], "int32"))
    raw = to_numpy(model(np.array([[3, 1]]))).astype("float64")
    assert_close(answer["probabilities"], raw if is_probability else softmax(raw))


def test_functions_of_operations_are_those_of_activations():
    import tensorflow as tf

    rows = np.array([[3, 1]], "int32")
    for function, size in ((keras.ops.softmax, 4), (tf.nn.softmax, 4), (keras.ops.sigmoid, 1), (tf.nn.sigmoid, 1)):
        model = randomize(classifier(size, activation=function), scale=2.0)
        encoder = TextEncoder(model)
        answer = classifier_outputs(encoder, check_labels(encoder, None))(rows)
        assert_close(answer["probabilities"][:, -1], to_numpy(model(rows))[:, -1])


@pytest.mark.parametrize("activation, size", [("relu", 2), ("tanh", 1)])
def test_other_activations_are_no_distribution(activation, size):
    with pytest.raises(
        ValueError, match=f"must be None, 'softmax' or, where .* 'sigmoid'. Received: activation={activation}"
    ):
        check_labels(TextEncoder(classifier(size, activation=activation)), None)


def single(last):
    """A model with a single number as its output."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(13, 3, mask_zero=True)(ids))
    return randomize(keras.Model(ids, last(keras.layers.Dense(1)(x))), scale=2.0)


@pytest.mark.parametrize("last", [lambda x: x, keras.layers.Activation("sigmoid")])
def test_a_single_number_is_that_of_the_second_label(last):
    model, ids = single(last), np.array([[3, 1], [7, 2]], "int32")
    answer = classifier_outputs(TextEncoder(model), check_labels(TextEncoder(model), ["no", "yes"]))(ids)
    raw = to_numpy(model(ids)).astype("float64")[:, 0]
    yes = raw if isinstance(last, keras.layers.Layer) else 1 / (1 + np.exp(-raw))
    assert_close(answer["probabilities"], np.stack([1 - yes, yes], axis=1))
    assert [label.decode() for label in answer["label"].numpy()] == ["yes" if p > 0.5 else "no" for p in yes]


def test_a_single_number_of_which_nothing_tells_what_it_is_is_refused():
    model = single(lambda x: keras.layers.Average()([x, x]))
    with pytest.raises(
        ValueError, match="must end in a layer that tells whether its single number .* Received: output"
    ):
        check_labels(TextEncoder(model), ["no", "yes"])


@pytest.mark.parametrize("activation", ["softmax", None])
def test_an_average_of_heads_is_told_by_its_numbers(activation):
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(13, 3, mask_zero=True)(ids))
    heads = [keras.layers.Dense(3, activation=activation)(x) for _ in range(2)]
    model, rows = randomize(keras.Model(ids, keras.layers.Average()(heads)), scale=2.0), np.array([[3, 1]], "int32")
    answer = classifier_outputs(TextEncoder(model), check_labels(TextEncoder(model), None))(rows)
    raw = to_numpy(model(rows)).astype("float64")
    assert_close(answer["probabilities"], raw if activation else softmax(raw))


def test_outputs_with_the_names_of_answers_are_refused():
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 3, mask_zero=True)(ids)
    model = keras.Model(ids, {"logits": keras.layers.Dense(4)(x), "label": x})
    with pytest.raises(
        ValueError, match=r"must not have the names .*'label'.*, which `labels` adds. Received: outputs \['label'\]"
    ):
        check_labels(TextEncoder(model), list("wxyz"))


def test_the_number_of_classes_is_known():
    ids = keras.Input((None,), dtype="int32")
    weights = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Embedding(13, 3)(ids))[..., 0]
    encoder = TextEncoder(keras.Model(ids, {"logits": weights}))  # (B, T)
    for labels in (["a", "b"], None):
        with pytest.raises(ValueError, match=r"`labels` need an output .* output 'logits' of shape \(None, None\)"):
            check_labels(encoder, labels, multi_label_kind(encoder, encoder.model))


def test_labels_have_no_lone_surrogates():
    with pytest.raises(ValueError, match=r"`labels` must be strings .* UTF-8.* Received: labels=\['a', '\\ud800'\]"):
        check_labels(TextEncoder(classifier(2)), ["a", "\ud800"])


def test_labels_belong_to_the_one_output_or_to_the_logits():
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 3, mask_zero=True)(ids)
    two = {"a": keras.layers.Dense(4)(x), "b": x}
    with pytest.raises(
        ValueError, match=r"`labels` are for a model with one output .*'logits'. Received: outputs .*'a'"
    ):
        check_labels(TextEncoder(keras.Model(ids, two)), ["x"] * 4)
    named = TextEncoder(keras.Model(ids, {"logits": two["a"], "b": x}))
    assert check_labels(named, list("wxyz")) == list("wxyz")
    with pytest.raises(ValueError, match="a list of 4 different strings, .* Received: labels=\\['x'\\]"):
        check_labels(named, ["x"])
