"""A Python loop around a strategy, and models for it: functions from ids (R, T) to logits (R, V)."""

import numpy as np

from keras_tx.generation.constraints import Constraints
from tests.tools import to_numpy


def drive(strategy, model, ids, real=None, *, new, size, limit=None, stop=(), padding=0, constraints=None, noise=None):
    """Generates from prompts (B, P) with `strategy`; `model(ids, real)` is called with the tokens so far.

    Returns:
        The results (B, n, M), their scores (B, n), and the last state, all in NumPy.
    """
    ids = np.asarray(ids, "int32")
    real = np.ones_like(ids, bool) if real is None else np.asarray(real, bool)
    noise = strategy.noise(len(ids), new) if noise is None else noise
    state = strategy.initial_state(
        ids, real, new, new if limit is None else limit, size, padding_id=padding, noise=noise
    )
    cache = np.repeat(ids, strategy.rows_per_prompt, axis=0)  # grows and is reordered like a key-value cache
    while to_numpy(strategy.is_running(state)):
        known, slot = {k: to_numpy(v) for k, v in state.items()}, int(state["slot"])
        live = np.repeat(~known["done"], strategy.rows_per_prompt)
        np.testing.assert_array_equal(cache[live], known["ids"][live, :slot])
        logits = model(known["ids"][:, :slot], known["real"][:, :slot])
        state, tokens, origin = strategy.advance(logits, state, constraints or Constraints(), tuple(stop))
        origin = np.arange(len(live)) if origin is None else to_numpy(origin)
        assert (to_numpy(tokens)[~live] == padding).all() and (origin[~live] == np.flatnonzero(~live)).all()
        np.testing.assert_array_equal(to_numpy(state["ids"])[~live], known["ids"][~live])
        cache = cache[origin]
        cache = np.concatenate([cache, to_numpy(tokens)[:, None]], axis=1)
    results, scores = strategy.result(state)
    return to_numpy(results), to_numpy(scores), {k: to_numpy(v) for k, v in state.items()}


def markov(size, seed=0, order=2, spread=2.0):
    """A language model that looks at the last `order` ids: random logits for each sequence of them."""
    table = np.random.default_rng(seed).normal(size=(size,) * (order + 1)).astype("float32") * spread
    return lambda ids, real: table[tuple(ids[:, i - order] for i in range(order))]


def speller(words, alphabet="abcdefghijklmnopqrstuvwxyz", end="."):
    """A model with the probabilities {prefix: {character: probability}}; another prefix is followed by `end`."""
    letters = list(end + alphabet)

    def model(ids, real):
        logits = np.full((len(ids), len(letters)), -30.0, "float32")
        for row, (line, kept) in enumerate(zip(ids, real, strict=True)):
            text = "".join(letters[i] for i, token in zip(line, kept, strict=True) if token)
            for character, probability in words.get(text, {end: 1.0}).items():
                logits[row, letters.index(character)] = np.log(probability)
        return logits

    return model, letters


def text(letters, ids):
    return "".join(letters[i] for i in ids)
