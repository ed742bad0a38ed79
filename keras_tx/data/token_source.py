"""The blocks of token ids of one worker, as datasets of packed rows, of batches of similar length, or of single texts.

The order is a function of (seed, pass over the data): blocks are permuted, and documents within windows of blocks. All
of it runs in tf.data operations, also where the number of the epoch is a tensor, as in `Resume.dataset`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from keras_tx.data import token_files
from keras_tx.data.token_buckets import bucketed
from keras_tx.data.token_encoder import FRAMING
from keras_tx.data.token_files import FINGERPRINT, OFFSET, SHARD, TOKENS
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

WINDOW = 32  # blocks whose documents are shuffled together, about 2 million tokens
BUFFER = 2**17  # bytes that are read at a time
PARALLEL = 2  # blocks that are read, and windows that are prepared, at the same time


class TokenSource:
    """The blocks of one worker.

    Args:
        folder: the folder of the files.
        index: the content of index.json.
        share: the number of workers and the index of this one.
        seed: decides the order; None keeps that of the files.
        next_tokens: whether the labels are one token ahead.
    """

    def __init__(
        self, folder: Path, index: dict[str, Any], share: tuple[int, int], seed: int | None, next_tokens: bool
    ):
        self.folder, self.index, self.share, self.seed, self.next_tokens = folder, index, share, seed, next_tokens
        self.blocks = token_files.read_blocks(folder, index)  # (blocks, columns)
        self.mine = self.blocks[self.blocks[:, SHARD] % share[0] == share[1]]
        names = [token_files.shard_name(shard, len(index["sizes"])) for shard in range(len(index["sizes"]))]
        self.paths = [str(folder / name) for name in names]

    def workers_without_texts(self) -> list[int]:
        """The indices of the workers whose files have no texts."""
        return sorted(set(range(self.share[0])) - set((self.blocks[:, SHARD] % self.share[0]).tolist()))

    def batches(self, batch_size: int, length: int) -> int:
        """The number of batches of packed rows in a pass over the data, the same for all workers."""
        count, shards = self.share[0], self.blocks[:, SHARD]
        tokens = [int(self.blocks[shards % count == i, TOKENS].sum()) for i in range(count)]
        return -(-max(tokens) // (batch_size * length))

    def packed(self, batch_size: int, length: int, epoch: Any, start: Any, steps: int | None) -> Any:
        """The batches of packed rows of an epoch."""
        whole = self.batches(batch_size, length)
        epoch, start = tf.cast(epoch, "int64"), tf.cast(start, "int64")
        if steps is None:
            return self._packed_pass(batch_size, length, epoch, tf.minimum(start, whole))
        first = epoch * steps + start  # the number of the batch since the beginning of the training

        def of_pass(number: Any) -> Any:
            return self._packed_pass(batch_size, length, number, tf.maximum(first - number * whole, 0))

        passes = tf.data.Dataset.range(first // whole, tf.int64.max)
        return passes.flat_map(of_pass).take(tf.maximum(steps - start, 0))

    def _packed_pass(self, batch_size: int, length: int, number: Any, start: Any) -> Any:
        """The batches from `start` on of one pass over the data."""
        tokens, padding = batch_size * length, self.index["padding_ids"]["token_ids"]
        order = self._order(number)
        counts = tf.gather(tf.constant(self.mine[:, TOKENS]), order)
        limits = tf.cumsum(counts)[WINDOW - 1 :: WINDOW]  # the number of tokens up to the end of each whole window
        skipped = start * tokens
        window = tf.searchsorted(limits, [skipped], side="right", out_type=tf.int64)[0]
        before = tf.concat([[tf.constant(0, "int64")], limits], 0)[window]

        def flat(number_of_window: Any, documents: Any) -> Any:
            ids, lengths = documents["token_ids"].values, documents["token_ids"].row_lengths()
            begins = (tf.cumsum(lengths) - lengths)[:, None]
            starts = tf.scatter_nd(begins, tf.ones_like(lengths, "int32"), tf.shape(ids, "int64"))
            ends = tf.concat([starts[1:], [1]], 0)
            labels = tf.where(ends > 0, padding, tf.concat([ids[1:], ids[:1]], 0))
            cut = tf.where(number_of_window == window, skipped - before, 0)
            return ids[cut:], starts[cut:], labels[cut:]

        windows = self._windows(order, window, number).map(flat, num_parallel_calls=PARALLEL, deterministic=True)
        rows = windows.rebatch(tokens).map(partial(_packed_rows, batch_size, length, padding))
        mine = -(-int(self.mine[:, TOKENS].sum()) // tokens)
        missing = self.batches(batch_size, length) - tf.maximum(start, mine)
        empty = tf.fill([batch_size, length], padding), tf.zeros([batch_size, length], "int32")
        features = {"token_ids": empty[0], "document_ids": empty[1], "positions": empty[1]}
        padding_rows = tf.data.Dataset.from_tensors((features, empty[0])).repeat(tf.maximum(missing, 0))
        if not self.next_tokens:
            rows, padding_rows = (part.map(lambda features, _: features) for part in (rows, padding_rows))
        return rows.concatenate(padding_rows)

    def bucketed(self, batch_size: Any, options: dict[str, Any], key: Any) -> Any:
        """Batches of texts of similar length."""
        ids = self.index["padding_ids"]
        padding: Any = {name: ids[name] for name in self.index["features"]}
        if self.next_tokens:
            padding = padding, list(padding.values())[-1]
        elif self.index["kind"] == "labels":
            padding = padding, 0
        return bucketed(self._texts(key), batch_size, **options, padding=padding)

    def texts(self, number: Any) -> Any:
        """Single texts."""
        # After `map`, rows are plain tensors instead of ragged ones.
        return self._texts(number).unbatch().map(lambda *parts: parts if len(parts) > 1 else parts[0])

    def _texts(self, number: Any) -> Any:
        """Windows of texts, ragged, with their labels."""

        def element(_: Any, documents: Any) -> Any:
            labels = documents.pop("labels", None)
            if labels is not None:
                return documents, labels
            if not self.next_tokens:
                return documents
            if "target_ids" in documents:
                target = documents["target_ids"]
                return documents | {"target_ids": target[:, :-1]}, target[:, 1:]
            ids = documents["token_ids"]
            ended = tf.concat([ids, tf.fill([ids.nrows(), 1], self.index["padding_ids"]["token_ids"])], 1)
            return documents, ended[:, 1:]

        windows = self._windows(self._order(number), tf.constant(0, "int64"), number)
        return windows.map(element, num_parallel_calls=PARALLEL, deterministic=True)

    def _seed(self, number: Any) -> Any:
        return tf.stack([tf.constant(self.seed, "int64"), tf.cast(number, "int64")])

    def _order(self, number: Any) -> Any:
        """The blocks in the order of a pass."""
        blocks = tf.range(len(self.mine), dtype="int64")
        return blocks if self.seed is None else tf.random.experimental.stateless_shuffle(blocks, self._seed(number))

    def _windows(self, order: Any, first: Any, number: Any) -> Any:
        """Elements (number of the window, its documents), from the window `first` on."""
        names = list(self.index["features"])
        blocks = tf.data.Dataset.from_tensor_slices(order[first * WINDOW :])
        options = {"num_parallel_calls": PARALLEL, "deterministic": True}
        blocks = blocks.interleave(self._read, cycle_length=PARALLEL, **options).map(self._parse)

        def shuffled(window: Any, parts: Any) -> Any:
            documents = {
                name: tf.RaggedTensor.from_row_lengths(
                    parts[name].values, tf.cast(parts[f"{name}/lengths"].values, "int64"), validate=False
                )
                for name in names
            }
            if "labels" in parts:
                documents["labels"] = parts["labels"].values
            if self.seed is not None:
                count = tf.size(parts[f"{names[0]}/lengths"].values)
                seed = tf.random.experimental.stateless_fold_in(self._seed(number), window + 1)
                places = tf.random.experimental.stateless_shuffle(tf.range(count), seed)
                documents = {name: tf.gather(values, places) for name, values in documents.items()}
            return window, documents

        return blocks.ragged_batch(WINDOW).enumerate(start=first).map(shuffled, **options)

    def _read(self, block: Any) -> Any:
        """The bytes of a block, which stands in the middle of a file; with the row of the block and the file."""
        row = tf.gather(tf.constant(self.mine), block)
        path = tf.gather(tf.constant(self.paths), row[SHARD])
        # `tf.data.TFRecordDataset` has no argument for the place of the first record.
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path],
            compression_type="",
            buffer_size=tf.constant(BUFFER, "int64"),
            byte_offsets=[row[OFFSET] - FRAMING[0]],
        )
        record = tf.data.experimental.from_variant(variant, tf.TensorSpec([], "string")).take(1)
        return record.map(lambda data: (row, path, data))

    def _parse(self, row: Any, path: Any, data: Any) -> Any:
        """The ids and lengths of a block, after a check that the bytes are those that were written."""
        found = tf.bitcast(tf.fingerprint([data]), "int64")[0]
        rule = (
            "Every file in `directory` must be as it was written; write the tokens again. Received: a damaged block in"
        )
        check = tf.debugging.Assert(found == row[FINGERPRINT], [rule, path])
        with tf.control_dependencies([check] if check is not None else []):
            data = tf.identity(data)
        dtypes = {"labels": "int32"} if self.index["kind"] == "labels" else {}
        for name, dtype in self.index["features"].items():
            dtypes |= {name: dtype, f"{name}/lengths": "int32"}
        wanted = {name: tf.io.FixedLenFeature([], "string") for name in dtypes}
        parts = tf.io.parse_single_example(data, wanted)
        return {name: tf.cast(tf.io.decode_raw(parts[name], dtype), "int32") for name, dtype in dtypes.items()}


def repeated(make: Callable[[Any], Any], epoch: Any, start: Any, steps: int | None) -> Any:
    """The elements of an epoch from `start` on; if they are fewer than `steps`, also those of other orders."""
    if steps is None:
        # Within a graph, that of `flat_map`: elsewhere TensorFlow never frees the function of a `Dataset.scan`.
        return tf.data.Dataset.from_tensors(tf.cast(epoch, "int64")).flat_map(make).skip(start)
    # A pass that begins an epoch has the number of the epoch; no epoch has a number as large as the others.
    rounds = tf.data.Dataset.range(tf.int64.max).flat_map(lambda turn: make(epoch + turn * 2**40))
    return rounds.take(steps).skip(start)


def _packed_rows(batch_size: int, length: int, padding: int, ids: Tensor, starts: Tensor, labels: Tensor) -> Any:
    """Tokens (N,), where documents start, and labels -> elements of (batch_size, length), the last one with padding."""
    count = tf.size(ids)
    is_token = tf.range(batch_size * length) < count
    missing = [[0, batch_size * length - count]]
    firsts = tf.range(batch_size * length) % length == 0
    starts = firsts | (tf.pad(starts, missing) > 0) | (tf.range(batch_size * length) == count)
    document = tf.cumsum(tf.cast(starts, "int32"))  # from 1 on, over all rows
    places = tf.cast(tf.where(starts)[:, 0], "int32")
    positions = tf.range(batch_size * length) - tf.gather(places, document - 1)
    rows = tf.reshape(document, [batch_size, length])
    document = tf.reshape(rows - rows[:, :1] + 1, [-1])

    def shaped(values: Tensor) -> Tensor:
        return tf.reshape(values, [batch_size, length])

    features = {
        "token_ids": shaped(tf.pad(ids, missing, constant_values=padding)),
        "document_ids": shaped(tf.where(is_token, document, 0)),
        "positions": shaped(tf.where(is_token, positions, 0)),
    }
    return features, shaped(tf.pad(labels, missing, constant_values=padding))
