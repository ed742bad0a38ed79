"""What new models learn in few steps with each kind of positions, and with KerasHub's layers: losses on made data.

python -m benchmarks positions [--steps 50 100 150] [--seeds 3]

A `CausalLM` of 2 layers of width 128 learns rows in which each token is that of three places before, a `TextClassifier`
of the same size rows in which every fourth token tells the class. The losses are those of rows that were not trained
on, for the language model of tokens that can be known, at best 0; medians of the seeds.
"""

import argparse
import statistics

import keras
import numpy as np

from keras_tx.models import CausalLM, TextClassifier
from keras_tx.training import PaddedCrossentropy

VOCABULARY, LENGTH, LAG, BATCH = 18, 16, 3, 32
SIZES = {"num_layers": 2, "hidden_dim": 128, "num_heads": 4}
NONE = {"embedding_options": {"position_encoding": None}}
# The options of a model, by the name of its argument for the layers.
KINDS = {
    "none": lambda layers: NONE,
    "sinusoidal": lambda layers: {},
    "learned": lambda layers: {"embedding_options": {"position_encoding": "learned", "max_length": LENGTH}},
    "rotary": lambda layers: {**NONE, layers: {"attention_options": {"rotary": True}}},
    "ALiBi": lambda layers: {**NONE, layers: {"position_bias": "alibi"}},
    "relative": lambda layers: {**NONE, layers: {"position_bias": "relative"}},
}


def repeated(rows, seed):
    """Ids (rows, LENGTH) and their labels, 0 where the next token cannot be known."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, (rows, LENGTH + 1))
    for place in range(LAG, LENGTH + 1):
        ids[:, place] = ids[:, place - LAG]
    return ids[:, :-1], np.where(np.arange(LENGTH) < LAG - 1, 0, ids[:, 1:])


def marked(rows, seed):
    """Ids (rows, LENGTH) of which every fourth is 1 or 2, and these classes, 0 or 1."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    ids = random.integers(3, VOCABULARY, (rows, LENGTH))
    ids[:, ::4] = 1 + labels[:, None]
    return ids, labels


def of_keras_hub():
    """KerasHub's blocks as a language model with learned positions and tied embeddings."""
    from keras_hub.layers import TokenAndPositionEmbedding, TransformerDecoder

    ids = keras.Input((None,), dtype="int32")
    embedding = TokenAndPositionEmbedding(VOCABULARY, LENGTH, SIZES["hidden_dim"])
    x = embedding(ids)
    for _ in range(SIZES["num_layers"]):
        x = TransformerDecoder(4 * SIZES["hidden_dim"], SIZES["num_heads"], dropout=0.1, normalize_first=True)(x)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(ids, embedding.token_embedding(x, reverse=True))


def losses(model, data, loss, steps):
    """The losses after these numbers of steps of Adam with a learning rate of 1e-3."""
    model.compile(keras.optimizers.Adam(1e-3), loss)
    rows, expected = data(20 * BATCH, 0)
    found, done = [], 0
    for count in steps:
        model.fit(*data((count - done) * BATCH, 1 + count), batch_size=BATCH, verbose=0)
        found.append(model.evaluate(rows, expected, batch_size=BATCH, verbose=0))
        done = count
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 150])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    of_classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    language_models = {
        kind: lambda of=of: CausalLM(VOCABULARY, **SIZES, **of("decoder_options")) for kind, of in KINDS.items()
    }
    classifiers = {
        kind: lambda of=of: TextClassifier(VOCABULARY, 2, **SIZES, **of("encoder_options"))
        for kind, of in KINDS.items()
    }
    cases = {f"CausalLM, {kind}": (make, repeated, PaddedCrossentropy()) for kind, make in language_models.items()}
    cases["learned, KerasHub's layers"] = (of_keras_hub, repeated, PaddedCrossentropy())
    cases |= {f"TextClassifier, {kind}": (make, marked, of_classes) for kind, make in classifiers.items()}
    print(f"Losses after {arguments.steps} steps, medians of {arguments.seeds} seeds (least to most at the end):")
    for name, (make, data, loss) in cases.items():
        found = []
        for seed in range(arguments.seeds):
            keras.utils.set_random_seed(seed)
            found.append(losses(make(), data, loss, arguments.steps))
        medians = " ".join(f"{statistics.median(one):.2f}" for one in zip(*found, strict=True))
        last = [one[-1] for one in found]
        print(f"{name}: {medians} ({min(last):.2f} to {max(last):.2f})", flush=True)


if __name__ == "__main__":
    main()
