"""Batches filled up with rows of padding, so that their size is a multiple of a number: (B, ...) -> (M, ...)."""

from typing import Any

import keras
import numpy as np

from keras_tx.checks import positive_int
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

PADDING_ROW_WEIGHT = -0.0  # the sample weight of a row of padding: 0 in every sum, and known by its sign


def fill_batches(dataset: Any, multiple_of: int, *, padding_values: Any = None) -> Any:
    """Fills every batch up with rows of padding, so that its size is a multiple of `multiple_of`.

    Several devices share a batch evenly then, also the last one of an epoch and those of `bucket_by_length`. No example
    is lost, and the rows of padding count nothing: their sample weight is -0.0, which equals 0. By its sign the models
    of this package, `PaddedCrossentropy`, `PaddedAccuracy` and `Perplexity` tell added rows from examples of weight 0,
    and leave the added rows out of all losses and metrics, also out of Keras' own metrics. In other models Keras'
    losses divide by the number of all rows, unless they have `reduction="mean_with_sample_weight"`; only
    `weighted_metrics` use weights.

    Under a strategy of `tf.distribute`, and on JAX under `keras.distribution`, `fit`, `evaluate` and `predict` of the
    models of this package and of loaded checkpoints do this by themselves.

    Args:
        dataset: a `tf.data.Dataset` of batches (features, labels) or (features, labels, sample_weight), of dense
            tensors with the examples along the first axis.
        multiple_of: such as the number of devices. With the batch size, the last batch is full, too.
        padding_values: as in `tf.data.Dataset.padded_batch`: one number for everything, or numbers in the structure of
            a batch, or of its (features, labels); None, also for one tensor, pads with 0.

    Returns:
        A `tf.data.Dataset` of batches (features, labels, sample_weight). Weights that `dataset` lacks, for all outputs
        or for some, are added: (B,), 1 for each example.

    Raises:
        TypeError: `dataset` is not a `tf.data.Dataset`, or has ragged or sparse tensors.
        ValueError: `multiple_of` is not a positive integer, `padding_values` have another structure, or the batches are
            not (features, labels) or (features, labels, sample_weight).

    Examples:
        >>> import tensorflow as tf
        >>> dataset = tf.data.Dataset.from_tensor_slices(([[1, 2], [3, 4], [5, 6]], [0, 1, 1])).batch(2)
        >>> for features, labels, sample_weight in keras_tx.data.fill_batches(dataset, 2):
        ...     print(features.numpy().tolist(), labels.numpy(), np.abs(sample_weight))
        [[1, 2], [3, 4]] [0 1] [1. 1.]
        [[5, 6], [0, 0]] [1 0] [1. 0.]
    """
    multiple_of = positive_int("multiple_of", multiple_of)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"`dataset` must be a tf.data.Dataset. Received: dataset={dataset!r}")
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            "The batches of `dataset` must be (features, labels) or (features, labels, sample_weight), because rows of "
            f"padding need a weight. Received: {spec}"
        )
    for one in [*tf.nest.flatten(spec[:2]), *_given(spec[2:])]:
        if not isinstance(one, tf.TensorSpec) or one.shape.rank == 0:
            raise TypeError(
                f"The batches of `dataset` must be of dense tensors, one row for each example. Received: {one}"
            )

    values = padding_values if isinstance(padding_values, tuple) else (padding_values,) * 2
    if isinstance(padding_values, (list, dict)) or len(values) not in (2, len(spec)):
        raise ValueError(
            "`padding_values` must be a number, None, or a tuple of those of features and labels, or of all parts of a "
            f"batch. Received: padding_values={padding_values!r}, batches of {len(spec)} parts"
        )

    def fill(x: Any, y: Any, sample_weight: Any = None) -> Any:
        size = tf.shape(tf.nest.flatten(x)[0])[0]
        missing = -size % multiple_of

        def as_floats(weights: Any) -> Tensor:
            if weights is None:
                return tf.ones([size])
            return weights if weights.dtype.is_floating else tf.cast(weights, "float32")

        weights = tf.nest.map_structure(as_floats, sample_weight)
        return (
            _padded(x, missing, values[0]),
            _padded(y, missing, values[1]),
            tf.nest.map_structure(lambda one: _with_rows(one, missing, PADDING_ROW_WEIGHT), weights),
        )

    return dataset.map(fill, num_parallel_calls=tf.data.AUTOTUNE)


def fill_arrays(multiple_of: int, x: Any, y: Any = None, sample_weight: Any = None) -> tuple[Any, Any, Any]:
    """A batch of arrays, filled up with rows of zeros, and its sample weights."""
    size = len(next(one for one in keras.tree.flatten(x) if one is not None))
    missing = -size % multiple_of

    def filled(values: Any, padding: float = 0) -> Any:
        if values is None:
            return None
        values = keras.ops.convert_to_numpy(values)
        return np.concatenate([values, np.full((missing, *values.shape[1:]), padding, values.dtype)])

    def weights(values: Any) -> Any:
        values = np.ones(size, "float32") if values is None else values
        values = keras.ops.convert_to_numpy(values)
        return filled(values if values.dtype.kind == "f" else values.astype("float32"), PADDING_ROW_WEIGHT)

    return (
        *(keras.tree.map_structure(filled, one) for one in (x, y)),
        keras.tree.map_structure(weights, sample_weight),
    )


def filled_rows(sample_weight: Any) -> Any:
    """Which rows of a batch in a `tf.data.Dataset` are of padding, by their weights: booleans (B,), or False for none.

    Keras may have any backend.
    """
    given = [one for one in tf.nest.flatten(sample_weight) if one is not None]
    if not given:
        return False
    weights = tf.cast(given[0], "float32")
    is_filled = (weights == 0) & (tf.bitcast(weights, "int32") < 0)
    return tf.reduce_all(is_filled, axis=list(range(1, weights.shape.rank)))


def _padded(tensors: Any, missing: Tensor, values: Any) -> Any:
    if not tf.nest.is_nested(values):
        values = tf.nest.map_structure(lambda _: values, tensors)
    return tf.nest.map_structure(lambda one, value: _with_rows(one, missing, value), tensors, values)


def _with_rows(tensor: Tensor, missing: Tensor, value: Any) -> Tensor:
    """`tensor` and `missing` more rows of `value`; None stands for 0 or ""."""
    value = 0 if value is None else value
    shape = tf.concat([[missing], tf.shape(tensor)[1:]], axis=0)
    if tensor.dtype == tf.string:
        value = value or ""
    rows = tf.fill(shape, tf.cast(value, tensor.dtype) if tensor.dtype != tf.string else value)
    return tf.ensure_shape(tf.concat([tensor, rows], axis=0), [None, *tensor.shape[1:]])


def _given(specs: Any) -> list[Any]:
    """The specs of what is not None."""
    return [one for one in tf.nest.flatten(specs) if one != tf.type_spec_from_value(None)]
