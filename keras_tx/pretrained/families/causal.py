"""The base class of causal language models: ids -> logits of the next token.

B batch, T tokens, D hidden, V vocabulary, C classes.
"""

from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.layers import Decoder, TokenEmbedding
from keras_tx.layers.projection import Projection, VocabularyProjection
from keras_tx.pretrained import generation_config, table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family, PaddingMask, Positions, split
from keras_tx.pretrained.heads import ClassHead, answer_spans
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

_DEPEND_ON_THE_PROMPT = {"min_length": (None, 0), "forced_bos_token_id": (None,)}  # {setting: values that disable it}


@keras.saving.register_keras_serializable(package="keras_tx")
class LastToken(keras.layers.Layer):
    """Vectors (B, T, D), ids (B, T), `real` (B, T) -> the vector (B, D) of the last token that is not padding.

    Padding is the id `padding_id`, as in transformers. If `padding_id` is None, padding is where `real` is False; in
    this case transformers takes only one text at a time.
    """

    def __init__(self, padding_id: int | None = None, **kwargs: Any) -> None:
        # The vectors keep the dtype of the decoder, which need not be Keras' global one.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.padding_id = padding_id

    def compute_mask(self, inputs: Tensor, mask: Tensor = None) -> None:
        return None

    def call(self, inputs: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        is_token = ops.cast(real, "bool") if self.padding_id is None else ops.not_equal(ids, self.padding_id)
        places = ops.where(is_token, ops.arange(ops.shape(ids)[1], dtype="int32"), 0)
        last = ops.max(places, axis=1)  # a row of padding tokens gives its first vector, as in transformers
        return ops.take_along_axis(inputs, last[:, None, None], axis=1)[:, 0]

    def compute_output_spec(self, inputs: Tensor, ids: Tensor, real: Tensor) -> Any:
        return keras.KerasTensor((inputs.shape[0], inputs.shape[2]), dtype=inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "padding_id": self.padding_id}


class CausalFamily(Family):
    """A token embedding, a pre-norm decoder, and a head.

    A subclass creates `embedding` and `decoder`, and defines the names of the classification heads.
    """

    inputs = ("input_ids", "attention_mask", "position_ids")
    is_causal = True
    head_key = "lm_head.weight"
    heads: tuple[str, ...] = (r"lm_head\.weight", r"(score|qa_outputs)\.(weight|bias)")
    token_head = "score"  # the name of the layer that classifies tokens
    embedding: TokenEmbedding
    decoder: Decoder

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        for name in ("add_cross_attention", "is_encoder_decoder"):
            config.refuse(name, False)
        self.padding_mask = PaddingMask(name="padding_mask")
        self.positions = Positions(name="positions")
        self.head = self._make_head()

    @property
    def padding_id(self) -> int | None:
        """The id of padding tokens in a prompt; None if it also ends a text, and so counts as a real token."""
        padding_id = self.config.token("pad_token_id")
        ends = self.config.take("eos_token_id", default=[])
        known = padding_id is not None and 0 <= padding_id < self.config.number("vocab_size")
        return padding_id if known and padding_id not in (ends if isinstance(ends, list) else [ends]) else None

    def _make_head(self) -> Any:
        config = self.config
        if self.task == "causal_lm" and not self.tied:
            return VocabularyProjection(config.size("vocab_size"), use_bias=False, dtype=self.dtype, name="head")
        if self.task == "sequence_classification":
            self.last_token = LastToken(config.token("pad_token_id"), name="last_token")
            return Projection(config.num_labels, use_bias=False, dtype=self.dtype, name="head")
        if self.task == "token_classification":
            rate = config.rate("classifier_dropout", "hidden_dropout", default=0.1)
            return ClassHead(config.num_labels, dropout=rate, dtype=self.dtype)
        return ClassHead(2, dtype=self.dtype) if self.task == "question_answering" else None

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        ids = inputs["input_ids"]
        mask = self.padding_mask(ids, inputs["attention_mask"])
        positions = self.positions(ids, inputs["position_ids"])
        absolute = {"positions": positions} if self.embedding.positions is not None else {}
        embedded = self.embedding(ids, mask=mask, **absolute)
        hidden = self.decoder(embedded, mask=mask, positions=positions, return_hidden_states=hidden_states)
        hidden, *states = hidden if hidden_states else (hidden,)
        return {
            **self._task_outputs(hidden, ids, mask),
            **({"hidden_states": split(states[0])} if hidden_states else {}),
        }

    def _task_outputs(self, hidden: Tensor, ids: Tensor, real: Tensor) -> dict[str, Tensor]:
        if self.task == "base":
            return {"last_hidden_state": hidden}
        if self.task == "causal_lm":
            return {"logits": self._logits(hidden)}
        if self.task == "question_answering":
            return answer_spans(self.head(hidden))
        return {"logits": self.head(self.last_token(hidden, ids, real) if hasattr(self, "last_token") else hidden)}

    def _logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        return self.embedding(hidden, reverse=True) if self.head is None else self.head(hidden)

    def generation_model(self) -> keras.Model | None:
        if self.task != "causal_lm":
            return None
        ids = keras.Input((None,), dtype="int32", name="input_ids")
        # `generate` passes the mask of the prompt. Generated tokens are real, also if their id is the padding id.
        embedded = self.embedding(ids, mask=self.padding_mask(ids))
        return keras.Model(ids, self._logits(self.decoder(embedded)))

    def _generation_options(self, values: dict[str, Any], begins_with: int) -> dict[str, Any]:
        # Lengths in the file include the prompt, which is unknown here; and prompts contain their start token.
        values = values or self.config.values
        for name, off in _DEPEND_ON_THE_PROMPT.items():
            if values.get(name) not in off:
                raise ValueError(
                    f"`{name}` of the generation config must be one of {off}: it depends on the prompt. Change "
                    f"`model.generation_config`. Received: {name}={values[name]!r:.200}"
                )
        options = generation_config.generate_options(
            {name: value for name, value in values.items() if name != "max_length"}
        )
        return {name: value for name, value in options.items() if name != "start_token"}

    def max_length(self, values: dict[str, Any], longest: int) -> int | None:
        values, sizes = values or self.config.values, self.config.values
        most: int | None = values.get("max_length")
        if values.get("max_new_tokens") is not None or most is not None:
            return None if values.get("max_new_tokens") is not None else most
        positions: int | None = sizes.get("max_position_embeddings", sizes.get("n_positions"))
        if positions is None or longest >= positions:
            return None
        return min(positions, longest + generation_config.DEFAULT_LENGTH)

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "token_classification":
            yield from self.head.rows(self.token_head)
        elif self.task == "question_answering":
            yield from self.head.rows("qa_outputs")
        elif self.head is not None:
            yield from table.linear("lm_head" if self.task == "causal_lm" else "score", self.head)
