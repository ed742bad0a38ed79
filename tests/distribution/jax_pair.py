"""A program for two processes of JAX, with a device each: training, loading and saving equal those of one process.

    python -m tests.distribution.jax_pair PROCESS PORT FOLDER

It prints as JSON what it found.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import keras_tx
from keras_tx.distribution import get_layout_map
from keras_tx.pretrained import files, from_pretrained, save_pretrained
from keras_tx.training import PaddedCrossentropy, Resume
from keras_tx.training.workers import OfJax
from tests.distribution.jax_devices import ROWS, SIZES, VOCABULARY, language_batches, largest_difference, trained
from tests.pretrained.tiny import checkpoint


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


def fitted(distribution, folder, rows=slice(None), cut=False):
    """The whole weights after two epochs with `Resume`, and their losses; or cut off at the end of the second one."""
    keras.utils.set_random_seed(3)
    keras.distribution.set_distribution(distribution)
    model = keras_tx.models.MaskedLM(VOCABULARY, **{**SIZES, "dropout": 0.3})
    model.compile("adam", PaddedCrossentropy())

    def end(epoch, logs):
        if cut and epoch == 1:
            raise CutOff

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=end), Resume(folder)]
    x, y = (np.concatenate(parts) for parts in zip(*([a[rows], b[rows]] for a, b in language_batches()), strict=True))
    history = model.fit(x, y, len(x) // 4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return [OfJax().array(weight.value) for weight in model.weights], history.history["loss"]


def resumed(distribution, folder, rows=slice(None)):
    """Whether a run that is cut off and started again ends as one that is not."""
    weights, losses = fitted(distribution(), folder / "whole", rows)
    try:
        fitted(distribution(), folder / "cut", rows, cut=True)
    except CutOff:
        ours, our_losses = fitted(distribution(), folder / "cut", rows)
    return all(map(np.array_equal, ours, weights)), our_losses == losses


def main(process, port, folder):
    keras.distribution.initialize(f"127.0.0.1:{port}", 2, process)
    found, folder = {}, Path(folder)
    one = trained("masked", None)
    half = slice(process * ROWS // 2, (process + 1) * ROWS // 2)
    two = trained("masked", data_parallel(), half)
    found["data"] = largest_difference(two.get_weights(), one.get_weights())
    (x, y), *_ = language_batches()
    losses = [two.evaluate(x[half], y[half], batch_size=ROWS // 2, verbose=0)]
    predictions = two.predict(x[half], batch_size=ROWS // 2, verbose=0)
    keras.distribution.set_distribution(None)
    losses.append(one.evaluate(x, y, batch_size=ROWS, verbose=0))
    found["losses"] = losses
    found["predictions"] = largest_difference([predictions], [one.predict(x, batch_size=ROWS, verbose=0)])

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
    prompt = {"strategy": keras_tx.generation.Greedy(), "max_new_tokens": 4}
    found["generated"] = ours.generate([[5, 7, 11]], **prompt)
    theirs = trained("llama", None)
    found["expected"] = theirs.generate([[5, 7, 11]], **prompt)
    saved = from_pretrained(folder / "trained")
    found["model"] = largest_difference(saved.get_weights(), theirs.get_weights())
    keras.distribution.set_distribution(model_parallel())
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
