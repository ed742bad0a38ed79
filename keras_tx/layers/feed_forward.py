"""Feed-forward network: (B, T, D) -> (B, T, D), applied to each token separately.

B batch, T tokens, D hidden, F intermediate. Vaswani et al. 2017, arXiv:1706.03762, section 3.3; gated: Shazeer 2020,
arXiv:2002.05202.
"""

from typing import Any

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers import activations
from keras_tx.layers.configs import Composite, own_policy
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.initializers import clone_initializer
from keras_tx.layers.precision import as_floats
from keras_tx.layers.projection import Projection
from keras_tx.layers.splitting import Split
from keras_tx.types import Shape, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class FeedForward(Composite):
    """The feed-forward network of a transformer: two dense projections, or three if gated, with an activation.

    `output(dropout(activation(intermediate(x))))`; gated: `output(dropout(activation(gate(x)) * intermediate(x)))`.

    Args:
        intermediate_dim: F, the size of the intermediate vectors.
        activation: anything that `keras.activations.get` takes, or "gelu_tanh" or "quick_gelu". With `gated=True`,
            "silu" gives SwiGLU and "gelu" gives GEGLU.
        gated: whether the intermediate vectors are multiplied by the activation of a third projection.
        dropout: rate in [0, 1) of dropout on the intermediate vectors.
        use_bias: whether the projections have biases.
        kernel_initializer: initializer of the kernels of all projections.
        bias_initializer: initializer of the biases of all projections.

    Call arguments:
        inputs: (B, T, D), or any shape (..., D).
        training: whether dropout is on.

    Returns:
        A tensor of the same shape as the inputs.

    Raises:
        ValueError: for an `intermediate_dim` that is not positive, or a rate outside [0, 1).

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.3; gated: Shazeer 2020,
        https://arxiv.org/abs/2002.05202.

    Examples:
        >>> layer = keras_tx.layers.FeedForward(64)
        >>> tuple(layer(keras.ops.ones((2, 7, 16))).shape)
        (2, 7, 16)

        The gated network of Llama, without biases:

        >>> layer = keras_tx.layers.FeedForward(64, activation="silu", gated=True, use_bias=False)
        >>> layer.build((None, None, 16))
        >>> [tuple(weight.shape) for weight in layer.weights]
        [(16, 64), (16, 64), (64, 16)]
    """

    def __init__(
        self,
        intermediate_dim: int,
        *,
        activation: Any = "relu",
        gated: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.intermediate_dim = checks.positive_int("intermediate_dim", intermediate_dim)
        self.activation = activations.get(activation)
        self.gated = checks.flag("gated", gated)
        self.dropout = checks.rate("dropout", dropout)
        self.use_bias = checks.flag("use_bias", use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, inputs_shape: Shape) -> None:
        if self.gated:
            self.gate_dense = self._projection("gate", inputs_shape, self.intermediate_dim, self.activation)
        activation = None if self.gated else self.activation
        self.intermediate_dense = self._projection("intermediate", inputs_shape, self.intermediate_dim, activation)
        self._dropout_layer = Dropout(self.dropout, dtype=own_policy(self))
        self.output_dense = self._projection("output", (*inputs_shape[:-1], self.intermediate_dim), inputs_shape[-1])

    def _projection(self, name: str, input_shape: Shape, features: int | None, activation: Any = None) -> Projection:
        layer = Projection(
            features,
            activation=activation,
            use_bias=self.use_bias,
            kernel_initializer=clone_initializer(self.kernel_initializer),
            bias_initializer=clone_initializer(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        layer.split = Split("intermediate_dim", 0 if name == "output" else 1)
        layer.build(input_shape)
        return layer

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        inputs = as_floats(inputs, self)
        intermediate = self.intermediate_dense(inputs)
        if self.gated:
            # An activation that is a layer, or a policy for the path of the gate, may give it another dtype.
            intermediate = ops.cast(self.gate_dense(inputs), intermediate.dtype) * intermediate
        return self.output_dense(self._dropout_layer(intermediate, training=training))

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "activation": activations.serialize(self.activation),
            "gated": self.gated,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
        }
