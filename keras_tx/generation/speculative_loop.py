"""The loop of speculative decoding: each decode step checks K draft tokens, and adds 1 to K + 1 tokens to all rows.

R rows, K draft tokens, V vocabulary. A step gives the model the last token and the K drafts. The strategy then chooses
one token after the other from the K + 1 logits, as in `DecodeLoop`, as long as in every unfinished row the token before
was the draft. Slots of the cache after that hold drafts that were wrong; the next step writes over them. The cache has
K slots more, for drafts after the last token.
"""

from typing import Any

from keras import ops

from keras_tx.generation import ngrams
from keras_tx.generation.acceptance import Checking
from keras_tx.generation.constraints import Constraints, last_ids
from keras_tx.generation.decode_loop import Context, DecodeLoop, with_shapes_of
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.speculative import NGRAM_SIZE, Speculative
from keras_tx.generation.state import State
from keras_tx.layers import cache as caches
from keras_tx.types import Tensor


class SpeculativeLoop(DecodeLoop):
    """`DecodeLoop` for a `Speculative` strategy. See `DecodeLoop` for the other arguments.

    Args:
        draft: the `IncrementalModel` of `strategy.draft_model`, or None.
    """

    def __init__(
        self,
        model: IncrementalModel,
        strategy: Speculative,
        constraints: Constraints,
        stop_tokens: tuple[int, ...],
        padding_id: int,
        num_new: int,
        draft: IncrementalModel | None,
    ):
        self.num_drafts = strategy.num_drafts
        super().__init__(model, strategy, constraints, stop_tokens, padding_id, num_new, num_extra=self.num_drafts)
        self.max_ngram_size = strategy.max_ngram_size or NGRAM_SIZE
        self.samples_drafts, self.checking = strategy.samples_drafts, Checking(strategy.strategy)
        self.draft_loop = None
        if draft is not None:
            options = (strategy.strategy, constraints, stop_tokens, padding_id, num_new)
            self.draft_loop = DecodeLoop(draft, *options, num_extra=self.num_drafts)

    def prefill(
        self, ids: Tensor, real: Tensor, sources: list[Tensor], limit: Tensor, noise: Tensor
    ) -> tuple[State, Tensor, Context]:
        """As in `DecodeLoop`. The context also has `draft`, that of the draft model, or `searched`: the ids and real
        tokens, (R, S) each, of sources in which n-grams are looked up."""
        state, tokens, context = super().prefill(ids, real, sources, limit, noise)
        if self.draft_loop is not None:
            sources = sources if self.draft_loop.model.sources else []
            _, draft_context = self.draft_loop.read_prompts(ids, real, sources)
            return state, tokens, {**context, "draft": draft_context}
        searched = []
        for name, source in zip(self.model.sources, sources, strict=True):
            if self.model.vocabulary_sizes[name] == self.model.target_vocabulary_size:
                padding_id = self.model.padding_ids[name]
                is_real = ops.ones_like(source, dtype="bool") if padding_id is None else source != padding_id
                searched.append((ops.cast(source, "int32"), is_real))
        return state, tokens, {**context, "searched": searched}

    def decode(self, state: State, tokens: Tensor, context: Context, until: Tensor) -> tuple[State, Tensor, Context]:
        """As in `DecodeLoop`, but the last step may generate more than `until` tokens."""
        own, of_draft = context["cache"], context["draft"]["cache"] if self.draft_loop is not None else ()
        count = len(caches.growing(own))

        def is_running(state: State, tokens: Tensor, buffers: list[Tensor]) -> Tensor:
            return ops.logical_and(self.strategy.is_running(state), state["step"] < until)

        def decode_step(state: State, tokens: Tensor, buffers: list[Tensor]) -> Any:
            before = state, tokens, buffers
            drafts, probabilities, draft_buffers = self._drafts(state, tokens, context, buffers[count:])
            ids = ops.concatenate([tokens[:, None], drafts], axis=1)  # (R, K + 1)
            cache = caches.with_growing(own, buffers[:count])
            logits, cache = self.step(ids, state, context, cache, every_token=True)
            state, tokens = self._checked(state, tokens, logits, drafts, probabilities)
            state = {**state, "num_steps": state["num_steps"] + 1}
            return with_shapes_of(before, (state, tokens, [*caches.merged(caches.growing(cache)), *draft_buffers]))

        buffers = caches.merged([*caches.growing(own), *caches.growing(of_draft)])
        state, tokens, buffers = ops.while_loop(is_running, decode_step, (state, tokens, buffers))
        context = {**context, "cache": caches.with_growing(own, buffers[:count])}
        if self.draft_loop is not None:
            of_draft = caches.with_growing(of_draft, buffers[count:])
            context = {**context, "draft": {**context["draft"], "cache": of_draft}}
        return state, tokens, context

    def _checked(
        self, state: State, tokens: Tensor, logits: Tensor, drafts: Tensor, probabilities: Tensor
    ) -> tuple[State, Tensor]:
        """Chooses tokens from the logits (R, K + 1, V), up to the first that is not the draft (R, K) of its row.

        `probabilities` (R, K, V) are those that the drafts were drawn from, if they were drawn.
        """
        drafts = ops.pad(drafts, ((0, 0), (0, 1)))  # the last token has no draft
        if self.samples_drafts:
            probabilities = ops.pad(probabilities, ((0, 0), (0, 1), (0, 0)))

        def goes_on(state: State, tokens: Tensor, index: Tensor, is_right: Tensor) -> Tensor:
            is_next = ops.logical_and(is_right, index <= self.num_drafts)
            return ops.logical_and(is_next, self.strategy.is_running(state))

        def choose(state: State, tokens: Tensor, index: Tensor, is_right: Tensor) -> Any:
            before = state, tokens, index, is_right
            at_index, draft = ops.take(logits, index, axis=1), ops.take(drafts, index, axis=1)
            if self.samples_drafts:
                given = {"draft": draft, "draft_probabilities": ops.take(probabilities, index, axis=1)}
                given = {**state, **given}
                state, tokens, _ = self.checking.advance(at_index, given, self.constraints, self.stop_tokens)
                state = {name: state[name] for name in before[0]}
            else:
                state, tokens, _ = self.strategy.advance(at_index, state, self.constraints, self.stop_tokens)
            is_right = ops.logical_or(tokens == draft, state["done"])
            return with_shapes_of(before, (state, tokens, index + 1, ops.all(is_right)))

        first = ops.convert_to_tensor(0, "int32"), ops.convert_to_tensor(True)
        state, tokens, _, _ = ops.while_loop(goes_on, choose, (state, tokens, *first))
        return state, tokens

    def _drafts(
        self, state: State, tokens: Tensor, context: Context, buffers: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The draft tokens (R, K), the probabilities (R, K, V) if they are drawn, and the draft model's buffers."""
        if self.draft_loop is not None:
            return self._drafts_of_model(self.draft_loop, state, tokens, context["draft"], buffers)
        ids, real = (
            ops.concatenate([*[pair[i] for pair in context["searched"]], state[name]], axis=1)
            for i, name in enumerate(("ids", "real"))
        )
        end = ops.shape(ids)[1] - ops.shape(state["ids"])[1] + state["slot"]
        return ngrams.look_up(ids, real, end, last_ids(state, self.max_ngram_size), self.num_drafts), None, []

    def _drafts_of_model(
        self, loop: DecodeLoop, state: State, tokens: Tensor, context: Context, buffers: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What the draft model generates after the tokens so far.

        Its first step takes the last two tokens, because the last draft before, if it was right, is not in its cache.
        The steps are no loop: as a loop within that of `decode`, each took about seven times as long under XLA.
        """
        previous = ops.take(state["ids"], state["slot"] - 2, axis=1)  # the last prompt token, if there is one new token
        if self.samples_drafts:
            state = {**state, "noise": state["draft_noise"]}
        cache, drafts, probabilities = caches.with_growing(context["cache"], buffers), [], []
        for i in range(self.num_drafts):
            ids = tokens[:, None] if i else ops.stack([previous, tokens], axis=1)
            logits, cache = loop.step(ids, state, context, cache, num_before=0 if i else 1)
            # Drafts after the limit are never used, but there must be a random number for them, and slots before them.
            limits = {"step": self.num_new - 1, "slot": ops.shape(state["ids"])[1]}
            state = {**state, **{name: ops.minimum(state[name], most) for name, most in limits.items()}}
            if self.samples_drafts:
                scores = loop.constraints(logits, state, loop.stop_tokens)
                probabilities.append(self.checking.strategy.probabilities(scores))
            state, tokens, _ = loop.strategy.advance(logits, state, loop.constraints, loop.stop_tokens)
            drafts.append(tokens)
        drawn_from = ops.stack(probabilities, axis=1) if self.samples_drafts else None
        return ops.stack(drafts, axis=1), drawn_from, caches.merged(caches.growing(cache))
