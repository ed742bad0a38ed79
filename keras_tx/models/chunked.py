"""Training a model over a vocabulary without its logits: the loss is made from the vectors before them, in chunks."""

import contextlib
import contextvars

import keras
from keras import ops

from keras_tx import keras_internals
from keras_tx.models.token_model import TokenModel
from keras_tx.training import PaddedCrossentropy

_TRAINED: contextvars.ContextVar = contextvars.ContextVar("model_trained_in_chunks", default=None)


class VocabularyModel(TokenModel):
    """A `TokenModel` that ends in logits over a vocabulary; `_logits_from` tells it from what they are made.

    Where it is compiled with a `PaddedCrossentropy` that has a `chunk_size`, a step of `fit` computes the vectors that
    the logits are products of, and leaves the rest to the loss.
    """

    def _logits_from(self, hidden, table):
        """To be called in `__init__`, behind that of `keras.Model`.

        Args:
            hidden: symbolic (B, T, D), computed from `self.inputs`.
            table: function that returns (V, D), and (V,) that is added to the products, or None.
        """
        object.__setattr__(self, "_hidden_model", keras.Model(self.inputs, hidden))  # not tracked: the same layers
        object.__setattr__(self, "_table", table)

    def call(self, inputs, training=None, mask=None, **kwargs):
        if _TRAINED.get() is not self:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        self._check_call(inputs, mask)
        return self._hidden_model(self._listed(inputs), training=training)

    def train_step(self, *args):
        loss = getattr(self, "loss", None)
        if not isinstance(loss, PaddedCrossentropy) or loss.chunk_size is None:
            return super().train_step(*args)
        if any(layer.quantization_mode is not None for layer in keras_internals.layers_within(self)):
            raise ValueError(
                "`chunk_size` of the loss must be None for a model that was quantized, whose table of logits is of "
                f"integers. Received: chunk_size={loss.chunk_size}"
            )
        with _trained(self):
            return super().train_step(*args)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if _TRAINED.get() is not self:
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        table, bias = self._table()
        if bias is not None:  # one more product, with 1
            y_pred = ops.concatenate([y_pred, ops.ones_like(y_pred[..., :1])], axis=-1)
            table = ops.concatenate([table, ops.cast(bias, table.dtype)[:, None]], axis=1)
        loss = self.loss.call_in_chunks(y, y_pred, table, sample_weight)
        loss_weights = keras_internals.loss_weights(self)
        if loss_weights is not None:  # of one output there is one, whatever holds it
            loss = loss * keras.tree.flatten(loss_weights)[0]
        return loss + keras_internals.sum_of_added_losses(self) if self.losses else loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self._loss_alone() if _TRAINED.get() is self else super().compute_metrics(x, y, y_pred, sample_weight)

    def get_metrics_result(self):
        """As Keras', before metrics have seen logits the loss alone."""
        return super().get_metrics_result() if keras_internals.metrics_are_built(self) else self._loss_alone()

    def _loss_alone(self):
        tracker = keras_internals.loss_tracker(self)
        return {tracker.name: tracker.result()}


@contextlib.contextmanager
def _trained(model):
    token = _TRAINED.set(model)
    try:
        yield
    finally:
        _TRAINED.reset(token)
