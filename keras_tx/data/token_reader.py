"""Batches of the token ids that `write_tokens` wrote: shuffled, by worker, and from any step on."""

from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.data import splits, streams, token_files, workers
from keras_tx.data.token_source import PARALLEL, TokenSource, repeated
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

LARGEST = 2**63 - 1  # of TensorFlow's integers, and so of the seeds of its random numbers


def read_tokens(
    directory: str | PathLike[str],
    batch_size: int | Sequence[int] | None = None,
    *,
    length: int | None = None,
    max_tokens: int | None = None,
    boundaries: Sequence[int] = (16, 32, 64, 128, 256, 512),
    next_tokens: bool | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epoch: Any = 0,
    start: Any = 0,
    steps: int | None = None,
    tokenizer: Any = None,
    num_shards: int | None = None,
    shard_index: int | None = None,
) -> Any:
    """Reads batches of token ids from a folder that `write_tokens` wrote.

    With `length`, texts are packed: those of an epoch are put one after the other and cut into rows of `length` tokens,
    so that only the last rows have padding. A text that is cut is two documents in its two rows, and the label of
    the last token before a cut is the first one after it. The elements are those of `pack_sequences`, batched. For rows
    of undivided texts use `pack_sequences` on the elements that come without `length` and `batch_size`.

    Without `length`, `batch_size` or `max_tokens` gives batches of texts of similar length, as `bucket_by_length` does;
    without all three, the elements are single texts.

    The order of an epoch depends on `seed` and `epoch` alone. Training that is interrupted goes on at any batch with
    `start`, and with `Resume.dataset(lambda epoch: read_tokens(..., epoch=epoch))`.

    Args:
        directory: the folder.
        batch_size: the number of rows in a batch; without `length` also a list with a number for each bucket, see
            `bucket_by_length`. In `fit` under a `tf.distribute` strategy or a JAX distribution it is the global one. If
            each of several workers has a part of the data, under `tf.distribute` each worker reads a batch of this size
            from its part, and uses it up in as many steps as there are workers.
        length: packs texts into rows of this many tokens; only for texts without labels.
        max_tokens: instead of `batch_size` and `length`: the largest number of tokens in a batch; see
            `bucket_by_length`.
        boundaries: the largest length in each bucket; see `bucket_by_length`.
        next_tokens: True gives labels for `CausalLM` and `Seq2Seq`: the label of each token of a text is the next
            token, and that of the last one is padding. For pairs, the labels are the target without its first token,
            and "target_ids" lacks the last one. Padding is the `pad_id` of the tokenizer; give it to the loss and
            metrics as `padding_id`. False gives features alone, for `mask_tokens`. None: True, except for texts with
            labels.
        shuffle: whether to shuffle blocks of texts, and texts within about 2 million tokens.
        seed: an integer from 0 to 2**63 - 1 that decides the order.
        epoch: the number of the epoch, an integer or a scalar tensor. Each has another order.
        start: the number of batches (or elements, without batches) to leave out at the beginning of the epoch, an
            integer or a scalar tensor. Packed rows that are left out are not read; other batches are read and dropped.
        steps: the number of batches in an epoch. If there are fewer, texts are used again in another order. The next
            epoch of packed rows continues where this one ended. None: an epoch has every text once. Required for
            batches of similar length if several workers read them, because all need the same number. If `steps` is
            given, each worker must have texts.
        tokenizer: the tokenizer, or the two of pairs, that the ids must come from. None: it is not checked.
        num_shards: the number of workers that share the files, which must divide the number of files. None: what
            TF_CONFIG says, or the number of processes of `torch.distributed` or JAX; otherwise one. With 1, all workers
            read all files, and `tf.distribute` gives each its rows of every batch. So does a `keras.distribution` with
            `auto_shard_dataset=True`, the default: if it is set before, None means 1. With `auto_shard_dataset=False`
            each process has a part, and batches of the size given here.
        shard_index: the part of this worker, from 0; given together with `num_shards`.

    Returns:
        A `tf.data.Dataset`. Packed: `({"token_ids", "document_ids", "positions"}, labels)`, int32 (batch_size, length).
        Texts: `({"token_ids"}, labels)`; with labels `({"token_ids"}, label)`; pairs: `({"source_ids", "target_ids"},
        labels)`. If all workers read all files, the number of batches is known for packed rows, and for every kind if
        `steps` is given.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: an argument is not valid; the folder holds something else, an unfinished write, files that are
            damaged, or the ids of another tokenizer. A block whose bytes have changed raises `tf.errors.DataLossError`
            when it is read, and one of another write `tf.errors.InvalidArgumentError`.

    Examples:
        >>> tokenizer = keras_tx.text.CharacterTokenizer.train(["abc"], cls_token=None)
        >>> _ = keras_tx.data.write_tokens(["abc", "b", "ca"], tokenizer, "ids", num_shards=1, verbose=0)
        >>> for features, labels in keras_tx.data.read_tokens("ids", 2, length=5, shuffle=False):
        ...     print(features["token_ids"].numpy().tolist(), labels.numpy().tolist())
        [[3, 4, 5, 2, 4], [2, 5, 3, 2, 0]] [[4, 5, 2, 0, 2], [0, 3, 2, 0, 0]]
        >>> texts = keras_tx.data.read_tokens("ids", next_tokens=False, epoch=3)
        >>> sorted(len(features["token_ids"]) for features in texts)
        [2, 3, 4]
        >>> resume = keras_tx.training.Resume("runs/lm")
        >>> batches = resume.dataset(lambda epoch: keras_tx.data.read_tokens("ids", 1, length=4, epoch=epoch))
        >>> len(batches)
        3
    """
    order = splits.check_seed(seed, most=LARGEST) if checks.boolean("shuffle", shuffle) else None
    epoch, start = _count("epoch", epoch), _count("start", start)
    index = token_files.read_index(directory)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, index, directory)
    length = checks.positive_int("length", length, none=True)
    steps = checks.positive_int("steps", steps, none=True)
    count, worker = workers.share(num_shards, shard_index)
    if index["num_shards"] % count:
        raise ValueError(
            "The number of files must be a multiple of the number of workers; otherwise pass `num_shards=1, "
            f"shard_index=0`. Received: {count} workers, {index['num_shards']} files in {str(directory)!r}"
        )
    labelled = _check_next_tokens(next_tokens, index["kind"])
    source = TokenSource(Path(directory), index, (count, worker), order, labelled)
    idle = source.workers_without_texts()
    if steps is not None and idle:  # in every worker, so that none waits for one that stopped
        raise ValueError(
            "Each worker must have texts if `steps` is given. Write at least as many texts as files, use fewer workers "
            f"or give `num_shards=1, shard_index=0`. Received: steps={steps}, {count} workers, no texts for worker "
            f"{idle[0]}: {str(directory)!r} has {len(source.blocks)} blocks of texts in {index['num_shards']} files"
        )
    batches = steps
    if length is not None:
        batch_size = _check_packed(index["kind"], batch_size, max_tokens)
        dataset = source.packed(batch_size, length, epoch, start, steps)
        batches = steps or source.batches(batch_size, length)
    elif batch_size is None and max_tokens is None:
        dataset = repeated(source.texts, epoch, start, steps)
    else:
        if count > 1 and steps is None:
            raise ValueError(
                "`steps` must be given for batches of similar length on several workers, which need the same number of "
                f"batches. Received: steps=None, {count} workers"
            )
        options = {"max_tokens": max_tokens, "boundaries": boundaries}
        dataset = repeated(partial(source.bucketed, batch_size, options), epoch, start, steps)
    # What `fit` runs on several workers has more steps than this dataset has batches.
    if batches is not None and count == 1 and isinstance(start, int):
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(max(0, batches - start)))
    return streams.of_worker(dataset.prefetch(PARALLEL), (count, worker))


