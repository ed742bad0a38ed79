"""Training without the full logits: the loss is computed from the hidden states, a chunk of tokens at a time."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.internals import keras_models, keras_training
from keras_tx.layers.unpadding import padding_unread
from keras_tx.models.base import Twins, with_twins
from keras_tx.models.token_model import TokenModel
from keras_tx.training import PaddedCrossentropy
from keras_tx.types import Tensor

_TRAINED: contextvars.ContextVar[Any] = contextvars.ContextVar("model_trained_in_chunks", default=None)


class VocabularyModel(TokenModel):
    """A `TokenModel` whose outputs are logits over a vocabulary.

    If it is compiled with a `PaddedCrossentropy` that has a `chunk_size`, a training step computes only the hidden
    states before the logits, and the loss computes the logits of one chunk of tokens at a time.
    """

    def _returns_logits(self) -> bool:
        return True

    def _padding_of_labels(self) -> int | None:
        of_labels: Any = getattr(self, "target_embedding", self.embedding)
        padding_id: int | None = of_labels.padding_id
        return padding_id

    def _logits_from(self, hidden: Any) -> None:
        """Sets what logits are computed from: symbolic hidden states (B, T, D), computed from `self.inputs`.

        Each constructor calls it after the constructor of `keras.Model`.
        """
        object.__setattr__(self, "_hidden_model", keras.Model(self.inputs, hidden))  # not tracked: the same layers

    def _table(self) -> tuple[Tensor, Tensor | None]:
        """The output kernel (V, D) and the bias (V,) or None."""
        raise NotImplementedError

    def _take_over(self, source: Any, twins: Twins) -> None:
        super()._take_over(source, twins)
        self._logits_from(with_twins(source._hidden_model.outputs[0], twins))

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        if _TRAINED.get() is not self:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        self._check_call(inputs, mask)
        with padding_unread(self._padding_is_unread(training)):
            return self._hidden_model(self._listed(inputs), training=training)

    @property
    def steps_update_metrics(self) -> bool:
        return not self._trains_in_chunks()

    def _trains_in_chunks(self) -> bool:
        loss = getattr(self, "loss", None)
        return isinstance(loss, PaddedCrossentropy) and loss.chunk_size is not None

    def train_step(self, *args: Any) -> Any:
        if not self._trains_in_chunks():
            return super().train_step(*args)
        if any(layer.quantization_mode is not None for layer in keras_models.layers_within(self)):
            raise ValueError(
                "`chunk_size` of the loss must be None for a quantized model, whose table of logits holds integers. "
                f"Received: chunk_size={self.loss.chunk_size}"
            )
        with _trained(self):
            return super().train_step(*args)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Tensor:
        if _TRAINED.get() is not self:
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        table, bias = self._table()
        if bias is not None:  # as one more column of the table, which a hidden state of 1 is multiplied by
            y_pred = ops.concatenate([y_pred, ops.ones_like(y_pred[..., :1])], axis=-1)
            table = ops.concatenate([table, ops.cast(bias, table.dtype)[:, None]], axis=1)
        labels = keras.tree.flatten(y)  # Keras takes those of one output in a list, too
        loss = self.loss.call_in_chunks(labels[0] if len(labels) == 1 else y, y_pred, table, sample_weight)
        loss_weights = keras_training.loss_weights(self)
        if loss_weights is not None:  # a number, or a list or dict of one number: the model has one output
            loss = loss * keras.tree.flatten(loss_weights)[0]
        loss = loss + keras_training.sum_of_added_losses(self) if self.losses else loss
        return self._with_added_losses_once(loss)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self._loss_alone() if _TRAINED.get() is self else super().compute_metrics(x, y, y_pred, sample_weight)

    def get_metrics_result(self) -> Any:
        """As in Keras, but only the loss until an evaluation has given logits to the metrics."""
        return super().get_metrics_result() if keras_training.metrics_are_built(self) else self._loss_alone()

    def _loss_alone(self) -> dict[str, Any]:
        tracker = keras_training.loss_tracker(self)
        return {tracker.name: tracker.result()}


@contextlib.contextmanager
def _trained(model: VocabularyModel) -> Iterator[None]:
    token = _TRAINED.set(model)
    try:
        yield
    finally:
        _TRAINED.reset(token)
