"""Batches of elements of similar length, with little padding."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from keras_tx.checks import boolean, positive_int
from keras_tx.data.padding_rows import fill_batches
from keras_tx.internals import keras_training
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_MAX_LENGTH = 2**30


def bucket_by_length(
    dataset: Any,
    batch_size: int | Sequence[int] | np.ndarray | None = None,
    *,
    max_tokens: int | None = None,
    boundaries: Sequence[int] = (16, 32, 64, 128, 256, 512),
    length: Callable[..., Any] | None = None,
    pad_to_boundary: bool = False,
    padding_values: Any = None,
    drop_remainder: bool = False,
    multiple_of: int | None = None,
) -> Any:
    """Batches elements of similar length together and pads each batch to its longest element, to save padding.

    Every element is used once. The order follows the dataset; to shuffle the batches, shuffle the dataset before. The
    number of batches is not known beforehand: with `.repeat()` pass `steps_per_epoch` to `fit`, and for a progress bar
    with an end in the first epoch set it with `tf.data.experimental.assert_cardinality`.

    Args:
        dataset: a `tf.data.Dataset` of unpadded elements `features`, `(features, labels)` or `(features, labels,
            sample_weight)`. `features` is a tensor of rank 1, a tuple of them, or a dictionary; token ids in a
            dictionary have names that end in "_ids", such as "token_ids" or "source_ids".
        batch_size: the number of elements in a batch; or a list with one number for each bucket and one more for
            elements longer than the last boundary.
        max_tokens: instead of `batch_size`, the largest number of tokens in a batch, padding tokens included. A batch
            has as many elements as fit if each is as long as the boundary of its bucket, and at least one. For pairs of
            source and target, it limits each of the two.
        boundaries: the largest length in each bucket, ascending. Longer elements go to additional buckets of twice the
            last boundary, four times the last boundary, and so on.
        length: a function that returns the length of an element, an integer; it gets the same arguments as the function
            of `Dataset.map`. None: the length of the longest feature; in a dictionary only names that end in "_ids"
            count, but not "segment_ids". Labels never count.
        pad_to_boundary: whether to pad to the boundary of the bucket instead of the longest element of the batch.
            Batches then have only one shape per bucket, and `fit` compiles once for each bucket.
        padding_values: as in `tf.data.Dataset.padded_batch`; None pads with 0.
        drop_remainder: whether to drop the last batch of each bucket if it is not full.
        multiple_of: the size of every batch is made a multiple of this number, with rows of padding of the sample
            weight 0, so that several devices share it evenly; see `fill_batches`. The elements then need labels. Rows
            of padding count in `max_tokens`, but a bucket with a boundary above `max_tokens / multiple_of` has batches
            of `multiple_of` rows, which exceed it.

    Returns:
        A `tf.data.Dataset` of batches, with the structure of `dataset`.

    Raises:
        TypeError: `dataset` is not a `tf.data.Dataset`, `length` is not a function that returns an integer, or
            `pad_to_boundary` or `drop_remainder` is not a boolean.
        ValueError: an argument is wrong, or neither or both of `batch_size` and `max_tokens` are given.

    Examples:
        >>> import tensorflow as tf
        >>> texts = tf.ragged.constant([[1, 2], [3, 4, 5, 6], [7], [8, 9, 10]], dtype="int32")
        >>> dataset = tf.data.Dataset.from_tensor_slices(texts).map(lambda ids: ids)
        >>> for batch in keras_tx.data.bucket_by_length(dataset, 2, boundaries=(2, 4)):
        ...     print(batch.numpy().tolist())
        [[1, 2], [7, 0]]
        [[3, 4, 5, 6], [8, 9, 10, 0]]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"`dataset` must be a tf.data.Dataset. Received: dataset={dataset!r}")
    keras_training.let_data_end()
    extended = _extended_boundaries(boundaries)
    multiple_of = positive_int("multiple_of", multiple_of, none=True)
    sizes = _batch_sizes(batch_size, max_tokens, boundaries, extended)
    if max_tokens is not None and multiple_of is not None:  # otherwise rows of padding would be added to a full batch
        sizes = [max(size // multiple_of, 1) * multiple_of for size in sizes]
    if length is None:
        length = _longest_feature(dataset.element_spec)
    if not callable(length):
        raise TypeError(f"`length` must be a function of an element, or None. Received: length={length!r}")
    padding_values = tf.nest.map_structure(_python_number, padding_values)
    batches = dataset.bucket_by_sequence_length(
        partial(_checked_length, length),
        bucket_boundaries=[bound + 1 for bound in extended],  # tf.data's boundary is the first length outside a bucket
        bucket_batch_sizes=sizes,
        padding_values=padding_values,
        pad_to_bucket_boundary=boolean("pad_to_boundary", pad_to_boundary),
        drop_remainder=boolean("drop_remainder", drop_remainder),
    )
    return batches if multiple_of is None else fill_batches(batches, multiple_of, padding_values=padding_values)


def _checked_length(length: Callable[..., Any], *element: Any) -> Tensor:
    """The length of an element by the function `length`, in int32."""
    found = length(*element)
    size = tf.convert_to_tensor(found)
    if not size.dtype.is_integer or size.shape.num_elements() not in (1, None):
        raise TypeError(f"`length` must return an integer for each element. Received: {found!r}")
    return tf.cast(size, "int32")


def _python_number(value: Any) -> Any:
    """Converts NumPy numbers, whose dtype would have to equal that of the padded tensor, to Python numbers."""
    return value.item() if isinstance(value, np.generic) and not isinstance(value, (np.str_, np.bytes_)) else value


def _extended_boundaries(boundaries: Sequence[int]) -> list[int]:
    """`boundaries` and further ones, each twice the one before: tf.data can only pad to boundaries that exist."""
    is_list = isinstance(boundaries, (Sequence, np.ndarray)) and not isinstance(boundaries, str)
    extended: list[int] = [positive_int("boundaries", bound) for bound in boundaries] if is_list else []
    if not extended or any(low >= high for low, high in zip(extended, extended[1:], strict=False)):
        raise ValueError(f"`boundaries` must be increasing positive integers. Received: boundaries={boundaries}")
    while extended[-1] < _MAX_LENGTH:
        extended.append(extended[-1] * 2)
    return extended


def _batch_sizes(batch_size: Any, max_tokens: Any, boundaries: Sequence[int], extended: list[int]) -> list[int]:
    """The batch size for each of the `extended` boundaries, and one more, which tf.data needs for longer elements."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            "Exactly one of `batch_size` and `max_tokens` must be given. Received: "
            f"batch_size={batch_size}, max_tokens={max_tokens}"
        )
    if max_tokens is not None:
        return [max(1, positive_int("max_tokens", max_tokens) // bound) for bound in extended] + [1]
    if not isinstance(batch_size, (Sequence, np.ndarray)):
        return [positive_int("batch_size", batch_size)] * (len(extended) + 1)
    sizes = [positive_int("batch_size", size) for size in batch_size]
    if len(sizes) != len(boundaries) + 1:
        raise ValueError(
            "`batch_size` must be an integer, or a list with one for each of `boundaries` and one more. Received: "
            f"batch_size={batch_size}, boundaries={boundaries}"
        )
    return sizes + sizes[-1:] * (len(extended) + 1 - len(sizes))


def _longest_feature(spec: Any) -> Callable[..., Any]:
    """Returns a function from an element to the length of its longest feature."""
    features = spec[0] if isinstance(spec, tuple) else spec
    names: list[str] = []
    if isinstance(features, dict):
        names = [name for name in features if name.endswith("_ids") and name != "segment_ids"]
        if not names:
            raise ValueError(
                "An element of `dataset` must have 'token_ids', or 'source_ids' and 'target_ids', or `length` must be "
                f"given. Received: features {sorted(features)}"
            )

    def sequences(features: Any) -> Sequence[Any]:
        if isinstance(features, dict):
            return [features[name] for name in names]
        return features if isinstance(features, tuple) else [features]

    for sequence in sequences(features):
        if getattr(sequence, "shape", None) is None or sequence.shape.rank not in (1, None):
            raise ValueError(f"The token ids of an element must be a tensor of rank 1, unbatched. Received: {sequence}")
    return lambda *element: tf.reduce_max([tf.size(sequence) for sequence in sequences(element[0])])