def _check_tokenizer(tokenizer: Any, index: dict[str, Any], directory: Any) -> None:
    for name, one in token_files.tokenizers_of(tokenizer, tuple(index["features"])).items():
        if token_files.fingerprint(one) != index["tokenizers"][name]:
            raise ValueError(
                "`tokenizer` must be the one that the tokens were written with. Received: another "
                f"{type(one).__name__} than for the {name!r} in {str(directory)!r}"
            )


def _check_next_tokens(next_tokens: Any, kind: str) -> bool:
    checks.boolean("next_tokens", next_tokens, none=True)
    if next_tokens and kind == "labels":
        raise ValueError("`next_tokens` must not be True for texts with labels. Received: next_tokens=True")
    return kind != "labels" if next_tokens is None else bool(next_tokens)


def _check_packed(kind: str, batch_size: Any, max_tokens: Any) -> int:
    if kind != "text":
        raise ValueError(
            "`length` must be None for texts with labels and for pairs, which cannot be divided. Received: tokens of "
            f"{kind}"
        )
    if batch_size is None or max_tokens is not None:
        raise ValueError(
            "`batch_size` must be given with `length`, and `max_tokens` must not. Received: "
            f"batch_size={batch_size}, max_tokens={max_tokens}"
        )
    return int(checks.positive_int("batch_size", batch_size))


def _count(name: str, value: Any) -> Any:
    """An integer as it is, a scalar tensor as int64."""
    is_scalar = tf.is_tensor(value) and value.dtype.is_integer and value.shape.rank in (0, None)
    if is_scalar and (tf.is_symbolic_tensor(value) or value >= 0):  # a tensor of a graph has no value yet
        return tf.cast(value, "int64")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= LARGEST:
        raise ValueError(
            f"`{name}` must be an integer from 0 to {LARGEST}, or a scalar tensor. Received: {name}={value!r}"
        )
    return int(value)
