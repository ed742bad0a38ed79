"""Run as a program: trains tiny models on JAX on one device and on four, and prints as JSON how much they differ.

    python -m tests.distribution.jax_devices CASE [CASE ...]

Each case trains with the same global batches on one device, with `DataParallel` on four, and with `ModelParallel` on a
mesh of 2 x 2. The rows of a batch have different numbers of tokens, so the devices have, too.
"""

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import keras
import numpy as np

import keras_tx
from keras_tx.training import PaddedCrossentropy
from tests.pretrained.tiny import checkpoint

VOCABULARY, ROWS, LENGTH, STEPS = 26, 8, 10, 20
SIZES = {"num_layers": 1, "hidden_dim": 16, "num_heads": 4, "intermediate_dim": 24, "dropout": 0.0}


def mesh(shape=(2, 2)):
    return keras.distribution.DeviceMesh(shape, ["batch", "model"])


def model_parallel(shape=(2, 2)):
    layouts = keras_tx.distribution.get_layout_map(mesh(shape))
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def ids(seed, rows=ROWS, length=LENGTH, vocabulary=VOCABULARY):
    """(B, T) ids padded on the right: rows of 1, 2, ... tokens, so that each device has another number of them."""
    values = np.random.default_rng(seed).integers(1, vocabulary, (rows, length)).astype("int32")
    values[np.arange(length) > np.arange(rows)[:, None] % length] = 0
    return values


def language_batches(seed=0):
    return [(x, np.roll(x, -1, axis=1) * (np.roll(x, -1, axis=1) != 0)) for x in map(ids, range(seed, seed + 4))]


def causal(decoder_options=None, embedding_options=None, **options):
    return keras_tx.models.CausalLM(
        VOCABULARY, **SIZES, decoder_options=decoder_options, embedding_options=embedding_options, **options
    )


def grouped_gated():
    """Rotary positions, 4 heads with 2 key heads, gated feed-forward; a kernel of its own for the logits."""
    attention = {"rotary": True, "num_key_value_heads": 2, "use_gate": True}
    return causal(
        {"gated": True, "attention_options": attention, "normalization": "rms_norm"},
        {"position_encoding": None},
        tie_embeddings=False,
        use_output_bias=True,
    )


def packed_batches():
    documents = [list(range(1, 2 + i % 7)) for i in range(60)]
    packed = keras_tx.data.pack_sequences(documents, LENGTH, batch_size=ROWS)
    return [tuple(keras.tree.map_structure(np.asarray, part) for part in batch) for batch in packed][:2]


def bucketed_batches():
    """Two lengths of batches."""
    return [(x, y) for length in (4, 9) for x, y in [(ids(length, length=length), ids(length + 1, length=length))]]


def seq2seq_batches():
    return [((x, y), np.roll(y, -1, axis=1)) for x, y in zip(map(ids, (1, 2)), map(ids, (5, 6)), strict=True)]


def classes(seed=0):
    return [(ids(i), np.arange(ROWS) % 3) for i in range(3)]


def functional():
    """A user's model: layers under other names, and layers of Keras."""
    tokens = keras.Input((None,), dtype="int32")
    hidden = keras_tx.layers.TokenEmbedding(VOCABULARY, 16, position_encoding="learned", max_length=32)(tokens)
    attended = keras_tx.layers.MultiHeadAttention(2, 8, name="look")(hidden, hidden)
    hidden = keras_tx.layers.FeedForward(12, name="think")(keras.layers.Add()([hidden, attended]))
    hidden = keras.layers.Dense(6, activation="relu", name="query")(hidden)  # a name of ours, in a layer of Keras
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="output")(hidden))


def llama():
    return keras_tx.pretrained.from_pretrained(checkpoint("llama"))


def llama_batches():
    size = llama().family.embedding.vocabulary_size
    return [
        ({"input_ids": x, "attention_mask": np.sign(x)}, {"logits": y}) for x, y in [(ids(1, vocabulary=size),) * 2]
    ]


def padded(**options):
    return PaddedCrossentropy(**options)


CASES = {  # name: (model, batches, loss, optimizer, options of compile)
    "causal": (causal, language_batches, padded, lambda: keras.optimizers.SGD(0.3), {}),
    "grouped": (grouped_gated, language_batches, padded, lambda: keras.optimizers.SGD(0.3, global_clipnorm=0.5), {}),
}


def trained(name, distribution):
    """The weights after the updates of a case, the loss of an evaluation, and the predictions."""
    make, batches, loss, optimizer, options = CASES[name]
    batches = batches()
    keras.utils.set_random_seed(3)
    keras.distribution.set_distribution(distribution)
    model = make()
    model.compile(optimizer(), loss() if callable(loss) else loss, **options)
    for step in range(STEPS):
        model.train_on_batch(*batches[step % len(batches)])
    keras.distribution.set_distribution(None)
    return model


def main(names):
    found = {}
    for name in names:
        one = trained(name, None)
        found[name] = {}
        for what, distribution in (
            ("data", keras.distribution.DataParallel(auto_shard_dataset=False)),
            ("model", model_parallel()),
        ):
            other = trained(name, distribution)
            differences = [
                float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0))
                for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
            ]
            found[name][what] = max(differences)
            print(name, what, max(differences), file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
