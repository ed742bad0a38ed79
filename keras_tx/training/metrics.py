"""Metrics over the real tokens of an epoch: labels (B, T), logits (B, T, V). B batch, T tokens, V vocabulary."""

from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.training import tokens
from keras_tx.types import Tensor


class TokenMean(keras.metrics.Metric):
    """The weighted mean of a value for each token, kept as a sum and a count, so that it does not depend on batches."""

    def __init__(self, padding_id: int, name: str):
        super().__init__(name=name, dtype="float32")
        self.padding_id = tokens.checked_padding_id(padding_id)
        self.total = self.add_variable((), initializer="zeros", name="total")
        self.count = self.add_variable((), initializer="zeros", name="count")

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor = None) -> None:
        labels, outputs, _, weights = tokens.checked_inputs(y_true, y_pred, self.padding_id, sample_weight)
        self.total.assign_add(ops.sum(self.per_token(labels, outputs, weights) * weights))
        self.count.assign_add(ops.sum(weights))

    def per_token(self, labels: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        """The value of each token, (B, T); it must be finite where the weight is 0."""
        raise NotImplementedError(f"{type(self).__name__} must define `per_token`.")

    def result(self) -> Tensor:
        return ops.divide_no_nan(self.total, self.count)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddedAccuracy(TokenMean):
    """Token accuracy that ignores padding: the fraction of real tokens whose label has the highest logit.

    Padding is where the label is `padding_id`; the Keras mask of the predictions is not used. The result does not
    depend on how the data are split into batches; it is 0 before the first token.

    Args:
        padding_id: labels equal to it are ignored.
        name: of the metric.

    Call arguments:
        y_true: (B, T) integers.
        y_pred: (B, T, V), logits or probabilities.
        sample_weight: (B,) or (B, T), the weights of the tokens.

    Raises:
        ValueError: see `PaddedCrossentropy`.

    Examples:
        >>> labels = np.array([[1, 2, 0, 0]])
        >>> logits = np.array([[[0, 9, 0], [0, 9, 0], [9, 0, 0], [9, 0, 0]]], "float32")
        >>> float(keras_tx.training.PaddedAccuracy()(labels, logits))
        0.5
        >>> float(keras_tx.training.PaddedAccuracy(padding_id=-100)(labels, logits))
        0.75
    """

    def __init__(self, *, padding_id: int = 0, name: str = "accuracy"):
        super().__init__(padding_id, name)

    def per_token(self, labels: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        return ops.cast(ops.equal(ops.cast(ops.argmax(outputs, axis=-1), "int32"), labels), "float32")

    def get_config(self) -> dict[str, Any]:
        return {"padding_id": self.padding_id, "name": self.name}


@keras.saving.register_keras_serializable(package="keras_tx")
class Perplexity(TokenMean):
    """Perplexity: exp of the mean of -log p(label) over all real tokens of an epoch, without label smoothing.

    The result does not depend on how the data are split into batches: it is not the mean of the perplexities of
    batches. Padding is where the label is `padding_id`; the Keras mask of the predictions is not used. It is 1 before
    the first token.

    Args:
        padding_id: labels equal to it are ignored.
        from_logits: whether the predictions are logits; if not, probabilities.
        name: of the metric.

    Call arguments:
        y_true: (B, T) integers.
        y_pred: (B, T, V).
        sample_weight: (B,) or (B, T), the weights of the tokens.

    Raises:
        ValueError: see `PaddedCrossentropy`.

    Examples:
        A model for which all of 8 tokens are equally likely has a perplexity of 8:

        >>> labels = np.array([[1, 2, 0, 0], [5, 6, 7, 0]])
        >>> print(f"{float(keras_tx.training.Perplexity()(labels, np.zeros((2, 4, 8)))):.3f}")
        8.000
    """

    def __init__(self, *, padding_id: int = 0, from_logits: bool = True, name: str = "perplexity"):
        super().__init__(padding_id, name)
        self.from_logits = checks.boolean("from_logits", from_logits)

    def per_token(self, labels: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        return tokens.token_losses(labels, outputs, weights, from_logits=self.from_logits)

    def result(self) -> Tensor:
        return ops.exp(super().result())

    def get_config(self) -> dict[str, Any]:
        return {"padding_id": self.padding_id, "from_logits": self.from_logits, "name": self.name}
