"""Optimizers that see matrices where attention has kernels of three axes."""

import math
import re
from types import SimpleNamespace

import keras
from keras import ops

from keras_tx.keras_internals import MuonByVariable

_KERNEL = re.compile(r"(^|/)(query|key|value|gate|attention_output)/kernel$")
_NO_KERNELS = ("/bias", "/embeddings", "/segments")  # attention's biases have two axes


@keras.saving.register_keras_serializable(package="keras_tx")
class Muon(MuonByVariable):
    """`keras.optimizers.Muon` for transformers: attention's kernels get Muon's update too, not AdamW's.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; scaled as in Liu et al. 2025, arXiv:2502.16982) takes
    the momentum of a matrix and replaces it by a matrix near the orthogonal one that is closest to it. Keras' own takes
    kernels of two axes alone. Here the kernels of queries, keys, values and gates (D, N, H) count as matrices
    (D, N * H), and that of attention's output (N, H, D) as (N * H, D), in layers of this package and in
    `keras.layers.MultiHeadAttention`: they are known by the names `query`, `key`, `value`, `gate` and
    `attention_output`. Left to AdamW are other variables of three axes and more, such as those of convolutions,
    embeddings, norms, biases, also those (N, H) of attention, which Keras' own takes for matrices, and every variable
    in whose path `exclude_layers` finds one of its regular expressions.

    Args:
        As `keras.optimizers.Muon`, by the same names and with the same defaults. Both `weight_decay` and
        `adam_weight_decay` are 0.004 there; None is none.
    """

    def build(self, variables):
        self._matrix_shapes = [_matrix_shape(variable) for variable in variables]  # updates are given no paths
        super().build(variables)

    def takes_adamw(self, variable):
        if variable.path.endswith(_NO_KERNELS):
            return True
        return super().takes_adamw(SimpleNamespace(shape=_matrix_shape(variable), path=variable.path))

    def update_matrix(self, gradient, variable, learning_rate, momentum):
        shape = self._matrix_shapes[self.index_of(variable)]
        self.assign_add(momentum, ops.add(gradient, momentum * (self.momentum - 1)))
        update = ops.add(gradient, self.momentum * momentum) if self.nesterov else momentum
        update = self.zeropower_via_newtonschulz5(ops.reshape(update, shape), self.ns_steps)
        self.assign_sub(variable, ops.reshape(self.lr_adjust(learning_rate * update), variable.shape))


def _matrix_shape(variable):
    """The shape of `variable`, or (inputs, outputs) of attention's kernels of three axes."""
    shape, name = tuple(variable.shape), _KERNEL.search(variable.path)
    if len(shape) != 3 or name is None:
        return shape
    inputs = 2 if name[2] == "attention_output" else 1
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])
