"""Token embedding: ids (B, T) -> vectors (B, T, D), with positions, segments and norm; and back to logits (B, T, V).

B batch, T tokens, D hidden, E embedding, V vocabulary. Scale: Vaswani et al. 2017, arXiv:1706.03762, section 3.4;
segments and norm: Devlin et al. 2018, arXiv:1810.04805; tied logits: Press and Wolf 2017, arXiv:1608.05859; tables
narrower than D: Clark et al. 2020, arXiv:2003.10555.
"""

import inspect
import math
from numbers import Integral
from typing import Any

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.internals.keras_models import get_keras_mask, set_keras_mask
from keras_tx.layers.configs import Composite, serialized, set_untracked, widened
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.ids import check_ids, check_integers, from_floats, keep_outside, look_up
from keras_tx.layers.initializers import Multiplied, ZeroRow, clone_initializer
from keras_tx.layers.masks import checked
from keras_tx.layers.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from keras_tx.layers.projection import Projection, TiedEmbedding
from keras_tx.layers.residual import EPSILON, check_normalization, make_norm, serialize_normalization
from keras_tx.layers.shapes import check_dense, check_shape, is_ragged
from keras_tx.types import Shape, Tensor

POSITIONS = (None, "sinusoidal", "learned")


@keras.saving.register_keras_serializable(package="keras_tx")
class TokenEmbedding(Composite):
    """Embeds token ids for an encoder or decoder, with positions, segments, norm, dropout and padding mask.

    One layer does all of it, so that the padding mask cannot get lost on the way. The output is the sum of the token,
    position and segment embeddings, then the norm and dropout. `TokenEmbedding(V, D, mask_zero=True)` computes what
    `keras.layers.Embedding(V, D, mask_zero=True)` computes, from the same weights.

    Args:
        vocabulary_size: V; ids are in [0, V).
        hidden_dim: D, the size of the output vectors.
        padding_id: the id of padding tokens, from which the mask is made; None for no mask.
        zero_padding: whether the token embedding of `padding_id` is zero and is never trained, as with `padding_idx` in
            PyTorch. With `reverse`, the logit of `padding_id` is then 0. Positions and segments are added to the zeros.
        embedding_dim: E, the size of the embeddings and of the norm, if it differs from D; a dense projection to D then
            follows the dropout. None: D, without a projection.
        scale: whether the token embeddings are multiplied by sqrt(E), as in Vaswani et al. 2017.
        position_encoding: None, "sinusoidal", "learned" (needs `max_length`), or a position layer of this package,
            such as `SinusoidalPositionalEncoding(layout="concatenated")`.
        max_length: the number of learned positions.
        num_segments: the number of segments (token types), each with a learned embedding; 0 for none.
        normalization: the norm of the sum: None, or as for `EncoderLayer`: a name such as "layer_norm", a layer, or a
            callable that makes a layer.
        layer_norm_epsilon: a small number that the norm adds to the variance. It cannot be given if `normalization` is
            a layer.
        dropout: rate in [0, 1) of dropout on the sum, after the norm.
        dropout_before_norm: whether dropout comes before the norm instead. True needs a `normalization`.
        embeddings_initializer: initializer of the token, position and segment embeddings. With `scale`, the initial
            values of positions and segments are multiplied by sqrt(E), as token embeddings are in the call. "uniform"
            gives values up to 0.05, which are lost beside sinusoidal positions of up to 1: use
            `RandomNormal(stddev=1.0)` there.
        mask_zero: the argument of `keras.layers.Embedding`: whether 0 is padding. True requires the `padding_id` 0.
            With False, 0 is not padding; a `padding_id` other than 0 still is. None: `padding_id` decides. The
            attribute `mask_zero` is True if `padding_id` is 0.

    Call arguments:
        inputs: (B, T) ids: integers, or whole numbers of a float dtype, the default of `keras.Input`; with `reverse`,
            vectors (B, T, E). Without positions and segments, TensorFlow's ragged tensors of ids give ragged vectors.
        segment_ids: (B, T) integers in [0, num_segments); zeros if None.
        mask: (B, T), True at real tokens, in place of the mask computed from `padding_id`.
        positions: (B, T) or (T,) integers. By default the number of real tokens before each token.
        reverse: whether to project vectors back to logits by the transposed token embeddings, as in
            `keras.layers.ReversibleEmbedding`; nothing else is applied.
        training: whether dropout is on.

    Returns:
        (B, T, D), with the padding mask attached; with `reverse`, (B, T, V).

    Raises:
        ValueError: for sizes that are not positive, ids that are not integers, vectors whose last axis is not E and, in
            eager calls, ids outside [0, V) and floats that are not whole (graphs round them towards 0). In a TensorFlow
            graph ids outside [0, V) raise `InvalidArgumentError` on a CPU and give zeros on a GPU; XLA and JAX cannot
            raise errors and use the first or last row of the table. `fit`, `evaluate` and `predict` of the models in
            `keras_tx.models` and `keras_tx.pretrained` check ids before that.

    Examples:
        >>> layer = keras_tx.layers.TokenEmbedding(100, 16, position_encoding="learned", max_length=32)
        >>> vectors = layer(np.array([[5, 8, 13, 0], [7, 0, 0, 0]]))
        >>> tuple(vectors.shape)
        (2, 4, 16)
        >>> print(keras.ops.convert_to_numpy(layer.compute_mask(np.array([[5, 8, 13, 0]]))))
        [[ True  True  True False]]
        >>> tuple(layer(vectors, reverse=True).shape)
        (2, 4, 100)
    """

    _checks_dense = True

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        *,
        padding_id: int | None = 0,
        zero_padding: bool = False,
        embedding_dim: int | None = None,
        scale: bool = False,
        position_encoding: Any = None,
        max_length: int | None = None,
        num_segments: int = 0,
        normalization: Any = None,
        layer_norm_epsilon: float = EPSILON,
        dropout: float = 0.0,
        dropout_before_norm: bool = False,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.vocabulary_size: int = checks.positive_int("vocabulary_size", vocabulary_size)
        self.hidden_dim: int = checks.positive_int("hidden_dim", hidden_dim)
        checks.flag("mask_zero", mask_zero, none=True)
        self.padding_id = _padding_id(padding_id, self.vocabulary_size, mask_zero)
        self.mask_zero: bool = self.padding_id == 0
        self.zero_padding: bool = checks.flag("zero_padding", zero_padding)
        if self.zero_padding and self.padding_id is None:
            raise ValueError(
                f"`zero_padding=True` needs a `padding_id`. Received: zero_padding={zero_padding}, padding_id=None"
            )
        self.embedding_dim: int | None = checks.positive_int("embedding_dim", embedding_dim, none=True)
        self.scale = checks.flag("scale", scale)
        self.position_encoding = position_encoding
        self.max_length = checks.positive_int("max_length", max_length, none=True)
        self.num_segments = checks.count("num_segments", num_segments)
        self.layer_norm_epsilon = checks.positive_float("layer_norm_epsilon", layer_norm_epsilon)
        set_untracked(self, "normalization", check_normalization(normalization, self.layer_norm_epsilon, none=True))
        self.dropout = checks.rate("dropout", dropout)
        self.dropout_before_norm: bool = checks.flag("dropout_before_norm", dropout_before_norm)
        if self.dropout_before_norm and self.normalization is None:
            raise ValueError(
                "`dropout_before_norm=True` needs a `normalization`. Received: "
                f"dropout_before_norm={dropout_before_norm}, normalization=None"
            )
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        if max_length is not None and position_encoding != "learned":
            raise ValueError(
                "`max_length` must be given only with learned positions. Received: "
                f"max_length={max_length}, position_encoding={position_encoding!r}"
            )
        self.positions = self._position_layer()

    def _position_layer(self) -> Any:
        if isinstance(self.position_encoding, dict):
            self.position_encoding = keras.saving.deserialize_keras_object(self.position_encoding)
        if isinstance(self.position_encoding, keras.layers.Layer):
            known = inspect.signature(self.position_encoding.call).parameters
            if not {"mask", "positions"} <= known.keys():
                received = f"a layer of type {type(self.position_encoding).__name__}"
                raise ValueError(
                    f"`position_encoding` must be one of {POSITIONS}, or a layer whose `call` takes `inputs`, `mask` "
                    f"and `positions`. Received: {received}"
                )
            return widened(self.position_encoding, self.compute_dtype)
        checks.one_of("position_encoding", self.position_encoding, POSITIONS)
        if self.position_encoding == "sinusoidal":
            return SinusoidalPositionalEncoding(dtype=self.dtype_policy, name="positions")
        if self.position_encoding == "learned":
            if self.max_length is None:
                raise ValueError("`max_length` must be given with learned positions. Received: max_length=None")
            return LearnedPositionalEncoding(
                self.max_length,
                embeddings_initializer=self._added_initializer(),
                dtype=self.dtype_policy,
                name="positions",
            )
        return None

    def build(self, inputs_shape: Shape) -> None:
        shape = (*inputs_shape[:2], self._width)
        self.tokens = TiedEmbedding(
            self.vocabulary_size,
            self._width,
            embeddings_initializer=self._table_initializer(),
            dtype=self.dtype_policy,
            name="tokens",
        )
        self.tokens.supports_masking = True  # Keras would warn that the mask of the vectors is lost
        self.tokens.build(inputs_shape)
        if self.positions is not None and not self.positions.built:
            self.positions.build(shape)
        if self.num_segments:
            self.segments = self.add_weight(
                shape=(self.num_segments, self._width),
                initializer=self._added_initializer(),
                name="segments",
                autocast=False,  # rows are converted, so that gradients are summed in the dtype of the table
            )
        if self.normalization is not None:
            self.norm = make_norm(self.normalization, self.layer_norm_epsilon, dtype=self.dtype_policy, name="norm")
            self.norm.build(shape)
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)
        if self.embedding_dim is not None:
            self.projection = Projection(self.hidden_dim, dtype=self.dtype_policy, name="projection")
            self.projection.build(shape)

    def _added_initializer(self) -> Any:
        """That of learned positions and segments, which are added to the token embeddings and begin as large as these.

        If they began smaller, a model would hardly see them at first, and not learn what depends on them.
        """
        initializer = clone_initializer(self.embeddings_initializer)
        return Multiplied(initializer, math.sqrt(self._width)) if self.scale else initializer

    def _table_initializer(self) -> Any:
        initializer = clone_initializer(self.embeddings_initializer)
        if not self.zero_padding or self.padding_id is None:
            return initializer
        return ZeroRow(initializer, self.padding_id)

    @property
    def _width(self) -> int:
        return self.hidden_dim if self.embedding_dim is None else self.embedding_dim

    def __call__(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_reverse = kwargs.get("reverse") or any(args[3:4])
        is_look_up = self.positions is None and not self.num_segments and not is_reverse
        check_dense(self, (None if is_look_up and is_ragged(inputs) else inputs, *args), kwargs)
        args = (*args[:1], *[checked("mask", mask) for mask in args[1:2]], *args[2:])
        kwargs = {name: checked(name, value) if name == "mask" else value for name, value in kwargs.items()}
        if not is_reverse:  # `inputs` are ids; Keras would round floats
            inputs = from_floats("inputs", inputs, self.vocabulary_size)
        outputs = super().__call__(inputs, *args, **kwargs)
        if is_reverse and len(inputs.shape) == 2:  # vectors (B, E), which `compute_mask` cannot tell from ids
            set_keras_mask(outputs, get_keras_mask(inputs))
        return outputs

    def call(
        self,
        inputs: Tensor,
        segment_ids: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        reverse: bool = False,
        training: bool | None = None,
    ) -> Tensor:
        if reverse:
            self._check_width(inputs)
            return self.without_padding(self.tokens(inputs, reverse=True), axis=-1)
        self._check_call(inputs, segment_ids, mask, positions)
        if is_ragged(inputs):  # every id for itself, as there are no positions and segments
            return inputs.with_flat_values(self.call(inputs.flat_values[None], training=training)[0])
        ids = check_ids("inputs", inputs, self.vocabulary_size)
        outputs = self.tokens(keep_outside(ids, self.vocabulary_size))  # (B, T, E)
        if self.zero_padding:
            outputs = ops.where(ops.expand_dims(ops.equal(ids, self.padding_id), -1), 0, outputs)
        if self.scale:
            outputs = outputs * ops.cast(math.sqrt(self._width), outputs.dtype)
        if self.positions is not None:
            outputs = self.positions(outputs, mask=self.compute_mask(inputs, mask), positions=positions)
        if self.num_segments:
            segment_ids = ops.zeros((1, 1), "int32") if segment_ids is None else segment_ids
            outputs = outputs + look_up("segment_ids", self.segments, segment_ids, dtype=outputs.dtype)
        if self.dropout_before_norm:
            outputs = self._dropout_layer(outputs, training=training)
        if self.normalization is not None:
            outputs = self.norm(outputs)
        if not self.dropout_before_norm:
            outputs = self._dropout_layer(outputs, training=training)
        return outputs if self.embedding_dim is None else self.projection(outputs)

    def table(self) -> Tensor:
        """The token embeddings (V, E), of which `reverse` gives the products."""
        table = self.tokens.embeddings
        return self.without_padding(ops.convert_to_tensor(table), axis=0) if self.zero_padding else table

    def without_padding(self, values: Tensor, axis: int) -> Tensor:
        """`values`, whose `axis` is the vocabulary, with zeros for `padding_id` if `zero_padding` is True.

        No gradient flows through the zeros.
        """
        if not self.zero_padding:
            return values
        is_padding = ops.equal(ops.arange(self.vocabulary_size, dtype="int32"), self.padding_id)
        return ops.where(is_padding if axis == -1 else ops.expand_dims(is_padding, -1), 0, values)

    def _check_width(self, inputs: Tensor) -> None:
        if inputs.shape[-1] != self._width:
            raise ValueError(
                f"With `reverse=True`, `inputs` must have a last axis of size {self._width}, that of the token "
                "embeddings. Received: "
                f"inputs.shape={tuple(inputs.shape)}"
            )

    def _check_call(self, inputs: Tensor, segment_ids: Any, mask: Any, positions: Any) -> None:
        for name, tensor in (("segment_ids", segment_ids), ("mask", mask)):
            if tensor is not None:
                check_shape(name, tensor, inputs.shape, exact=True)
        if segment_ids is not None and not self.num_segments:
            raise ValueError(
                "`segment_ids` must be given only with `num_segments` above 0. Received: segment_ids, num_segments=0"
            )
        if positions is not None and self.positions is None:
            raise ValueError(
                "`positions` must be given only with a `position_encoding`. Received: positions, position_encoding=None"
            )

    def compute_mask(self, inputs: Tensor, mask: Tensor | None = None) -> Any:
        are_vectors = len(inputs.shape) > 2 and "float" in keras.backend.standardize_dtype(inputs.dtype)  # `reverse`
        if mask is not None or self.padding_id is None or are_vectors:
            return mask
        return ops.not_equal(inputs, self.padding_id)

    def compute_output_spec(self, inputs: Any, *args: Any, reverse: bool = False, **kwargs: Any) -> Any:
        if reverse:
            self._check_width(inputs)
        else:
            check_integers("inputs", inputs)
        shape = self.compute_output_shape(inputs.shape, reverse=reverse)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def compute_output_shape(self, inputs_shape: Shape, reverse: bool = False) -> Shape:
        return (*inputs_shape[:-1], self.vocabulary_size) if reverse else (*inputs_shape, self.hidden_dim)

    def get_config(self) -> dict[str, Any]:
        position_encoding = self.position_encoding
        if isinstance(position_encoding, keras.layers.Layer):
            position_encoding = serialized(position_encoding)
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "hidden_dim": self.hidden_dim,
            "padding_id": self.padding_id,
            "zero_padding": self.zero_padding,
            "embedding_dim": self.embedding_dim,
            "scale": self.scale,
            "position_encoding": position_encoding,
            "max_length": self.max_length,
            "num_segments": self.num_segments,
            "normalization": serialize_normalization(self.normalization),
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "dropout": self.dropout,
            "dropout_before_norm": self.dropout_before_norm,
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
        }


def _padding_id(value: Any, vocabulary_size: int, mask_zero: Any) -> int | None:
    is_id = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_id and 0 <= value < vocabulary_size):
        raise ValueError(
            "`padding_id` must be None or in [0, vocabulary_size). Received: "
            f"padding_id={value!r}, vocabulary_size={vocabulary_size}"
        )
    if mask_zero and value != 0:
        raise ValueError(
            f"`mask_zero=True` needs the `padding_id` 0. Received: padding_id={value!r}, mask_zero={mask_zero!r}"
        )
    return None if value is None or (mask_zero is not None and not mask_zero and value == 0) else int(value)
