"""The layers of a loaded model whose weights are new, and the warning of `fit` if all of them are frozen.

Hugging Face's names of tensors do not tell which layers to unfreeze here.
"""

import warnings
from collections.abc import Iterable

import keras
from keras import ops

from keras_tx.pretrained.table import Row


class NewLayers:
    """The layers of a model that have a variable of one of the rows.

    Args:
        model: a functional model.
        rows: the rows of the new tensors.
    """

    def __init__(self, model: keras.Model, rows: Iterable[Row]) -> None:
        self._new = {id(variable) for row in rows for variable in row.variables}  # `quantize` can free the variables
        self.layers = [layer for layer in model.layers if any(id(weight) in self._new for weight in layer.weights)]
        self._drawn = self._sums()

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    def warn_if_frozen(self) -> None:
        """Warns the caller of `fit` if all new layers are frozen, and their weights are still the random ones."""
        is_frozen = self.layers and not any(layer.trainable_weights for layer in self.layers)
        if is_frozen and self._sums() == self._drawn:
            warnings.warn(
                f"The layers {self.names} have new random weights and are frozen, so they will not learn. Set "
                '`model.get_layer("NAME").trainable = True` for them, and compile again.',
                stacklevel=3,
            )

    def _sums(self) -> tuple[int, list[float]]:
        """A number for each new weight, which training and loading change; copies of large tables would need memory.

        And the number of all weights of the layers, which LoRA changes.
        """
        weights = [weight for layer in self.layers for weight in layer.weights]
        sums = [ops.sum(ops.cast(weight, "float32")) for weight in weights if id(weight) in self._new]
        values = ops.convert_to_numpy(ops.stop_gradient(ops.stack(sums))).tolist() if sums else []
        return len(weights), values
