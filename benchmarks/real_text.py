"""Training on texts of many lengths: real tokens a second with batches by length and with padding to a fixed length.

python -m benchmarks real_text --multi30k FOLDER --imdb TFDS_FOLDER
python -m benchmarks real_text --multi30k FOLDER --count 500

Each run is one epoch over the first texts, with the encoder of `python -m benchmarks encoder` and Adam. keras_tx
batches with `bucket_by_length`; it computes the padding that is left in one run and skips it in another. KerasHub pads
every text to a fixed length, 40 for captions and 512 for reviews, as its guides do. PyTorch sorts the texts by length
and pads to the longest of each batch. No batch has more than --tokens tokens.
"""

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import alternating, encoder
from keras_tx import data
from keras_tx.text import BertTokenizer

VOCABULARY = 8000
SKIPPING = f"{alternating.OURS}, skip_padding"
BOUNDARIES = [8, 12, 16, 20, 24, 32, 40, 64, 96, 128, 192, 256, 320, 384, 448, 512]
Texts = Sequence[str]
Run = Callable[[], object]


def captions(folder: Path) -> Texts:
    rows = data.load_translation(str(folder), source="en", target="de").train
    return [source.decode() for source, _ in rows.as_numpy_iterator()]


def reviews(folder: Path) -> Texts:
    rows = data.load_dataset("imdb_reviews", data_dir=str(folder)).train
    return [text.decode() for text, _ in rows.take(2000).as_numpy_iterator()]


def tokens(texts: Texts, length: int, count: int) -> list[np.ndarray]:
    """Ids without padding of the first `count` texts, cut at `length`."""
    tokenizer = BertTokenizer.train(texts, VOCABULARY, max_length=length)
    rows = tokenizer(texts[:count])["token_ids"].numpy()
    return [row[row != tokenizer.pad_id] for row in rows]


def of_keras(stack: Callable, length: int, batches: tf.data.Dataset) -> Run:
    """`fit` over batches of ids, with a number for each token to learn."""
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(stack(inputs, VOCABULARY, length))[..., 0])
    model.compile(keras.optimizers.Adam(1e-4), "mean_squared_error", jit_compile=False)
    count = tf.data.experimental.assert_cardinality(sum(1 for _ in batches))
    with_targets = batches.map(lambda ids: (ids, tf.cast(ids % 7, "float32"))).apply(count).cache().prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread sleeps up to as long as a run takes, and the run waits for it
    with_targets = with_targets.with_options(options)
    return lambda: model.fit(with_targets, shuffle=False, verbose=0)


def ours(rows: list[np.ndarray], length: int, budget: int, skip_padding: bool = False) -> Run:
    dataset = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(rows)).map(lambda row: row)
    batches = data.bucket_by_length(dataset, max_tokens=budget, boundaries=BOUNDARIES)
    return of_keras(functools.partial(encoder.our_stack, skip_padding=skip_padding), length, batches)


def keras_hub(rows: list[np.ndarray], length: int, budget: int) -> Run:
    ids = np.zeros((len(rows), length), "int32")
    for row, values in zip(ids, rows, strict=True):
        row[: len(values)] = values
    return of_keras(encoder.keras_hub_stack, length, tf.data.Dataset.from_tensor_slices(ids).batch(budget // length))


def pytorch(rows: list[np.ndarray], length: int, budget: int) -> Run:
    import torch

    device = encoder.torch_device()
    batches: list[list[torch.Tensor]] = [[]]
    for row in sorted(rows, key=len):
        if batches[-1] and (len(batches[-1]) + 1) * len(row) > budget:
            batches.append([])
        batches[-1].append(torch.tensor(row, dtype=torch.long))
    padded = [torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device) for batch in batches]
    model = encoder.torch_model(VOCABULARY, length).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)

    def run() -> None:
        for ids in padded:
            loss = torch.nn.functional.mse_loss(model(ids), (ids % 7).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


SIDES = {
    alternating.OURS: ours,
    SKIPPING: functools.partial(ours, skip_padding=True),
    "KerasHub, fixed length": keras_hub,
    "PyTorch, sorted by length": pytorch,
}


def compare(name: str, texts: Texts, length: int, arguments: argparse.Namespace) -> None:
    rows = tokens(texts, length, arguments.count)
    real = sum(map(len, rows))
    case = f"{name}, {len(rows)} texts of {real / len(rows):.1f} tokens on average, at most {length}"
    runs = {side: make(rows, length, arguments.tokens) for side, make in SIDES.items()}
    alternating.in_turns(runs, 1)  # compiles
    times = alternating.in_turns(runs, arguments.rounds)
    alternating.report(case, times, real, "real tokens", file=arguments.json, variants=[SKIPPING])


def main() -> None:
    parser = alternating.parser(__doc__, rounds=3)
    parser.add_argument("--multi30k", type=Path, help="folder of parallel files; left out if not given")
    parser.add_argument("--imdb", type=Path, help="folder in which TFDS has prepared imdb_reviews; left out as above")
    parser.add_argument("--count", type=int, default=1000, help="captions that are used; of reviews an eighth of that")
    parser.add_argument("--tokens", type=int, default=4096, help="the most tokens of a batch, padding included")
    arguments = parser.parse_args()
    if not (arguments.multi30k or arguments.imdb):
        parser.error("one of --multi30k and --imdb is needed")
    keras.utils.set_random_seed(7)
    if arguments.multi30k:
        compare("Multi30k", captions(arguments.multi30k), 40, arguments)
    if arguments.imdb:
        fewer = argparse.Namespace(**{**vars(arguments), "count": max(1, arguments.count // 8)})
        compare("IMDB", reviews(arguments.imdb), 512, fewer)


if __name__ == "__main__":
    main()
