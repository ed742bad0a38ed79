"""The optimizer Muon for transformers, which treats the kernels of attention, with three axes, as matrices."""

import inspect
import math
import re
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.internals.keras_optimizers import MuonByVariable
from keras_tx.types import Tensor

_KERNEL = re.compile(r"(^|/)(query|key|value|gate|attention_output)/kernel$")
_LORA = re.compile(r"/lora_(kernel|embeddings)_[ab]$")
_NO_KERNELS = ("/bias", "/embeddings", "/segments")  # the biases of attention have two axes and are no matrices


@keras.saving.register_keras_serializable(package="keras_tx")
class Muon(MuonByVariable):
    """`keras.optimizers.Muon` for transformers: it also orthogonalizes the updates of the kernels of attention.

    Muon updates a matrix by its momentum, replaced by a nearly orthogonal matrix close to it, and updates other
    variables with AdamW. Keras' Muon treats only variables with two axes as matrices. Here the kernels of queries,
    keys, values and gates (D, N, H) are treated as matrices (D, N * H), and the kernel of attention's output (N, H, D)
    as (N * H, D), in layers of this package and in `keras.layers.MultiHeadAttention`. They are found by their names:
    `query`, `key`, `value`, `gate` and `attention_output`.

    AdamW updates embeddings, norms, biases (also those of attention, whose shape (N, H) Keras' Muon treats as a
    matrix), the matrices of LoRA, other variables with three or more axes, such as those of convolutions, and every
    variable whose path matches a regular expression in `exclude_layers`.

    Args:
        learning_rate: a float or a schedule; for AdamW it is multiplied by `adam_lr_ratio`.
        adam_beta_1, adam_beta_2, epsilon: the arguments `beta_1`, `beta_2` and `epsilon` of AdamW.
        adam_weight_decay, weight_decay: the weight decay of variables that AdamW updates, and of matrices; None for
            none.
        clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency, loss_scale_factor,
            gradient_accumulation_steps, name: as in every optimizer of Keras.
        exclude_layers: regular expressions; AdamW updates the variables whose paths match one of them.
        exclude_embeddings: whether AdamW updates all variables with "embedding" in their path. It updates those of
            this package's embeddings in any case.
        muon_a, muon_b, muon_c, ns_steps: the coefficients and the number of the Newton-Schulz iterations that
            orthogonalize a matrix.
        adam_lr_ratio: the learning rate of AdamW, relative to `learning_rate`.
        momentum, nesterov: the momentum of matrices, and whether it is Nesterov momentum.
        rms_rate: the root mean square of an update before it is multiplied by the learning rate. None leaves the
            singular values of the update near 1.

    Raises:
        TypeError: `exclude_layers` is a string and not a list of strings.
        ValueError: an unknown argument, an entry of `exclude_layers` that is no regular expression, or a value that
            every optimizer of Keras refuses, such as more than one of `clipnorm`, `clipvalue` and `global_clipnorm`.

    Reference:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale of updates: Liu et al. 2025, arXiv:2502.16982.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> optimizer = keras_tx.training.Muon(0.02, exclude_layers=["gate"])
        >>> model.compile(optimizer, keras_tx.training.PaddedCrossentropy())

        The singular values of an update are near 1, however much those of the gradient differ:

        >>> kernel = keras.Variable(np.zeros((2, 2)), name="kernel")
        >>> optimizer = keras_tx.training.Muon(1.0, rms_rate=None, weight_decay=None)
        >>> optimizer.apply([np.diag([10.0, 1.0])], [kernel])
        >>> singular_values = np.linalg.svd(kernel.numpy(), compute_uv=False)
        >>> bool(((singular_values > 0.6) & (singular_values < 1.3)).all())
        True
    """

    __signature__ = inspect.signature(MuonByVariable)  # the arguments that `__init__` hides

    def __init__(self, *args: Any, **kwargs: Any):
        # Keras refuses NumPy's float32 as a learning rate.
        super().__init__(*map(_as_python, args), **{name: _as_python(value) for name, value in kwargs.items()})
        if isinstance(self.exclude_layers, str):  # each of its characters would be a regular expression
            raise TypeError(
                "`exclude_layers` must be a list of regular expressions. Received: "
                f"exclude_layers={self.exclude_layers!r}"
            )
        for pattern in self.exclude_layers:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`exclude_layers` must be a list of regular expressions. Received: {pattern!r} among them: {error}"
                ) from error

    def build(self, variables: list[Any]) -> None:
        self._matrix_shapes = [_matrix_shape(variable) for variable in variables]  # in updates, variables have no path
        super().build(variables)

    def takes_adamw(self, variable: Any) -> bool:
        if variable.path.endswith(_NO_KERNELS) or _LORA.search(variable.path):
            return True
        return super().takes_adamw(SimpleNamespace(shape=_matrix_shape(variable), path=variable.path))

    def update_matrix(self, gradient: Tensor, variable: Any, learning_rate: Tensor, momentum: Any) -> None:
        shape = self._matrix_shapes[self.index_of(variable)]
        self.assign_add(momentum, ops.add(gradient, momentum * (self.momentum - 1)))
        update = ops.add(gradient, self.momentum * momentum) if self.nesterov else momentum
        update = self.zeropower_via_newtonschulz5(ops.reshape(update, shape), self.ns_steps)
        self.assign_sub(variable, ops.reshape(self.lr_adjust(learning_rate * update), variable.shape))


def _as_python(value: Any) -> Any:
    """A number of NumPy as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _matrix_shape(variable: Any) -> tuple[int, ...]:
    """The shape of `variable`; for the kernels of attention, which have three axes, (inputs, outputs)."""
    shape, name = tuple(variable.shape), _KERNEL.search(variable.path)
    if len(shape) != 3 or name is None:
        return shape
    inputs = 2 if name[2] == "attention_output" else 1
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])
