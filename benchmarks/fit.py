"""Options of Keras' `compile`: tokens a second of `fit` with the defaults, with XLA, and with 16 steps in a call.

python -m benchmarks fit
python -m benchmarks fit --width 512 --batch 16 --length 128 --rounds 3
python -m benchmarks fit --pytorch

A CausalLM of 4 layers and 4 heads over 65 characters, dropout 0.1, AdamW, 32 steps of `fit` on a tf.data.Dataset. With
--pytorch a model of the same sizes in PyTorch is trained beside it, as nanoGPT does, eagerly and by `torch.compile`.
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


def run(arguments: argparse.Namespace, options: dict):
    """A function that trains `STEPS` steps."""
    ids, width = some_ids(arguments), arguments.width
    sizes = {"num_layers": LAYERS, "hidden_dim": width, "num_heads": HEADS, "intermediate_dim": 4 * width}
    model = models.CausalLM(VOCABULARY, **sizes)
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
    arguments = parser.parse_args()
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
