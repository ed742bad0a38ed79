"""ViT: images (B, C, height, width) -> classes. Dosovitskiy et al. 2021, arXiv:2010.11929."""

from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.layers import EncoderLayer, PatchEmbedding
from keras_tx.layers.projection import Projection
from keras_tx.layers.transformer import TransformerStack
from keras_tx.pretrained import table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family, attention_sizes, split
from keras_tx.pretrained.heads import ClassHead
from keras_tx.pretrained.leading_axes import LeadingAxesRow
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

_LAYER = {
    "attention.attention.query": "self_attention.query_dense",
    "attention.attention.key": "self_attention.key_dense",
    "attention.attention.value": "self_attention.value_dense",
    "attention.output.dense": "self_attention.output_dense",
    "layernorm_before": "self_attention_norm",
    "layernorm_after": "feed_forward_norm",
    "intermediate.dense": "feed_forward.intermediate_dense",
    "output.dense": "feed_forward.output_dense",
}


@keras.saving.register_keras_serializable(package="keras_tx")
class ImageEncoder(TransformerStack):
    """`Encoder` without masks. Its hidden states are the outputs of the layers before the final norm."""

    layer_class = EncoderLayer

    def call(self, inputs: Tensor, training: bool | None = None, return_hidden_states: bool = False) -> Tensor:
        norm: Any = self.final_norm
        hidden = [inputs]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], training=training))
        outputs = norm(hidden[-1])
        return (outputs, ops.stack(hidden, axis=1)) if return_hidden_states else outputs

    def compute_output_spec(
        self, inputs: Tensor, training: bool | None = None, return_hidden_states: bool = False
    ) -> Any:
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        return (outputs, self._hidden_spec(inputs)) if return_hidden_states else outputs


class ViT(Family):
    """A pre-norm encoder of image patches and a class token, whose output vector is classified."""

    model_types = ("vit",)
    prefix = "vit."
    is_causal = False
    tasks = {"base": "ViTModel", "image_classification": "ViTForImageClassification"}
    inputs = needed = ("pixel_values",)
    parts = {"pooler": "pooler.dense.weight"}
    ignored = {r"vit\.embeddings\.mask_token": "the token of hidden patches, used in pretraining"}
    heads = (r"(vit\.pooler\.dense|classifier|decoder\.0)\.(weight|bias)",)

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        config.refuse("tie_last_hidden_states", False)
        hidden_dim, num_heads = attention_sizes(config)
        dropout = config.rate("hidden_dropout_prob", default=0.0)
        self.patch_size = patch_size = self._patch_size()
        height, width = self._sides("image_size", default=224)
        config.check_size("image_size", (height // patch_size) * (width // patch_size))
        self.image_shape = (config.size("num_channels", default=3), height, width)
        self.embedding = PatchEmbedding(
            patch_size,
            hidden_dim,
            dropout=dropout,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=self.initializer_range),
            dtype=dtype,
            name="embedding",
        )
        self.encoder = ImageEncoder(
            config.number("num_hidden_layers"),
            config.size("intermediate_size"),
            num_heads,
            dropout=dropout,
            attention_dropout=config.rate("attention_probs_dropout_prob", default=0.0),
            activation=config.activation("hidden_act", default="gelu"),
            normalize_first=True,
            layer_norm_epsilon=config.positive("layer_norm_eps", default=1e-12),
            attention_options={"use_bias": config.flag("qkv_bias", default=True), "use_output_bias": True},
            dtype=dtype,
            name="encoder",
        )
        self.pooler = self.head = None
        if task == "base" and "pooler" not in config.absent:
            width, function = (
                config.size("pooler_output_size", default=hidden_dim),
                config.activation("pooler_act", default="tanh"),
            )
            self.pooler = Projection(width, activation=function, dtype=dtype, name="pooler")
        if task == "image_classification":
            self.head = ClassHead(config.num_labels, dtype=dtype)

    def _sides(self, key: str, default: int) -> Any:
        """The height and width that a key has."""
        value = self.config.take(key, default=default)
        sizes = value if isinstance(value, (list, tuple)) else (value, value)
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"`{key}` in config.json must be a positive integer or two of them. Received: {key}={value!r:.200}"
            )
        return sizes

    def _patch_size(self) -> int:
        height, width = self._sides("patch_size", default=16)
        if height != width:
            raise ValueError(
                "`patch_size` in config.json must be one size, or two that are equal. Received: "
                f"patch_size=[{height}, {width}]"
            )
        self.config.check_size("patch_size", height)
        return int(height)

    def symbolic_inputs(self) -> dict[str, keras.KerasTensor]:
        return {"pixel_values": keras.Input(self.image_shape, dtype="float32", name="pixel_values")}

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        images = ops.transpose(inputs["pixel_values"], (0, 2, 3, 1))
        height, width = (size - size % self.patch_size for size in self.image_shape[1:])
        if (height, width) != self.image_shape[1:]:  # pixels behind the last whole patch are not used
            images = images[:, :height, :width]
        embedded = self.embedding(images)
        hidden = self.encoder(embedded, return_hidden_states=hidden_states)
        hidden, beside = (hidden[0], {"hidden_states": split(hidden[1])}) if hidden_states else (hidden, {})
        if self.head is not None:
            return {"logits": self.head(hidden[:, 0]), **beside}
        pooled = {} if self.pooler is None else {"pooler_output": self.pooler(hidden[:, 0])}
        return {"last_hidden_state": hidden, **pooled, **beside}

    def rows(self) -> Iterator[Row]:
        embeddings = f"{self.prefix}embeddings"
        yield LeadingAxesRow(f"{embeddings}.cls_token", self.embedding.class_token, axes=2)
        yield LeadingAxesRow(f"{embeddings}.position_embeddings", self.embedding.positions.embeddings)
        patches = f"{embeddings}.patch_embeddings.projection"
        yield table.Row(f"{patches}.weight", self.embedding.projection.kernel, table.CONV2D)
        yield table.Row(f"{patches}.bias", self.embedding.projection.bias)
        for index, layer in enumerate(self.encoder.layers):
            yield from table.by_path(f"{self.prefix}encoder.layer.{index}", _LAYER, layer)
        yield from table.norm(f"{self.prefix}layernorm", self.encoder.final_norm)
        if self.pooler is not None:
            yield from table.linear(f"{self.prefix}pooler.dense", self.pooler)
        if self.head is not None:
            yield from self.head.rows("classifier")


FAMILIES = (ViT,)
