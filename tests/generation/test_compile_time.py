"""What compiling costs: a search soon, for every size of the vocabulary, as users compile, with all passes of XLA; and
nothing for a process that finds the programs of another one in a folder."""

import os
import subprocess

import numpy as np
import pytest

from keras_tx.generation import Beam, compiled_loop
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.decode_loop import DecodeLoop
from tests import forked

SIZES = [(29, 4), (30, 4), (32, 2), (32, 8)]  # of the vocabulary, and beams: these once took minutes


class FromSource:
    """Stands for an `IncrementalModel`: the logits (B, V) of every step are its source."""

    variables = ()

    def __init__(self, vocabulary_size):
        self.vocabulary_size = vocabulary_size

    def prepare(self, sources, batch_size, num_slots):
        return {"logits": sources[0]}, ()

    def step(self, ids, values, cache, **places):
        return values["logits"], cache


def first_tokens(vocabulary_size, num_beams):
    """The tokens that a compiled prefill chooses, and the ids of the largest logits."""
    import tensorflow as tf

    model = FromSource(vocabulary_size)
    loop = DecodeLoop(model, Beam(num_beams), Constraints(), stop_tokens=(), padding_id=0, num_new=4)
    logits = np.random.default_rng(vocabulary_size).normal(size=(2, vocabulary_size)).astype("float32")
    ids, real = tf.ones((2, 3), "int32"), tf.ones((2, 3), "bool")
    prefill = compiled_loop._compiled(loop.prefill, [model], jit_compile=True)
    _, tokens, _ = prefill(ids, real, [tf.constant(logits)], tf.constant(3), None)
    return tokens.numpy().reshape(2, -1).tolist(), np.argsort(-logits)[:, :num_beams].tolist()


@pytest.mark.process
@pytest.mark.tensorflow
def test_no_vocabulary_takes_xla_long():
    script = f"""
from tests.generation.test_compile_time import first_tokens
for sizes in {SIZES}:
    tokens, expected = first_tokens(*sizes)
    assert tokens == expected, (sizes, tokens, expected)
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = forked.start("-c", script, env=environment)
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.process
@pytest.mark.tensorflow
def test_a_process_generates_with_the_programs_that_another_one_left_in_a_folder(tmp_path):
    script = """
import keras, keras_tx
keras.utils.set_random_seed(3)
model = keras_tx.models.CausalLM(23, num_layers=2, hidden_dim=12, num_heads=3, intermediate_dim=20)
print(model.generate([[5, 7, 11, 2], [9, 4, 8, 1]], max_new_tokens=6))
"""
    environment = {**os.environ, "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={tmp_path}/programs"}
    printed, files = [], []
    for _ in range(2):
        process = forked.start("-c", script, env=environment, stdout=subprocess.PIPE)
        with process.stdout:
            printed.append(process.stdout.read())
        assert process.wait(60) == 0
        files.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "programs").iterdir()})
    assert printed[0] == printed[1] and printed[0].startswith("[[5, 7, 11, 2,")
    assert files[0] == files[1] and len(files[0]) == 2  # of the prefill and of the decode steps
