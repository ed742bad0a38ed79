"""Metrics over the real tokens of an epoch: labels (B, T), logits (B, T, V). B batch, T tokens, V vocabulary."""

import keras
from keras import ops

from keras_tx.training import tokens


class TokenMean(keras.metrics.Metric):
    """The weighted mean of a number per token: a sum and a count, so that it is the same whatever the batches."""

    def __init__(self, padding_id, name):
        super().__init__(name=name, dtype="float32")
        self.padding_id = tokens.padding(padding_id)
        self.total = self.add_variable((), initializer="zeros", name="total")
        self.count = self.add_variable((), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels, outputs, _, weights = tokens.read(y_true, y_pred, self.padding_id, sample_weight)
        self.total.assign_add(ops.sum(self.per_token(labels, outputs, weights) * weights))
        self.count.assign_add(ops.sum(weights))

    def per_token(self, labels, outputs, weights):
        """(B, T): the number of each token, finite where the weight is 0."""
        raise NotImplementedError

    def result(self):
        return ops.divide_no_nan(self.total, self.count)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddedAccuracy(TokenMean):
    """The share of the real tokens whose highest logit is the label's; 0 before the first.

    Padding is what the labels say, whatever the mask of the model's input; the result does not depend on how the data
    were cut into batches. A `sample_weight` of (B,) or (B, T) weighs the tokens.

    Args:
        padding_id: labels equal to it are left out.
        name: of the metric.
    """

    def __init__(self, *, padding_id=0, name="accuracy"):
        super().__init__(padding_id, name)

    def per_token(self, labels, outputs, weights):
        return ops.cast(ops.equal(ops.cast(ops.argmax(outputs, axis=-1), "int32"), labels), "float32")

    def get_config(self):
        return {"padding_id": self.padding_id, "name": self.name}


@keras.saving.register_keras_serializable(package="keras_tx")
class Perplexity(TokenMean):
    """exp of the mean of -log p(label) over all real tokens of the epoch, without label smoothing; 1 before the first.

    Not the mean of the perplexities of batches: the result does not depend on how the data were cut into batches.
    Padding is what the labels say, whatever the mask of the model's input. A `sample_weight` of (B,) or (B, T) weighs
    the tokens.

    Args:
        padding_id: labels equal to it are left out.
        from_logits: whether the predictions are logits; probabilities otherwise.
        name: of the metric.
    """

    def __init__(self, *, padding_id=0, from_logits=True, name="perplexity"):
        super().__init__(padding_id, name)
        self.from_logits = bool(from_logits)

    def per_token(self, labels, outputs, weights):
        return tokens.losses(labels, outputs, weights, from_logits=self.from_logits)

    def result(self):
        return ops.exp(super().result())

    def get_config(self):
        return {"padding_id": self.padding_id, "from_logits": self.from_logits, "name": self.name}
