"""python -m tests.training.killed FOLDER DEATH...: trains a small model whole, and again, a process for each DEATH.

A DEATH is a place in the training and how often it is reached before SIGKILL ends the process: "batch:5", "write:2"
(amid the bytes of the second backup), "written:2" (before it takes its name), "replaced:2" (after). When the last is
dead, one more process trains to the end. The weights are in FOLDER/whole/weights.npz and FOLDER/killed/weights.npz. The
processes are forked after the imports, and train eagerly, since a graph for each would take most of the time. `FOLDER
alone` trains in this process, in FOLDER and in a graph, for a parent that kills it.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_tx.training import PaddedCrossentropy, Resume

EPOCHS = 4


def train(folder, death="none", eager=True):
    keras.utils.set_random_seed(1)
    tf.config.experimental.enable_op_determinism()
    place, _, count = death.partition(":")
    left = {place: int(count or 0)}

    def reached(here):
        left[here] = left.get(here, 0) - 1
        if left[here] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    savez, replace = np.savez, os.replace

    def dying_savez(file, **arrays):
        start = file.tell()
        savez(file, **arrays)
        if left.get("write") == 1:
            file.truncate((start + file.tell()) // 2)
        reached("write")

    def dying_replace(old, new):
        reached("written")
        replace(old, new)
        reached("replaced")

    np.savez, os.replace = dying_savez, dying_replace
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(11, 7),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(11),
        ]
    )
    model.compile("adam", PaddedCrossentropy(), run_eagerly=eager)
    ids = tf.data.Dataset.range(23).map(lambda i: tf.cast([i % 10 + 1, i % 7 + 1, i % 3], "int32"))
    resume = Resume(folder / "backup")
    data = resume.dataset(lambda epoch: ids.shuffle(23, seed=epoch).map(lambda x: (x, x)).batch(5))
    die = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: reached("batch"))
    history = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[die, resume])
    savez(folder / "weights.npz", *model.get_weights(), loss=history.history["loss"], epoch=history.epoch)


def main(folder, *deaths):
    if deaths == ("alone",):
        return train(Path(folder), eager=False)
    for part, death in [("whole", "none"), *(("killed", death) for death in deaths), ("killed", "none")]:
        (Path(folder) / part).mkdir(exist_ok=True)
        child = os.fork()
        if not child:
            train(Path(folder) / part, death)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if died == (death == "none") or (death == "none" and status):
            sys.exit(f"{death}: a death must be one of SIGKILL, none must end with 0. Received: wait status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
