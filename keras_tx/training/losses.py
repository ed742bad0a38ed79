"""Losses: labels (B, T), logits (B, T, V) -> a number. B batch, T tokens, V vocabulary."""

import keras
from keras import ops

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.training import tokens

tf = Lazy("tensorflow")

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddedCrossentropy(keras.losses.Loss):
    """The mean of -log p(label) over the real tokens of a batch: padding changes nothing.

    It is `keras.losses.SparseCategoricalCrossentropy` with the mask that the labels themselves give, whatever mask the
    model's input had: sum of the losses / number of real tokens, 0 for a batch of padding alone. Computed in float32
    under any policy, without a one-hot matrix. `loss.call(labels, logits)` gives the loss of each token, (B, T).

    The `loss` that `fit` shows for an epoch is Keras' mean over batches, longer and shorter alike; `Perplexity` counts
    tokens.

    Args:
        padding_id: labels equal to it are left out; -100 is allowed, as in Hugging Face data.
        from_logits: whether the predictions are logits; probabilities otherwise.
        label_smoothing: e in [0, 1): the target is 1 - e + e/V for the label and e/V for every other token, as in
            `keras.losses.CategoricalCrossentropy`.
        reduction: Keras' words: "sum_over_batch_size" or "mean" divide by the number of real tokens,
            "mean_with_sample_weight" by the sum of their weights; "sum"; "none" or None for (B, T).
        name: of the loss.

    Call arguments:
        y_true: (B, T) integers.
        y_pred: (B, T, V).
        sample_weight: (B,) or (B, T), multiplies the loss of each token. What stands at tokens of weight 0, NaN
            included, is never looked at.

    Raises:
        ValueError: for labels that are not integers or outside [0, V), and for shapes that do not fit. Inside a
            compiled graph a label outside is TensorFlow's to refuse; where nothing can raise (XLA, JAX, a GPU) the loss
            is NaN.
    """

    def __init__(
        self,
        *,
        padding_id=0,
        from_logits=True,
        label_smoothing=0.0,
        reduction="sum_over_batch_size",
        name="padded_crossentropy",
    ):
        super().__init__(name=name, reduction=checks.one_of("reduction", reduction, REDUCTIONS), dtype="float32")
        self.padding_id = tokens.padding(padding_id)
        self.from_logits = bool(from_logits)
        self.label_smoothing = checks.rate("label_smoothing", label_smoothing)

    def call(self, y_true, y_pred):
        labels, outputs, real, _ = tokens.read(y_true, y_pred, self.padding_id)
        return self._losses(labels, outputs, real)

    def __call__(self, y_true, y_pred, sample_weight=None):
        with keras.name_scope(self.name):
            labels, outputs, real, weights = tokens.read(y_true, y_pred, self.padding_id, sample_weight)
            losses = self._losses(labels, outputs, weights) * weights
            if self.reduction in ("none", None):
                return losses
            if self.reduction == "sum":
                return ops.sum(losses)
            count = ops.sum(weights if self.reduction == "mean_with_sample_weight" else real)
            return ops.divide_no_nan(ops.sum(losses), count) / _replicas()

    def _losses(self, labels, outputs, weights):
        return tokens.losses(
            labels, outputs, weights, from_logits=self.from_logits, label_smoothing=self.label_smoothing
        )

    def get_config(self):
        return {
            "padding_id": self.padding_id,
            "from_logits": self.from_logits,
            "label_smoothing": self.label_smoothing,
            "reduction": self.reduction,
            "name": self.name,
        }


def _replicas():
    """As Keras' losses do: the gradients of the replicas of a `tf.distribute` strategy are added."""
    return tf.distribute.get_strategy().num_replicas_in_sync if keras.backend.backend() == "tensorflow" else 1
