"""Losses: labels (B, T), logits (B, T, V) -> a number. B batch, T tokens, V vocabulary."""

import keras
from keras import ops

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.training import tokens
from keras_tx.training.chunks import chunked_loss

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
        chunk_size: with `CausalLM`, `MaskedLM` and `Seq2Seq`, `fit` computes logits and loss of so many tokens at a
            time: the logits (B, T, V) are never whole in memory, and tokens without a label cost nothing. Metrics are
            then computed in evaluation alone, which has whole logits. None: all at once. With other models, loaded
            checkpoints too, it does nothing.
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
        chunk_size=None,
        reduction="sum_over_batch_size",
        name="padded_crossentropy",
    ):
        super().__init__(name=name, reduction=checks.one_of("reduction", reduction, REDUCTIONS), dtype="float32")
        self.padding_id = tokens.padding(padding_id)
        self.from_logits = bool(from_logits)
        self.label_smoothing = checks.rate("label_smoothing", label_smoothing)
        self.chunk_size = checks.positive_int("chunk_size", chunk_size, none=True)
        if chunk_size is not None and (reduction in ("none", None) or not from_logits):
            raise ValueError(
                "`chunk_size` needs logits and a reduction to one number. Received: "
                f"chunk_size={chunk_size}, reduction={reduction!r}, from_logits={from_logits}"
            )

    def call(self, y_true, y_pred):
        labels, outputs, real, _ = tokens.read(y_true, y_pred, self.padding_id)
        return self._losses(labels, outputs, real)

    def __call__(self, y_true, y_pred, sample_weight=None):
        with keras.name_scope(self.name):
            labels, outputs, real, weights = tokens.read(y_true, y_pred, self.padding_id, sample_weight)
            losses = self._losses(labels, outputs, weights) * weights
            return losses if self.reduction in ("none", None) else self._reduced(ops.sum(losses), real, weights)

    def of_hidden(self, y_true, hidden, table, sample_weight=None):
        """The loss of the logits that are the products of `hidden` (B, T, D) and `table` (V, D), in chunks.

        Of other labels than `__call__` takes it raises the same, and its gradients are the same.
        """
        labels, real, weights = tokens.read_labels(
            y_true, hidden.shape[:-1], table.shape[0], self.padding_id, sample_weight
        )
        total = chunked_loss(
            ops.reshape(hidden, (-1, hidden.shape[-1])),
            ops.cast(table, hidden.dtype),
            ops.reshape(labels, (-1,)),
            ops.reshape(weights, (-1,)),
            chunk_size=self.chunk_size,
            label_smoothing=self.label_smoothing,
        )
        return self._reduced(total, real, weights)

    def _reduced(self, total, real, weights):
        if self.reduction == "sum":
            return total
        count = ops.sum(weights if self.reduction == "mean_with_sample_weight" else real)
        return ops.divide_no_nan(total, count) / _replicas()

    def _losses(self, labels, outputs, weights):
        return tokens.losses(
            labels, outputs, weights, from_logits=self.from_logits, label_smoothing=self.label_smoothing
        )

    def get_config(self):
        return {
            "padding_id": self.padding_id,
            "from_logits": self.from_logits,
            "label_smoothing": self.label_smoothing,
            "chunk_size": self.chunk_size,
            "reduction": self.reduction,
            "name": self.name,
        }


def _replicas():
    """As Keras' losses do: the gradients of the replicas of a `tf.distribute` strategy are added."""
    return tf.distribute.get_strategy().num_replicas_in_sync if keras.backend.backend() == "tensorflow" else 1
