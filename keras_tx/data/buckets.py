"""Elements of any length -> padded batches of similar length."""

from collections.abc import Callable, Sequence
from typing import Any

from keras_tx.checks import positive_int
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_LONGEST = 2**30


def bucket_by_length(
    dataset: Any,
    batch_size: int | Sequence[int],
    *,
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
            sample_weight)`, where `features` is a dict of rank-1 tensors with "token_ids" among them, or a rank-1
            tensor.
        batch_size: of every bucket, or one for each boundary and one for longer elements.
        boundaries: the longest element of each bucket. Longer elements go on in buckets of twice the last boundary,
            four times, and so on.
        length: how long an element is; called as the function of `Dataset.map` is. The number of token ids by default.
        pad_to_boundary: pad to the boundary of the bucket, not only to the longest of the batch: then there are no more
            shapes than buckets, each of which `fit` compiles once.
        padding_values: as in `tf.data.Dataset.padded_batch`; 0 by default.
        drop_remainder: leave out the last, smaller batch of each bucket.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"`dataset` must be a tf.data.Dataset. Received: dataset={dataset!r}")
    bounds = _bounds(boundaries)
    if isinstance(batch_size, Sequence):
        sizes = [positive_int("batch_size", size) for size in batch_size]
        if len(sizes) != len(boundaries) + 1:
            raise ValueError(
                "`batch_size` must be an integer or hold one for each of `boundaries` and one more. Received: "
                f"batch_size={batch_size}, boundaries={boundaries}"
            )
        sizes += sizes[-1:] * (len(bounds) + 1 - len(sizes))
    else:
        sizes = [positive_int("batch_size", batch_size)] * (len(bounds) + 1)
    if length is None:
        _check_tokens(dataset.element_spec)
    return dataset.bucket_by_sequence_length(
        length or _count_tokens,
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


def _check_tokens(spec):
    features = spec[0] if isinstance(spec, tuple) else spec
    if isinstance(features, dict):
        if "token_ids" not in features:
            raise ValueError(
                "An element of `dataset` must have 'token_ids', or `length` must be given. Received: features "
                f"{sorted(features)}"
            )
        features = features["token_ids"]
    if getattr(features, "shape", None) is None or features.shape.rank not in (1, None):
        raise ValueError(f"The token ids of an element must be a tensor of rank 1, unbatched. Received: {features}")


def _count_tokens(*element):
    features = element[0]
    return tf.size(features["token_ids"] if isinstance(features, dict) else features)
