"""Speculative decoding at GPT-2 small's size, batch 1, for texts that repeat their prompt: times as fast as greedy.

python -m benchmarks speculative
python -m benchmarks speculative --random --every
python -m benchmarks speculative --rounds 7 --drafts 7 --batch-size 4

The model has the sizes and the cost of GPT-2 small, and weights that make its text known: after each token comes the
next one of a fixed cycle of 128 tokens. The prompt is such a cycle in which one of EVERY tokens, at random places, is
another one. So the continuation is the prompt with those tokens mended, as in the edits and code that speculative
decoding is for, and drafts from the prompt are wrong there. The draft model is a decoder of width 128 with
2 layers that does not know one of EVERY tokens either. With --random, the first case is a model with random weights,
whose greedy text soon repeats a few tokens.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx
from benchmarks import alternating
from keras_tx.generation import Greedy, Speculative
from keras_tx.generation.request import GenerationRequest

VOCABULARY, POSITIONS = 50257, 1024
MODEL = {"num_layers": 12, "hidden_dim": 768, "num_heads": 12, "intermediate_dim": 3072}
DRAFT_MODEL = {"num_layers": 2, "hidden_dim": 128, "num_heads": 2, "intermediate_dim": 512}
CYCLE = 128  # also the length of the prompt
EVERY = (0, 32, 16, 8)  # one of so many tokens of the prompt is another one; 0 for none


def random_model(sizes: dict[str, int]) -> keras.Model:
    embedding = {"position_encoding": "learned", "max_length": POSITIONS, "scale": False}
    options = {"dropout": 0.0, "tie_embeddings": False, "embedding_options": embedding}
    return keras_tx.models.CausalLM(VOCABULARY, **sizes, **options)


def continue_with(model: keras.Model, following: np.ndarray) -> None:
    """Gives `model` weights with which `following[token]` comes next: its layers add zeros to the embeddings."""
    table = np.random.default_rng(1).normal(size=(VOCABULARY, model.embedding.hidden_dim)).astype("float32")
    model.embedding.tokens.embeddings.assign(table)
    kernel = np.zeros_like(table)
    kernel[following] = table
    model.head.kernel.assign(kernel.T)
    for weight in [*model.decoder.weights, model.embedding.positions.embeddings]:
        if weight.path.endswith(("attention_output/kernel", "feed_forward/output/kernel", "positions/embeddings")):
            weight.assign(np.zeros(weight.shape, "float32"))


def cycles(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `CYCLE` tokens (count, CYCLE), and the token after each token of the vocabulary."""
    shuffled = np.random.default_rng(2).permutation(np.arange(1, VOCABULARY))
    rows = shuffled[: count * CYCLE].reshape(count, CYCLE)
    following = np.arange(VOCABULARY)
    following[rows] = np.roll(rows, -1, axis=1)
    return rows, following


def with_others(tokens: np.ndarray, every: int, seed: int) -> np.ndarray:
    """`tokens` (B, T), of which T // `every` in each row, at random places before the last, are random tokens."""
    generator, changed = np.random.default_rng(seed), tokens.astype("int32")
    for row in changed:
        places = generator.choice(len(row) - 1, len(row) // every if every else 0, replace=False)
        row[places] = generator.integers(1, VOCABULARY, len(places))
    return changed


def steps_of(model: keras.Model, prompts: np.ndarray, strategy: Speculative, new_tokens: int) -> int:
    """The number of decode steps for `new_tokens` tokens."""
    options = {"max_new_tokens": new_tokens, "target": None, "tokenizer": None, "source_tokenizer": None}
    request = GenerationRequest(model, prompts, strategy, **options, jit_compile=True)
    state, tokens, context = request.prefill()
    state, _, _ = request.loop.decode(state, tokens, context, request.limit)
    return int(keras.ops.convert_to_numpy(state["num_steps"]))


def compare(case: str, model: keras.Model, prompts: np.ndarray, drafts: dict, arguments: argparse.Namespace) -> None:
    new_tokens = arguments.new_tokens
    strategies = {alternating.OURS: Greedy(), **drafts}
    runs = {
        name: lambda strategy=strategy: model.generate(prompts, strategy, max_new_tokens=new_tokens)
        for name, strategy in strategies.items()
    }
    texts = {name: run() for name, run in runs.items()}  # also the warm-up
    for name, strategy in drafts.items():
        np.testing.assert_array_equal(texts[name], texts[alternating.OURS])
        steps = steps_of(model, prompts, strategy, new_tokens)
        kept = (new_tokens - 1 - steps) / (steps * strategy.num_drafts)
        print(f"{case}, {name}: {steps} steps for {new_tokens - 1} tokens, {kept:.0%} of the drafts are kept")
    times = alternating.in_turns(runs, arguments.rounds)
    title = f"{case}, batch {len(prompts)}, {new_tokens} tokens after {prompts.shape[1]}"
    rows = len(prompts) * new_tokens
    for name in drafts:
        both = {name: times[name], "Greedy": times[alternating.OURS]}
        alternating.report(title, both, rows, "tokens", ours=name, file=arguments.json)


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, help="draft tokens in each step")
    parser.add_argument("--model-drafts", type=int, help="the same for the draft model")
    parser.add_argument("--every", type=int, nargs="*", default=EVERY, help="one of so many tokens is another one")
    parser.add_argument("--random", action="store_true", help="also a model with random weights")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, medians of {arguments.rounds} rounds (least to most)")

    model, draft_model = random_model(MODEL), random_model(DRAFT_MODEL)
    drafts = {"n-grams": Speculative(num_draft_tokens=arguments.drafts)}
    if arguments.random:
        prompts = np.random.default_rng(7).integers(1, VOCABULARY, (arguments.batch_size, CYCLE), dtype="int32")
        compare("random weights", model, prompts, drafts, arguments)
    rows, following = cycles(arguments.batch_size)
    continue_with(model, following)
    drafts["draft model"] = Speculative(draft_model=draft_model, num_draft_tokens=arguments.model_drafts)
    for every in arguments.every:
        known = following.copy()
        known[rows] = with_others(following[rows], every, seed=4)
        continue_with(draft_model, known)
        case = f"one of {every} tokens is another" if every else "every token is the same"
        compare(case, model, with_others(rows, every, seed=3), drafts, arguments)


if __name__ == "__main__":
    main()
