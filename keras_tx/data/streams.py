"""Datasets that are read from files again in each epoch, a part at a time, instead of from memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

BATCH = 1024  # rows that go from Python to tf.data at a time


def check_arguments(in_memory: Any, seed: int, num_shards: Any, shard_index: Any) -> None:
    """Raises if an argument is given that does nothing with this value of `in_memory`."""
    if not isinstance(in_memory, bool):
        raise TypeError(f"`in_memory` must be True or False. Received: in_memory={in_memory!r}")
    if in_memory and (num_shards, shard_index) != (None, None):
        raise ValueError(
            "`num_shards` and `shard_index` must be None unless `in_memory` is False. Received: "
            f"num_shards={num_shards!r}, shard_index={shard_index!r}"
        )
    if not in_memory and seed != 0:
        raise ValueError(
            "`seed` must be 0 if `in_memory` is False, because the rows keep the order of the files: shuffle them with "
            f"`.shuffle(...)`. Received: seed={seed!r}"
        )


def check_unread(rule: str, name_or_path: Any, **given: Any) -> None:
    """Raises if one of `given`, which nothing reads unless `name_or_path` follows `rule`, is not its default."""
    for name, value in given.items():
        default = True if name == "in_memory" else None
        if value is not default:
            raise ValueError(
                f"`{name}` must be {default} unless `name_or_path` names {rule}. Received: {name}={value!r}, "
                f"name_or_path={name_or_path!r}"
            )


def stream(make: Callable[[], Iterable[tuple[Any, ...]]], dtypes: Sequence[str], share: tuple[int, int]) -> Any:
    """A `tf.data.Dataset` of rows that `make()` gives in Python, one part of them for each worker.

    Args:
        make: a function that begins to read; each epoch calls it.
        dtypes: the dtype of each scalar in a row. With one dtype the elements are scalars, otherwise tuples.
        share: the number of workers and the index of this one, which gets every n-th row.
    """
    count, index = share

    def batches() -> Iterator[Any]:
        rows = islice(make(), index, None, count)
        while batch := list(islice(rows, BATCH)):
            arrays = zip(*batch, strict=True)
            found = [np.array(a, object if d == "string" else d) for a, d in zip(arrays, dtypes, strict=True)]
            yield found[0] if len(dtypes) == 1 else tuple(found)

    specs = [tf.TensorSpec([None], dtype) for dtype in dtypes]
    signature = specs[0] if len(dtypes) == 1 else tuple(specs)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature).unbatch()
    return of_worker(dataset, share)


def of_worker(dataset: Any, share: tuple[int, int]) -> Any:
    """Says to `tf.distribute` whether the dataset has only the rows of this worker or those of all."""
    policy = tf.data.experimental.AutoShardPolicy
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.OFF if share[0] > 1 else policy.DATA
    return dataset.with_options(options)


def part(
    rows: Iterable[Any], fraction: float, held_out: bool, key: Callable[[Any], Any] = lambda row: None
) -> Iterator[Any]:
    """Yields the rows that are held out, or the others.

    Args:
        rows: all rows.
        fraction: the fraction that is held out, spread evenly over the rows with the same key: 1 / n holds out one of
            each n.
        held_out: which of the two parts.
        key: a function from a row to its key, such as its label.
    """
    counts: Counter[Any] = Counter()
    for row in rows:
        kind = key(row)
        number = counts[kind]
        counts[kind] += 1
        # The last one of each n rows; products such as 100 * 0.29 fall just below an integer.
        if (int((number + 1) * fraction + 1e-9) > int(number * fraction + 1e-9)) == held_out:
            yield row
