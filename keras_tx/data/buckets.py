"""Elements of any length -> padded batches of similar length."""

from collections.abc import Callable, Sequence
from typing import Any

from keras_tx.checks import positive_int
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_LONGEST = 2**30


def bucket_by_length(
    dataset: Any,
    batch_size: int | Sequence[int] | None = None,
    *,
    max_tokens: int | None = None,
    boundaries: Sequence[int] = (16, 32, 64, 128, 256, 512),
    length: Callable | None = None,
    pad_to_boundary: bool = False,
    padding_values: Any = None,
    drop_remainder: bool = False,
) -> Any:
    """Batches elements of similar length together, each batch padded to its longest: less padding, less work.

    Every element comes out once. The order follows the data; shuffle before, and the batches are mixed too. The number
    of batches is not known beforehand, so with `.repeat()` give `fit` its `steps_per_epoch`.

    Args:
        dataset: a `tf.data.Dataset` of unpadded elements: `features` or `(features, label)` or `(features, label,
            sample_weight)`, where `features` is a rank-1 tensor, a tuple of them, or a dict of which some are named
            "token_ids", "source_ids" or otherwise end in "_ids".
        batch_size: of every bucket, or one for each boundary and one for longer elements.
        max_tokens: instead of `batch_size`: as many elements as keep the batch within so many tokens, padding included,
            and at least one. Batches of short elements have more of them, and every step has about the same work. Of
            source and target the longer one counts, so that a batch has at most so many tokens of each.
        boundaries: the longest element of each bucket. Longer elements go on in buckets of twice the last boundary,
            four times, and so on.
        length: how long an element is; called as the function of `Dataset.map` is. By default the longest of the
            features, in a dict of those that end in "_ids", "segment_ids" apart. Labels count for nothing.
        pad_to_boundary: pad to the boundary of the bucket, not only to the longest of the batch: then there are no more
            shapes than buckets, each of which `fit` compiles once.
        padding_values: as in `tf.data.Dataset.padded_batch`; 0 by default.
        drop_remainder: leave out the last, smaller batch of each bucket.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"`dataset` must be a tf.data.Dataset. Received: dataset={dataset!r}")
    bounds = _bounds(boundaries)
    sizes = _batch_sizes(batch_size, max_tokens, boundaries, bounds)
    if length is None:
        length = _longest(dataset.element_spec)
    return dataset.bucket_by_sequence_length(
        length,
        bucket_boundaries=[bound + 1 for bound in bounds],  # tf.data's boundaries are the first length outside
        bucket_batch_sizes=sizes,
        padding_values=padding_values,
        pad_to_bucket_boundary=pad_to_boundary,
        drop_remainder=drop_remainder,
    )


def _bounds(boundaries):
    """`boundaries`, and the last of them doubled on: tf.data refuses what it would have to pad beyond the last."""
    bounds = [positive_int("boundaries", bound) for bound in boundaries]
    if not bounds or any(low >= high for low, high in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"`boundaries` must be increasing positive integers. Received: boundaries={boundaries}")
    while bounds[-1] < _LONGEST:
        bounds.append(bounds[-1] * 2)
    return bounds


def _batch_sizes(batch_size, max_tokens, boundaries, bounds):
    """The size of a batch for each of `bounds`, and one more: tf.data wants it for what is longer than all of them."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            "One of `batch_size` and `max_tokens` must be given, and the other not. Received: "
            f"batch_size={batch_size}, max_tokens={max_tokens}"
        )
    if max_tokens is not None:
        return [max(1, positive_int("max_tokens", max_tokens) // bound) for bound in bounds] + [1]
    if not isinstance(batch_size, Sequence):
        return [positive_int("batch_size", batch_size)] * (len(bounds) + 1)
    sizes = [positive_int("batch_size", size) for size in batch_size]
    if len(sizes) != len(boundaries) + 1:
        raise ValueError(
            "`batch_size` must be an integer or hold one for each of `boundaries` and one more. Received: "
            f"batch_size={batch_size}, boundaries={boundaries}"
        )
    return sizes + sizes[-1:] * (len(bounds) + 1 - len(sizes))


def _longest(spec):
    """The function of an element that gives the length of its longest feature."""
    features = spec[0] if isinstance(spec, tuple) else spec
    names = None
    if isinstance(features, dict):
        names = [name for name in features if name.endswith("_ids") and name != "segment_ids"]
        if not names:
            raise ValueError(
                "An element of `dataset` must have 'token_ids', or 'source_ids' and 'target_ids', or `length` must be "
                f"given. Received: features {sorted(features)}"
            )

    def rows(features):
        return [features[name] for name in names] if names else features if isinstance(features, tuple) else [features]

    for row in rows(features):
        if getattr(row, "shape", None) is None or row.shape.rank not in (1, None):
            raise ValueError(f"The token ids of an element must be a tensor of rank 1, unbatched. Received: {row}")
    return lambda *element: tf.reduce_max([tf.size(row) for row in rows(element[0])])
