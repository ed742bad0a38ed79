"""XLA compiles a search soon, for every size of the vocabulary, as users compile: with all its passes."""

import os

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
