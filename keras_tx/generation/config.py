"""What is to be written, whatever the inputs: a strategy, rules, and the ids that begin and end a row, all checked."""

import numpy as np

from keras_tx import checks
from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.processors import Constraints
from keras_tx.generation.strategy import Strategy


class GenerationConfig:
    """The options of `generate` for a model, with the defaults that a tokenizer gives.

    Args:
        steps: `IncrementalModel` of the model.
        strategy: `Greedy()` if None.
        tokenizer: its `cls_id` and `sep_id` are the defaults of `start_token` and `stop_tokens`.
        others: as for `generate`.

    Raises:
        TypeError: another strategy.
        ValueError: numbers out of range, ids outside the vocabulary, contradictory rules.
    """

    def __init__(
        self,
        steps,
        strategy=None,
        tokenizer=None,
        *,
        max_new_tokens,
        min_new_tokens=0,
        stop_tokens=None,
        start_token=None,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        forbidden_tokens=(),
        forced_tokens=None,
        renormalize_logits=False,
    ):
        self.max_new_tokens = checks.positive_int("max_new_tokens", max_new_tokens)
        self.steps, self.strategy = steps, Greedy() if strategy is None else strategy
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"`strategy` must be `Greedy()`, `Sample()` or `Beam()`. Received: strategy={strategy!r}")
        if start_token is None:
            start_token = getattr(tokenizer, "cls_id", None)
        self.start_token = None if start_token is False else start_token
        stop_tokens = getattr(tokenizer, "sep_id", None) if stop_tokens is None else stop_tokens
        self.stop_tokens = _ids("stop_tokens", () if stop_tokens is None else stop_tokens)
        self.padding_id = steps.padding_ids[steps.target] or 0
        self.constraints = Constraints(
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            min_new_tokens=min_new_tokens,
            forbidden_tokens=forbidden_tokens,
            forced_tokens=forced_tokens,
            renormalize_logits=bool(renormalize_logits),
        )
        self.constraints.check(max_new_tokens, steps.vocabulary_size, self.stop_tokens)

    def search(self, num_new, strategy=None):
        """The `DecodeLoop` for at most `num_new` tokens, by another strategy if one is given."""
        strategy = self.strategy if strategy is None else strategy
        return DecodeLoop(self.steps, strategy, self.constraints, self.stop_tokens, self.padding_id, num_new)

    def start_row(self):
        """The row that a target begins with.

        Raises:
            ValueError: there is no start token, or it is no id of the vocabulary.
        """
        size = self.steps.vocabulary_size
        if self.start_token is None:
            raise ValueError("`start_token` must be given: the id that begins a target. Received: start_token=None")
        start = _ids("start_token", self.start_token)
        if len(start) != 1 or not 0 <= start[0] < size:
            raise ValueError(f"`start_token` must be an id in [0, {size}). Received: start_token={self.start_token!r}")
        return start


def _ids(name, ids):
    """An id, or several -> a tuple."""
    array = np.ravel(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers. Received: {name}={ids!r}")
    return tuple(int(token) for token in array)
