"""A program for two processes of JAX, with a device each: training, loading and saving equal those of one process.

    python -m tests.distribution.jax_pair PROCESS PORT FOLDER

It prints as JSON what it found.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
from jax.experimental import multihost_utils

import keras_tx
from keras_tx.data import read_tokens, write_tokens
from keras_tx.distribution import get_layout_map
from keras_tx.models.checked_data import CheckedModel
from keras_tx.pretrained import files, from_pretrained, save_pretrained
from keras_tx.text import CharacterTokenizer
from keras_tx.training import PaddedCrossentropy, Resume
from keras_tx.training.workers import OfJax
from tests.distribution.jax_devices import ROWS, VOCABULARY, language_batches, largest_difference, trained
from tests.pretrained.tiny import checkpoint

PROMPT, GENERATION = [[5, 7, 11]], {"strategy": keras_tx.generation.Greedy(), "max_new_tokens": 4}


class Reading:
    """Counts the bytes that are read from safetensors, and the most at once."""

    def __init__(self):
        self.total = self.most = 0
        fill = files._Tensor._fill

        def counting(tensor, data, stream, begin):
            self.total, self.most = self.total + data.size, max(self.most, data.size)
            fill(tensor, data, stream, begin)

        files._Tensor._fill = counting


def model_parallel():
    layout_map = get_layout_map(keras.distribution.DeviceMesh((1, 2), ["batch", "model"]))
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def data_parallel():
    return keras.distribution.DataParallel(auto_shard_dataset=False)


def message_of(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return str(error)


class CutOff(Exception):
    pass


def dropping():
    """A model with dropout that compiles in a moment, and whose table and kernels are split."""
    ids = keras.Input((None,), dtype="int32")
    x = keras_tx.layers.FeedForward(24)(keras_tx.layers.TokenEmbedding(VOCABULARY, 16, dropout=0.3)(ids))
    return CheckedModel(ids, keras.layers.Dense(VOCABULARY)(x))


def fitted(distribution, folder, rows=slice(None), cut=False):
    """The whole weights after two epochs with `Resume`, and their losses; or cut off at the end of the second one."""
    keras.utils.set_random_seed(3)
    keras.distribution.set_distribution(distribution)
    model = dropping()
    model.compile("adam", PaddedCrossentropy())

    def end(epoch, logs):
        if cut and epoch == 1:
            raise CutOff

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=end), Resume(folder)]
    x, y = (np.concatenate(parts) for parts in zip(*([a[rows], b[rows]] for a, b in language_batches()), strict=True))
    history = model.fit(x, y, len(x) // 4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    split = sum(not weight.value.is_fully_replicated for weight in model.weights)
    return [OfJax().array(weight.value) for weight in model.weights], history.history["loss"], split


def resumed(distribution, folder, rows=slice(None)):
    """Whether a run that is cut off ends as one that is not, in weights and losses, and how many weights are split."""
    weights, losses, split = fitted(distribution(), folder / "whole", rows)
    try:
        fitted(distribution(), folder / "cut", rows, cut=True)
    except CutOff:
        ours, our_losses, _ = fitted(distribution(), folder / "cut", rows)
    return all(map(np.array_equal, ours, weights)), our_losses == losses, split


LETTERS = "abcdefghijklmnop"  # their number is a multiple of two batches


class Outputs(keras.losses.Loss):
    """The outputs themselves."""

    def call(self, labels, outputs):
        return outputs[:, 0]


def letters_trained(folder, distribution):
    """How often each letter of `LETTERS` is trained in an epoch, and the number of steps."""
    keras.distribution.set_distribution(distribution)
    tokenizer = CharacterTokenizer.train([LETTERS], cls_token=None)
    ids = keras.Input((1,), dtype="int32")
    table = keras.layers.Embedding(tokenizer.vocabulary_size, 1, embeddings_initializer="zeros")
    model = CheckedModel(ids, keras.layers.Flatten()(table(ids)))
    # A step subtracts from the row of each letter how often the batch has it.
    model.compile(keras.optimizers.SGD(1.0), Outputs(reduction="sum"))
    steps = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    data = read_tokens(folder, 4, length=1, next_tokens=False)
    model.fit(data.map(lambda x: (x["token_ids"], x["token_ids"])), verbose=0, callbacks=[counting])
    counts = -OfJax().array(table.embeddings.value)[:, 0]
    return [int(counts[i]) for i in tokenizer(list(LETTERS))["token_ids"][:, 0]], len(steps)


def of_one_process(path):
    """What one process gets: of a model with all rows in each batch, and of a checkpoint that is trained on."""
    (x, y), *_ = language_batches()
    one, loaded = trained("masked", None), trained("llama", None)
    loss = one.evaluate(x, y, batch_size=ROWS, verbose=0)
    predictions = one.predict(x, batch_size=ROWS, verbose=0)
    generated = loaded.generate(PROMPT, **GENERATION)
    np.savez(path.with_suffix(".masked.npz"), *one.get_weights())
    np.savez(path.with_suffix(".llama.npz"), *loaded.get_weights())
    path.write_text(json.dumps([loss, predictions.tolist(), generated]))


def arrays(path):
    with np.load(path) as file:
        return [file[name] for name in file.files]


def main(process, port, folder):
    keras.distribution.initialize(f"127.0.0.1:{port}", 2, process)
    found, folder = {}, Path(folder)
    if process == 0:
        of_one_process(folder / "one.json")
    multihost_utils.sync_global_devices("one process has trained")
    loss, predictions_of_one, found["expected"] = json.loads((folder / "one.json").read_text())
    half = slice(process * ROWS // 2, (process + 1) * ROWS // 2)
    two = trained("masked", data_parallel(), half)
    found["data"] = largest_difference(two.get_weights(), arrays(folder / "one.masked.npz"))
    (x, y), *_ = language_batches()
    found["losses"] = [two.evaluate(x[half], y[half], batch_size=ROWS // 2, verbose=0), loss]
    predictions = two.predict(x[half], batch_size=ROWS // 2, verbose=0)
    found["predictions"] = largest_difference([predictions], [predictions_of_one])

    if process == 0:
        letters = CharacterTokenizer.train([LETTERS], cls_token=None)
        write_tokens(list(LETTERS), letters, folder / "letters", num_shards=2, special_tokens=False, verbose=0)
    multihost_utils.sync_global_devices("the letters are written")
    found["letters"] = [
        letters_trained(folder / "letters", distribution)
        for distribution in (keras.distribution.DataParallel(), data_parallel(), model_parallel())
    ]

    keras.distribution.set_distribution(model_parallel())
    reading = Reading()
    loaded = from_pretrained(checkpoint("llama"))
    weights = [weight.value for weight in loaded.weights]
    found["read"], found["most"] = reading.total, reading.most
    found["held"] = sum(shard.data.nbytes for weight in weights for shard in weight.addressable_shards)
    found["size"], found["largest"] = sum(weight.nbytes for weight in weights), max(weight.nbytes for weight in weights)
    save_pretrained(loaded, folder / "saved", max_shard_bytes=4_000)

    ours = trained("llama", model_parallel())
    save_pretrained(ours, folder / "trained")
    found["generated"] = ours.generate(PROMPT, **GENERATION)
    keras.distribution.set_distribution(None)
    saved = from_pretrained(folder / "trained")
    found["model"] = largest_difference(saved.get_weights(), arrays(folder / "one.llama.npz"))
    found["resumed"] = [
        resumed(model_parallel, folder / "shared"),
        resumed(data_parallel, folder / f"own-{process}", half),
    ]
    found["files"] = sorted(path.name for path in (folder / f"own-{process}" / "cut").iterdir())
    keras.distribution.set_distribution(model_parallel())
    (folder / f"file-{process}").write_text("")
    found["error"] = message_of(save_pretrained, ours, folder / "file-0")
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
