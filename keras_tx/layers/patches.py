"""Patch embedding: images (B, height, width, C) -> vectors (B, 1 + P, D), a class token and the P patches.

B batch, C channels, P patches, D hidden. Dosovitskiy et al. 2021, arXiv:2010.11929.
"""

from typing import Any

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers.configs import Composite
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.initializers import clone_initializer
from keras_tx.layers.positions import LearnedPositionalEncoding
from keras_tx.layers.precision import as_floats
from keras_tx.layers.projection import HeadProjection
from keras_tx.types import Shape, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class PatchEmbedding(Composite):
    """Cuts images into square patches and embeds each as a vector, as a Vision Transformer does.

    The patches are taken row by row. Each is flattened and projected to D, a learned class token is put before the
    first one, and a learned position embedding is added to each.

    Args:
        patch_size: height and width of a patch in pixels. It must divide the height and the width of the images.
        hidden_dim: D, the size of the embeddings.
        class_token: whether to add a class token. The argument is stored as the attribute `has_class_token`; once the
            layer is built, the attribute `class_token` is the vector (D,), or None.
        dropout: rate in [0, 1) of dropout on the output.
        kernel_initializer: initializer of the projection (patch_size, patch_size, C, D).
        embeddings_initializer: initializer of the class token (D,) and of the position embeddings (1 + P, D).

    Call arguments:
        inputs: (B, height, width, C), channels last. The first call fixes all sizes except B, because each patch has a
            position embedding.
        training: whether dropout is on.

    Returns:
        (B, 1 + P, D), or (B, P, D) without a class token.

    Raises:
        ValueError: for sizes that are not positive; for images whose sizes are not known, are not multiples of
            `patch_size`, or are not those of the first call.

    Reference:
        Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, section 3.1.

    Examples:
        >>> images = np.zeros((2, 8, 12, 3), "float32")
        >>> layer = keras_tx.layers.PatchEmbedding(patch_size=4, hidden_dim=16)
        >>> tuple(layer(images).shape)  # the class token and 2 * 3 patches
        (2, 7, 16)
    """

    def __init__(
        self,
        patch_size: int,
        hidden_dim: int,
        *,
        class_token: bool = True,
        dropout: float = 0.0,
        kernel_initializer: Any = "glorot_uniform",
        embeddings_initializer: Any = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = checks.positive_int("patch_size", patch_size)
        self.hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        self.has_class_token = checks.flag("class_token", class_token)
        self.class_token: Any = None
        self.dropout = checks.rate("dropout", dropout)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def build(self, inputs_shape: Shape) -> None:
        length, size = self._length(inputs_shape), self.patch_size
        self.projection = HeadProjection(
            "brcijk,ijkd->brcd",
            output_shape=(None, None, self.hidden_dim),
            bias_axes="d",
            kernel_initializer=clone_initializer(self.kernel_initializer),
            dtype=self.dtype_policy,
            name="projection",
        )
        self.projection.build((None, None, None, size, size, inputs_shape[-1]))
        if self.has_class_token:
            self.class_token = self.add_weight(
                shape=(self.hidden_dim,), initializer=clone_initializer(self.embeddings_initializer), name="class_token"
            )
        self.positions = LearnedPositionalEncoding(
            length,
            embeddings_initializer=clone_initializer(self.embeddings_initializer),
            dtype=self.dtype_policy,
            name="positions",
        )
        self.positions.build((None, length, self.hidden_dim))
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes=dict(enumerate(inputs_shape[1:], start=1)))

    def _length(self, inputs_shape: Shape) -> int:
        """The number of patches, plus 1 for the class token, of images of this shape."""
        height, width, channels = inputs_shape[1:]
        if not (height and width and channels) or height % self.patch_size or width % self.patch_size:
            raise ValueError(
                "`inputs` must be images (B, height, width, C) of known sizes, multiples of `patch_size`. Received: "
                f"inputs.shape={tuple(inputs_shape)}, patch_size={self.patch_size}"
            )
        num_patches: int = (height // self.patch_size) * (width // self.patch_size)
        return num_patches + bool(self.has_class_token)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        inputs = as_floats(inputs, self)
        size, batch = self.patch_size, ops.shape(inputs)[0]
        rows, columns = inputs.shape[1] // size, inputs.shape[2] // size
        pixels = ops.reshape(inputs, (batch, rows, size, columns, size, inputs.shape[3]))
        patches = self.projection(ops.swapaxes(pixels, 2, 3))  # (B, rows, columns, D)
        outputs = ops.reshape(patches, (batch, rows * columns, self.hidden_dim))
        if self.has_class_token:
            first = ops.broadcast_to(ops.cast(self.class_token, outputs.dtype), (batch, 1, self.hidden_dim))
            outputs = ops.concatenate([first, outputs], axis=1)
        return self._dropout_layer(self.positions(outputs), training=training)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return (inputs_shape[0], self._length(inputs_shape), self.hidden_dim)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "patch_size": self.patch_size,
            "hidden_dim": self.hidden_dim,
            "class_token": self.has_class_token,
            "dropout": self.dropout,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
        }
