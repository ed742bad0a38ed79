"""The base class of encoder-decoder models: T5, BART and Marian. Source ids, target ids -> logits.

B batch, S source tokens, T target tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.internals.keras_models import keep_call_arguments
from keras_tx.layers.ids import check_in_each_row, values_of
from keras_tx.layers.projection import VocabularyProjection
from keras_tx.pretrained import generation_config, table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family, PaddingMask, split
from keras_tx.pretrained.heads import answer_spans
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class TargetIds(keras.layers.Layer):
    """Returns the target ids (B, T), or, without them, the source ids (B, S) shifted right by a start token.

    Args:
        start_id: the id of the start token.
    """

    def __init__(self, start_id: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.start_id = start_id
        keep_call_arguments(self)

    def call(self, ids: Tensor, target_ids: Tensor = None) -> Tensor:
        if target_ids is not None:
            return target_ids
        return ops.concatenate([ops.full_like(ids[:, :1], self.start_id), ids[:, :-1]], axis=1)

    def compute_mask(self, ids: Tensor, mask: Tensor = None) -> None:
        return None

    def compute_output_spec(self, ids: Tensor, target_ids: Tensor = None) -> Any:
        return keras.KerasTensor(ids.shape if target_ids is None else target_ids.shape, dtype="int32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start_id": self.start_id}


@keras.saving.register_keras_serializable(package="keras_tx")
class AtLast(keras.layers.Layer):
    """Vectors (B, T, D), ids (B, T) -> the vectors (B, D) at the last occurrence of `token_id`, the end of a text.

    As in transformers, an eager call raises an error for a row without it; but not for a row of one id, repeated, as
    with which `keras_tx.data.fill_batches` fills a batch up.
    """

    def __init__(self, token_id: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.token_id = token_id
        keep_call_arguments(self)

    def call(self, hidden: Tensor, ids: Tensor) -> Tensor:
        values = values_of(ids)
        if values is not None:
            check_in_each_row("input_ids", values, self.token_id, "eos_token_id", _is_repeated(values))
        slots = ops.arange(ops.shape(ids)[1], dtype="int32")
        last = ops.max(ops.where(ops.equal(ids, self.token_id), slots, 0), axis=1)
        return ops.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    def compute_mask(self, hidden: Tensor, mask: Tensor = None) -> None:
        return None

    def compute_output_spec(self, hidden: Tensor, ids: Tensor) -> Any:
        return keras.KerasTensor((hidden.shape[0], hidden.shape[2]), dtype=hidden.dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "token_id": self.token_id}


def _is_repeated(values: Any) -> Any:
    """Which rows (B, T) are one id, repeated, or zeros."""
    if values.ndim != 2:
        return False
    return (values == 0).all(axis=-1) | ((values[:, :1] == values).all(axis=-1) & (values.shape[1] > 1))


class Seq2SeqFamily(Family):
    """A family with an encoder and a decoder.

    A subclass creates `embedding` (of the sources), `target_embedding`, `encoder`, `decoder` and `head`, and connects
    them by `_embed` and, if there is more between them, by `_encoded`, `_decoded` and `_logits`.
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    needed: tuple[str, ...] = ("input_ids", "decoder_input_ids")
    head_key = "lm_head.weight"
    encoder_tasks: tuple[str, ...] = ()  # the tasks without a decoder
    embedding: Any
    target_embedding: Any
    encoder: Any
    decoder: Any
    head: Any
    class_head: Any = None  # of classification tasks
    target_ids: Any = None  # whether the decoder gets the source if there is no target
    at_last: Any = None  # of "sequence_classification"

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        config.refuse("is_decoder", False)
        config.refuse("is_encoder_decoder", *([True] if task not in self.encoder_tasks else [True, False]))
        self.padding_mask = PaddingMask(name="padding_mask")
        self.target_mask = PaddingMask(name="decoder_padding_mask")

    def _padding_id(self, vocabulary_size: int, default: Any) -> int:
        """The id of padding tokens; raises if it is not in the vocabulary."""
        padding_id = self.config.take("pad_token_id", default=default)
        if type(padding_id) is not int or not 0 <= padding_id < vocabulary_size:
            raise ValueError(
                "`pad_token_id` in config.json must be an id of the vocabulary. Received: "
                f"pad_token_id={padding_id!r}, vocab_size={vocabulary_size}"
            )
        return padding_id

    def _embed(self, side: str, ids: Tensor, mask: Tensor = None, by_slot: bool = False) -> Tensor:
        """Embeds the ids of one `side`, "encoder" or "decoder": (B, T) -> (B, T, D).

        Args:
            mask: (B, T), True at real tokens; None: all ids but the padding id are real.
            by_slot: whether positions count all tokens, as in Hugging Face, instead of real tokens, as generation
                needs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `_embed`.")

    def _encoded(self, hidden: Tensor) -> Tensor:
        """Processes the output of the encoder."""
        return hidden

    def _decoded(self, hidden: Tensor) -> Tensor:
        """Processes the output of the decoder."""
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        return self.target_embedding(hidden, reverse=True) if self.head is None else self.head(hidden)

    def _make_head(self) -> Any:
        """The output layer; None if the logits are tied to the token table, or the task has no logits."""
        if self.tied or self.task != "conditional_generation":
            return None
        size = self.target_embedding.vocabulary_size
        return VocabularyProjection(size, use_bias=False, dtype=self.dtype, name="lm_head")

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        ids, target = inputs["input_ids"], self._target(inputs)
        mask = self.padding_mask(ids, inputs["attention_mask"])
        target_mask = self.target_mask(target, inputs["decoder_attention_mask"])
        wanted = {"return_hidden_states": hidden_states}
        memory = self.encoder(self._embed("encoder", ids, mask, by_slot=True), mask=mask, **wanted)
        memory, *states = memory if hidden_states else (memory,)
        memory = self._encoded(memory)
        embedded = self._embed("decoder", target, target_mask, by_slot=True)
        hidden = self.decoder(embedded, memory, mask=target_mask, memory_mask=mask, **wanted)
        hidden, *target_states = hidden if hidden_states else (hidden,)
        hidden = self._decoded(hidden)
        outputs = {**self._task_outputs(hidden, ids), "encoder_last_hidden_state": memory}
        if hidden_states:
            outputs["encoder_hidden_states"] = split(states[0])
            outputs["decoder_hidden_states"] = split(target_states[0])
        return outputs

    def _target(self, inputs: dict[str, Tensor]) -> Tensor:
        """The ids that are the decoder's input."""
        given = inputs["decoder_input_ids"]
        return given if self.target_ids is None else self.target_ids(inputs["input_ids"], given)

    def _task_outputs(self, hidden: Tensor, ids: Tensor) -> dict[str, Tensor]:
        if self.task == "base":
            return {"last_hidden_state": hidden}
        if self.task == "sequence_classification":
            return {"logits": self.class_head(self.at_last(hidden, ids))}
        if self.task == "question_answering":
            return answer_spans(self.class_head(hidden))
        return {"logits": self._logits(hidden)}

    def generation_model(self) -> keras.Model | None:
        if self.task != "conditional_generation":
            return None
        ids = keras.Input((None,), dtype="int32", name="input_ids")
        target = keras.Input((None,), dtype="int32", name="decoder_input_ids")
        memory = self._encoded(self.encoder(self._embed("encoder", ids)))
        # In T5 and Marian the target starts with the padding id, and may contain it: all target ids are real tokens.
        embedded = self._embed("decoder", target, self.target_mask(target))
        return keras.Model([ids, target], self._logits(self._decoded(self.decoder(embedded, memory))))

    def _generation_options(self, values: dict[str, Any], begins_with: int) -> dict[str, Any]:
        # Older checkpoints have these values in config.json.
        return generation_config.generate_options(values or self.config.values, begins_with)

    def max_length(self, values: dict[str, Any], longest: int) -> int | None:
        values = values or self.config.values
        most: int | None = values.get("max_length")
        return None if values.get("max_new_tokens") is not None else most

    def _head_rows(self) -> Iterator[Row]:
        if self.task == "sequence_classification":
            yield from self.class_head.rows("classification_head.out_proj", "classification_head.dense")
        elif self.class_head is not None:
            yield from self.class_head.rows("classifier" if self.task == "token_classification" else "qa_outputs")
        elif self.head is not None:
            yield from table.linear("lm_head", self.head)
