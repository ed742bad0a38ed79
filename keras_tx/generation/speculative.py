"""Speculative decoding: several draft tokens are checked in one decode step, and those that are right are kept.

R rows, one for each of B prompts, M new tokens. Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023,
arXiv:2302.01318; look-up of drafts: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.per_row import PerRowStrategy
from keras_tx.generation.sample import Sample
from keras_tx.generation.state import State, as_int32
from keras_tx.generation.strategy import Strategy
from keras_tx.types import Tensor

NGRAM_SIZE = 3  # the longest n-gram by default
# Drafts by default. On a CPU a step over 8 tokens took 2.4 times as long as one over a single token, over 16 2.7 times.
LOOKED_UP, OF_A_MODEL = 15, 7


@dataclass(frozen=True)
class Speculative(Strategy):
    """Speculative decoding: the tokens of another strategy, in fewer decode steps.

    A decode step over 16 tokens takes two to three times as long as one over a single token, not 16 times, since most
    of its time goes into reading the weights. So in each step the model is also given draft tokens, guesses of the next
    ones, and all those are kept that `strategy` chooses, too. This pays where guesses are often right: without a
    `draft_model`, in texts that repeat parts of their prompt, such as edited texts, summaries, code and answers that
    cite.

    Results are those of `strategy` alone. Without a `draft_model` this also holds for each sample of a seed: a token is
    chosen from the logits of the model, with the random number of its step, and a guess is right if it is this token.
    With a `draft_model` and `Sample`, guesses are samples of the draft model, kept or replaced such that results have
    the same distribution (speculative sampling); the sample of a seed is another one, and depends on the other rows of
    the batch. The only other difference is rounding, since a matrix product of several rows may round differently from
    that of one row: in half precision two tokens may be so close that another one is chosen.

    In a batch, all rows advance by the same number of tokens in each step, that of the row with the fewest right drafts
    among the unfinished ones. So it pays most with a single prompt.

    Args:
        strategy: the strategy that chooses tokens, with one row for each prompt: `Greedy()`, `Sample(...)` or one of
            your own.
        draft_model: a smaller generative model with the same vocabulary, which guesses the next tokens with the same
            strategy. It has the same sources as the model, or none. None: guesses are the tokens that followed an
            earlier occurrence of the last tokens, in the prompt, among the new tokens, or in a source with the same
            vocabulary size (prompt lookup decoding).
        num_draft_tokens: the number of draft tokens in each step. None: 15, or 7 with a `draft_model`.
        max_ngram_size: the largest n-gram, in tokens, that is looked up; one of its tokens may differ. None: 3. Only
            without a `draft_model`.

    Raises:
        TypeError: for a `strategy` that is not a `Strategy`, and a `draft_model` that is not a Keras model.
        ValueError: for numbers that are not positive, a strategy with several rows for each prompt, such as `Beam`, a
            `Speculative` as `strategy`, and `max_ngram_size` with a `draft_model`. In `generate` also for a
            `draft_model` with another vocabulary size, with other sources or with fewer learned positions, and for a
            model with the rotary scaling "dynamic", or whose decode steps with several tokens do not give the logits
            of the whole sequence.

    Reference:
        Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> options = {"max_new_tokens": 8, "jit_compile": False}
        >>> rows = model.generate([[5, 7, 9, 5, 7]], keras_tx.generation.Speculative(), **options)
        >>> rows == model.generate([[5, 7, 9, 5, 7]], **options)
        True

        Samples with a small draft model:

        >>> draft = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=4, num_heads=1, intermediate_dim=4)
        >>> sample = keras_tx.generation.Sample(0.8, seed=3)
        >>> strategy = keras_tx.generation.Speculative(sample, draft_model=draft, num_draft_tokens=3)
        >>> len(model.generate([5, 7], strategy, **options))
        10
    """

    strategy: Strategy = field(default_factory=Greedy)
    _: KW_ONLY
    draft_model: Any = None
    num_draft_tokens: int | None = None
    max_ngram_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise TypeError(
                "The argument `strategy` must be `Greedy()`, `Sample()` or another `Strategy`. Received: "
                f"strategy={self.strategy!r}"
            )
        if isinstance(self.strategy, Speculative) or self.strategy.rows_per_prompt > 1:
            raise ValueError(
                "The argument `strategy` must keep one row for each prompt, unlike `Beam`, and not be `Speculative`. "
                f"Received: strategy={self.strategy!r}"
            )
        if self.draft_model is not None and not isinstance(self.draft_model, keras.Model):
            raise TypeError(
                f"The argument `draft_model` must be a Keras model or None. Received: draft_model={self.draft_model!r}"
            )
        if self.draft_model is not None and self.max_ngram_size is not None:
            raise ValueError(
                "The argument `max_ngram_size` must be None with a `draft_model`, which looks nothing up. Received: "
                f"max_ngram_size={self.max_ngram_size!r}"
            )
        checks.positive_int("num_draft_tokens", self.num_draft_tokens, none=True)
        checks.positive_int("max_ngram_size", self.max_ngram_size, none=True)
        for name in ("num_draft_tokens", "max_ngram_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else int(value))  # NumPy's numbers become Python's

    @property
    def num_drafts(self) -> int:
        """K: `num_draft_tokens`, or its default."""
        return self.num_draft_tokens or (LOOKED_UP if self.draft_model is None else OF_A_MODEL)

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are samples of another distribution, which are kept or replaced by chance."""
        return self.draft_model is not None and type(self.strategy) in (Sample, PerRowStrategy)

    def noise(self, batch_size: int, num_new: int) -> np.ndarray | None:
        """What `strategy.noise` returns, (M, B), or (3 * M, B) if `samples_drafts`: three numbers for each token."""
        return self.strategy.noise(batch_size, 3 * num_new if self.samples_drafts else num_new)

    def initial_state(
        self,
        ids: Tensor,
        real: Tensor,
        num_new: int,
        limit: Tensor,
        vocabulary_size: int,
        padding_id: Tensor = 0,
        noise: Tensor = None,
    ) -> State:
        """The state of `strategy`, with `num_steps`, the number of decode steps so far.

        If `samples_drafts`, also `chances` and `draft_noise`, (M, B): see `acceptance`.
        """
        more = {"num_steps": as_int32(0)}
        if self.samples_drafts:
            noise = ops.convert_to_tensor(noise)
            noise, more["chances"], more["draft_noise"] = (noise[i * num_new : (i + 1) * num_new] for i in range(3))
        state = self.strategy.initial_state(ids, real, num_new, limit, vocabulary_size, padding_id, noise)
        return {**state, **more}

    def choose(self, scores: Tensor, state: State) -> Tensor:
        return self.strategy.choose(scores, state)

    def advance(
        self,
        logits: Tensor,
        state: State,
        constraints: Callable[[Tensor, State, tuple[int, ...]], Tensor],
        stop_tokens: tuple[int, ...],
    ) -> tuple[State, Tensor, Tensor]:
        state, tokens, origin = self.strategy.advance(logits, state, constraints, stop_tokens)
        if origin is not None:
            raise ValueError(
                "The `strategy` of `Speculative` must not reorder rows. Received: "
                f"strategy={self.strategy!r}, whose `advance` returns the rows that it continues"
            )
        return state, tokens, None

    def is_running(self, state: State) -> Tensor:
        return self.strategy.is_running(state)

    def result(self, state: State) -> tuple[Tensor, Tensor]:
        return self.strategy.result(state)


def without_drafts(strategy: Strategy) -> Strategy:
    """The strategy that chooses the tokens: that of a `Speculative`, or the strategy itself."""
    return strategy.strategy if isinstance(strategy, Speculative) else strategy
