"""Options of Keras' `compile`: tokens a second of `fit` with the defaults, with XLA, and with 16 steps in a call.

python -m benchmarks fit
python -m benchmarks fit --width 512 --batch 16 --length 128 --rounds 3
python -m benchmarks fit --pytorch
python -m benchmarks fit --first-step

A CausalLM of 4 layers and 4 heads over 65 characters, dropout 0.1, AdamW, 32 steps of `fit` on a tf.data.Dataset. With
--pytorch a model of the same sizes in PyTorch is trained beside it, as nanoGPT does, eagerly and by `torch.compile`.
--first-step measures something else: the time until a new model has made the first step of `fit`, beside one of
KerasHub's decoder layers, without XLA on both sides.
"""

import argparse
import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import alternating
from keras_tx import models
from keras_tx.training import PaddedCrossentropy

STEPS, AT_ONCE, VOCABULARY, LAYERS, HEADS = 32, 16, 65, 4, 4
OPTIONS = {
    alternating.OURS: {},
    "jit_compile=True": {"jit_compile": True},
    f"steps_per_execution={AT_ONCE}": {"steps_per_execution": AT_ONCE},
}


def our_model(arguments: argparse.Namespace) -> keras.Model:
    width = arguments.width
    sizes = {"num_layers": LAYERS, "hidden_dim": width, "num_heads": HEADS, "intermediate_dim": 4 * width}
    return models.CausalLM(VOCABULARY, **sizes)


def keras_hub_model(arguments: argparse.Namespace) -> keras.Model:
    """The same of KerasHub's layers, with learned positions."""
    import keras_hub

    ids, width = keras.Input((None,), dtype="int32"), arguments.width
    embedding = keras_hub.layers.TokenAndPositionEmbedding(VOCABULARY, arguments.length, width, tie_weights=True)
    hidden = keras.layers.Dropout(0.1)(embedding(ids))
    for _ in range(LAYERS):
        decoder = keras_hub.layers.TransformerDecoder(
            4 * width, HEADS, dropout=0.1, activation="gelu", normalize_first=True
        )
        hidden = decoder(hidden)
    hidden = keras.layers.LayerNormalization()(hidden)
    return keras.Model(ids, embedding.token_embedding(hidden, reverse=True))


def first_step(arguments: argparse.Namespace, make: Callable[[argparse.Namespace], keras.Model], loss: keras.Loss):
    """A function that makes a model and trains one step."""
    ids = some_ids(arguments)

    def train() -> None:
        model = make(arguments)
        model.compile(keras.optimizers.AdamW(1e-3), loss, metrics=["accuracy"], jit_compile=False)
        model.fit(ids, ids, batch_size=len(ids), shuffle=False, verbose=0)

    return train


def first_steps(arguments: argparse.Namespace) -> None:
    runs = {
        alternating.OURS: first_step(arguments, our_model, PaddedCrossentropy()),
        "KerasHub": first_step(
            arguments, keras_hub_model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ),
    }
    for function in runs.values():  # what is imported and started in the first call of a process
        function()
    case = f"from a new model to the first step, width {arguments.width}, {arguments.batch} x {arguments.length}"
    times = alternating.in_turns(runs, arguments.rounds)
    alternating.report(case, times, 1, "models", file=arguments.json)
    for name, taken in times.items():
        print(f"  {name:32} {alternating.spread(taken, '.2f'):>36} s")


def run(arguments: argparse.Namespace, options: dict):
    """A function that trains `STEPS` steps."""
    ids, model = some_ids(arguments), our_model(arguments)
    model.compile(keras.optimizers.AdamW(1e-3), PaddedCrossentropy(), **options)
    data = tf.data.Dataset.from_tensors((ids, ids)).repeat(STEPS).prefetch(4)
    settings = tf.data.Options()
    settings.autotune.enabled = False  # its thread can sleep on behind the end of a run
    data = data.with_options(settings)
    if not options:
        print(f"keras_tx: {model.count_params():,} parameters")
    return lambda: model.fit(data, shuffle=False, verbose=0)


def some_ids(arguments: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(7).integers(1, VOCABULARY, (arguments.batch, arguments.length), dtype="int32")


def pytorch(arguments: argparse.Namespace, is_compiled: bool) -> Callable[[], None]:
    """The same steps in PyTorch: pre-norm blocks, fused attention, the table of tokens shared with the logits."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(os.cpu_count() or 1)
    width, length, rate = arguments.width, arguments.length, 0.1

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
            self.heads, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x):
            batch, time, _ = x.shape
            heads = self.heads(self.norms[0](x)).view(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
            kept = rate if self.training else 0.0
            attended = functional.scaled_dot_product_attention(*heads.unbind(), dropout_p=kept, is_causal=True)
            joined = self.joined(attended.transpose(1, 2).reshape(batch, time, width))
            x = x + functional.dropout(joined, rate, self.training)
            fed = self.narrow(functional.gelu(self.wide(self.norms[1](x))))
            return x + functional.dropout(fed, rate, self.training)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(length, width)
            self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm = torch.nn.LayerNorm(width)

        def forward(self, ids):
            x = functional.dropout(self.tokens(ids) + self.positions.weight, rate, self.training)
            for block in self.blocks:
                x = block(x)
            return functional.linear(self.norm(x), self.tokens.weight)

    model = Model().train()
    print(f"PyTorch: {sum(one.numel() for one in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = torch.compile(model) if is_compiled else model
    ids = torch.from_numpy(some_ids(arguments)).long()

    def train() -> None:
        for _ in range(STEPS):
            loss = functional.cross_entropy(called(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return train


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pytorch", action="store_true", help="a model of these sizes in PyTorch, too")
    parser.add_argument("--first-step", action="store_true", help="only the time until the first step of a new model")
    arguments = parser.parse_args()
    if arguments.first_step:
        first_steps(arguments)
        return
    runs = {name: run(arguments, options) for name, options in OPTIONS.items()}
    if arguments.pytorch:
        runs |= {"PyTorch": pytorch(arguments, False), "PyTorch, torch.compile": pytorch(arguments, True)}
    for function in runs.values():  # compiles
        function()
    case = f"fit, width {arguments.width}, {arguments.batch} x {arguments.length}"
    amount = STEPS * arguments.batch * arguments.length
    options = {
        "file": arguments.json,
        "steps": STEPS,
        "variants": [name for name in OPTIONS if name != alternating.OURS],
    }
    alternating.report(case, alternating.in_turns(runs, arguments.rounds), amount, "tokens", **options)


if __name__ == "__main__":
    main()
