"""Feed-forward: (B, T, D) -> (B, T, D), each token by itself.

B batch, T tokens, D model, F intermediate. Vaswani et al. 2017, arXiv:1706.03762, section 3.3; gated: Shazeer 2020,
arXiv:2002.05202.
"""

import keras
from keras import initializers

from keras_tx import checks
from keras_tx.layers import activations
from keras_tx.layers.configs import Composite
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.initializers import clone_initializer
from keras_tx.layers.projection import Projection


@keras.saving.register_keras_serializable(package="keras_tx")
class FeedForward(Composite):
    """`output(dropout(activation(intermediate(x))))`; gated: `output(dropout(activation(gate(x)) * intermediate(x)))`.

    Args:
        intermediate_dim: F.
        activation: what `keras.activations.get` takes, "gelu_tanh" or "quick_gelu". "silu" and gated is SwiGLU, "gelu"
            and gated is GEGLU.
        gated: whether a third projection gates the intermediate.
        dropout: rate in [0, 1) of dropout on the intermediate.
        use_bias: whether the projections have biases.
        kernel_initializer, bias_initializer: of each projection.

    Call arguments:
        inputs: (B, T, D), or any shape (..., D).
        training: whether dropout is on.

    Raises:
        ValueError: for an `intermediate_dim` that is not positive, or a rate outside [0, 1).
    """

    def __init__(
        self,
        intermediate_dim,
        *,
        activation="relu",
        gated=False,
        dropout=0.0,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.intermediate_dim = checks.positive_int("intermediate_dim", intermediate_dim)
        self.activation = activations.get(activation)
        self.gated = gated
        self.dropout = checks.rate("dropout", dropout)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)

    def build(self, inputs_shape):
        if self.gated:
            self.gate_dense = self._projection("gate", inputs_shape, self.intermediate_dim, self.activation)
        activation = None if self.gated else self.activation
        self.intermediate_dense = self._projection("intermediate", inputs_shape, self.intermediate_dim, activation)
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)
        self.output_dense = self._projection("output", (*inputs_shape[:-1], self.intermediate_dim), inputs_shape[-1])

    def _projection(self, name, input_shape, features, activation=None):
        layer = Projection(
            features,
            activation=activation,
            use_bias=self.use_bias,
            kernel_initializer=clone_initializer(self.kernel_initializer),
            bias_initializer=clone_initializer(self.bias_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        layer.build(input_shape)
        return layer

    def call(self, inputs, training=None):
        intermediate = self.intermediate_dense(inputs)
        if self.gated:
            intermediate = self.gate_dense(inputs) * intermediate
        return self.output_dense(self._dropout_layer(intermediate, training=training))

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
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
