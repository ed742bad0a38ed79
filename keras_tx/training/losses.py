"""Losses: labels (B, T), logits (B, T, V) -> scalar. B batch, T tokens, V vocabulary."""

from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.training import replicas, tokens
from keras_tx.training.chunks import chunked_loss
from keras_tx.types import Tensor

_ANY_SIZE = 2**31  # of a vocabulary
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddedCrossentropy(keras.losses.Loss):
    """Sparse categorical cross-entropy that ignores padding: the mean of -log p(label) over the real tokens of a batch.

    It is `keras.losses.SparseCategoricalCrossentropy` with a mask computed from the labels; the Keras mask of the
    predictions is not used. It returns the sum of the losses divided by the number of real tokens, or 0 for a batch of
    padding only. It is computed in float32 under any dtype policy. `loss.call(labels, logits)` returns the loss of each
    token, (B, T).

    The `loss` that `fit` shows for an epoch is the mean over batches, whatever their numbers of tokens; `Perplexity`
    averages over tokens.

    Under a strategy of `tf.distribute` the number of real tokens is that of all replicas, and on JAX that of all
    devices, so that training on several devices is the same as on one. (Keras' own losses take the mean on each replica
    and the mean of these means, which is another objective if the replicas have different numbers of tokens; but the
    models of this package make it the mean over all of them.) With PyTorch and `torch.distributed` the number is summed
    over all processes if the loss has gradients, so every process must compute the loss. The loss of a process is its
    share of the total loss, multiplied by the number of processes, because
    `torch.nn.parallel.DistributedDataParallel` takes the mean of their gradients. With
    `gradient_accumulation_steps` of an optimizer the models of this package count over all batches of an update.

    Args:
        padding_id: labels with this value are ignored: the padding id of the tokenizer, or -100, as in Hugging Face
            data.
        from_logits: whether the predictions are logits; otherwise they are probabilities.
        label_smoothing: e in [0, 1): the target probability is 1 - e + e/V for the label and e/V for every other token,
            as in `keras.losses.CategoricalCrossentropy`.
        chunk_size: with `CausalLM`, `MaskedLM` and `Seq2Seq`, `fit` computes logits and loss of this many tokens at a
            time: the full logits (B, T, V) are never in memory, and tokens without a label cost nothing. Metrics need
            the full logits, so they are computed only in evaluation. None: all tokens at once. Other models, and loaded
            checkpoints, ignore it.
        reduction: as in Keras: "sum_over_batch_size" and "mean" divide the sum by the number of real tokens,
            "mean_with_sample_weight" by the sum of their weights; "sum" does not divide; "none" and None return the
            losses (B, T).
        name: the name of the loss.

    Call arguments:
        y_true: labels, (B, T) integers.
        y_pred: logits or probabilities, (B, T, V).
        sample_weight: (B,) or (B, T), multiplied with the loss of each token. Predictions at tokens of weight 0 are
            ignored, even if they are NaN.

    Returns:
        A float32 scalar, or (B, T) without reduction.

    Raises:
        ValueError: for labels that are not integers or not in [0, V), and for shapes that do not match. `fit` and
            `evaluate` of the models of this package check labels before the graph runs. In a compiled graph of other
            models TensorFlow raises its own error for such labels; where no error can be raised (XLA, JAX, a GPU), the
            loss is NaN.

    Reference:
        Label smoothing: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Examples:
        The label of the only real token has the probability 1/2, so the loss is log 2:

        >>> loss = keras_tx.training.PaddedCrossentropy()
        >>> labels = np.array([[1, 0, 0]])
        >>> logits = np.log(np.array([[[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [0.1, 0.1, 0.8]]]))
        >>> print(f"{float(loss(labels, logits)):.4f}")
        0.6931
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> model.compile("adam", loss, metrics=[keras_tx.training.Perplexity()])
    """

    counts_over_replicas = True  # what `fit` under a strategy must know

    def __init__(
        self,
        *,
        padding_id: int = 0,
        from_logits: bool = True,
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str = "padded_crossentropy",
    ):
        super().__init__(name=name, reduction=checks.one_of("reduction", reduction, REDUCTIONS), dtype="float32")
        self.padding_id = tokens.checked_padding_id(padding_id)
        self.from_logits = checks.boolean("from_logits", from_logits)
        self.label_smoothing = checks.rate("label_smoothing", label_smoothing)
        self.chunk_size = checks.positive_int("chunk_size", chunk_size, none=True)
        if chunk_size is not None and (reduction in ("none", None) or not self.from_logits):
            raise ValueError(
                "`chunk_size` needs logits and a reduction to one number. Received: "
                f"chunk_size={chunk_size}, reduction={reduction!r}, from_logits={from_logits}"
            )

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        labels, outputs, real, _ = tokens.checked_inputs(y_true, y_pred, self.padding_id)
        return self._losses(labels, outputs, real)

    def __call__(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> Tensor:
        with keras.name_scope(self.name):
            labels, outputs, real, weights = tokens.checked_inputs(y_true, y_pred, self.padding_id, sample_weight)
            losses = self._losses(labels, outputs, weights) * weights
            return losses if self.reduction in ("none", None) else self._reduced(ops.sum(losses), real, weights)

    def call_in_chunks(self, y_true: Tensor, hidden: Tensor, table: Tensor, sample_weight: Tensor = None) -> Tensor:
        """The loss for the logits `hidden` (B, T, D) times `table` (V, D), transposed, `chunk_size` tokens at a time.

        The value, its gradients and the errors are those of `__call__` with the full logits.
        """
        labels, real, weights = tokens.checked_labels(
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

    def _reduced(self, total: Tensor, real: Tensor, weights: Tensor) -> Tensor:
        if self.reduction == "sum":
            return replicas.share_of_sum(total)
        return replicas.mean_over_replicas(total, self._count(real, weights))

    def count(self, y_true: Tensor, sample_weight: Tensor = None) -> Tensor:
        """What the sum of the losses is divided by: the number of real tokens, or the sum of their weights."""
        _, real, weights = tokens.checked_labels(y_true, tuple(y_true.shape), _ANY_SIZE, self.padding_id, sample_weight)
        return self._count(real, weights)

    def _count(self, real: Tensor, weights: Tensor) -> Tensor:
        return ops.sum(weights if self.reduction == "mean_with_sample_weight" else real)

    def _losses(self, labels: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        return tokens.token_losses(
            labels, outputs, weights, from_logits=self.from_logits, label_smoothing=self.label_smoothing
        )

    def get_config(self) -> dict[str, Any]:
        return {
            "padding_id": self.padding_id,
            "from_logits": self.from_logits,
            "label_smoothing": self.label_smoothing,
            "chunk_size": self.chunk_size,
            "reduction": self.reduction,
            "name": self.name,
        }
