"""Analyses a functional encoder model for export, and wraps it in a uniform call: ids (B, T) -> named outputs.

B batch, T tokens. `TextClassifier` and `MaskedLM` are such models, and so are the checkpoints of `keras_tx.pretrained`
that do not generate, and users' own models. Their inputs are integers (B, T): token ids and, where the model has them,
segment ids and a padding mask, found by name or by position. The mask is computed here from the ids.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_tx.functional_graph import consumers_of, is_optional_input
from keras_tx.generation.in_graph import at_least_columns
from keras_tx.internals.keras_models import (
    functional_model,
    is_cast_of_numbers,
    keras_hub_positions,
    layers_within,
)
from keras_tx.layers import LearnedPositionalEncoding, exported_weights
from keras_tx.layers.exported_weights import FEW_ROWS
from keras_tx.layers.projection import HeadProjection, Projection, TiedEmbedding
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

NAMES = {
    "ids": ("token_ids", "input_ids", "input_word_ids", "ids"),
    "segments": ("segment_ids", "token_type_ids", "input_type_ids", "type_ids"),
    "mask": ("attention_mask", "padding_mask", "input_mask", "token_mask", "mask"),
}
BY_POSITION = ("ids", "segments")
_POSITION = re.compile(r"(^|_)positions?(_|$)")
MOST_SEGMENTS = 16  # of an input that is taken for segment ids by its position alone
HALF_DTYPES = ("float16", "bfloat16")
_OTHERS = 'Export a model with other inputs, such as numbers, with `model.export("NAME/1")`.'


class TextEncoder:
    """The inputs and outputs of a functional model over ids.

    Args:
        model: a functional `keras.Model`, or a built `keras.Sequential`.

    Attributes:
        roles: {name of an input: "ids", "segments", "mask", or None for an optional input that is left out}.
        fixed_length: the T that the model was built for, or None for any length.
        vocabulary_size, padding_id: those of the embedding of the ids, or None if unknown.
        max_length: the smallest number of positions of any layer, or None if unknown.
        outputs: {name of an output: its symbolic tensor}.
        has_mask, has_segments: whether one of the inputs is a padding mask, or segment ids.
        num_segments: the number of segments that the model knows, or None if unknown.

    Raises:
        TypeError: the model is not functional.
        ValueError: a `keras.Sequential` is not built, an input is neither ids, segment ids nor a padding mask, or the
            first axis of an output is not the batch.
    """

    def __init__(self, model: keras.Model):
        self.model = _as_functional(model)
        self.roles: dict[str, str | None] = _roles(self.model.inputs)
        ids = next(x for x in self.model.inputs if self.roles[x.name] == "ids")
        layer = _embedding_of(self.model, ids)
        self._check_inputs(layer)
        self._check_segments(layer)
        self.fixed_length: int | None = ids.shape[1]
        self.vocabulary_size: int | None = None if layer is None else _table_size(layer)
        self.padding_id: int | None = getattr(layer, "padding_id", 0 if getattr(layer, "mask_zero", False) else None)
        lengths = [n for n in (self.fixed_length, fewest_positions(self.model)) if n is not None]
        self.max_length: int | None = min(lengths, default=None)
        self.outputs: dict[str, Tensor] = _named_outputs(self.model)
        self.has_mask = "mask" in self.roles.values()
        self.has_segments = "segments" in self.roles.values()
        self.num_segments: int | None = self._count_segments()
        # Whether the context of an export changes how the products of any layer are computed.
        self._has_projections = any(
            isinstance(layer, (HeadProjection, Projection, TiedEmbedding)) and layer.compute_dtype == "float32"
            for layer in layers_within(self.model)
        )
        self._can_be_cut: dict[tuple[int, ...], bool] = {}  # ids of symbolic outputs -> whether they can

    def _check_segments(self, embedding: Any) -> None:
        """Raises for an input of unknown name that may not be segment ids: the export would fill it with zeros."""
        for tensor in self.model.inputs:
            if self.roles[tensor.name] != "segments" or tensor.name in NAMES["segments"]:
                continue
            layer: Any = _embedding_of_segments(self.model, tensor)
            if layer is None or _POSITION.search(tensor.name):
                reason = "which no embedding looks up" if layer is None else "which has the name of positions"
                raise ValueError(
                    "`model` must take token ids, and besides them at most segment ids and a padding mask. Received: "
                    f"the input '{tensor.name}', {reason}; if it has segment ids, name it 'segment_ids', if it is a "
                    "padding mask, 'padding_mask'"
                )
            if getattr(layer, "num_segments", None):  # a `TokenEmbedding` with segments checks them
                continue
            size: Any = _table_size(layer)
            if layer is embedding or size > MOST_SEGMENTS:
                raise ValueError(
                    "`model` must take one input of token ids, and besides it at most segment ids and a padding mask. "
                    f"Received: the input '{tensor.name}', whose ids are below {size}; if they are segment ids, name "
                    "it 'segment_ids'"
                )

    def _count_segments(self) -> int | None:
        for tensor in self.model.inputs:
            layer: Any = _embedding_of_segments(self.model, tensor) if self.roles[tensor.name] == "segments" else None
            if layer is not None:
                return getattr(layer, "num_segments", None) or _table_size(layer)
        return None

    def __call__(self, ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> dict[str, Tensor]:
        """Returns the outputs by name. Half precision becomes float32, since JSON has no half-precision numbers."""
        outputs = self._run(self.model, list(self.outputs.values()), ids, segments, padding_id)
        return dict(zip(self.outputs, outputs, strict=True))

    def have_token_axis(self, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
        """Whether symbolic tensors of the model have an entry for each token in axis 1, by calls with real rows.

        Shapes do not tell: an axis of unknown size may have T + 1 or 2T entries. False for a model that cannot compute
        them, or the `others`, from up to `FEW_ROWS` tokens: a layer may have fewer positions than `max_length` knows.
        """
        longest = self.fixed_length or min(FEW_ROWS, self.max_length or FEW_ROWS)
        token = 1 if self.padding_id == 0 else 0
        part = keras.Model(self.model.inputs, [*tensors, *others])
        with tf.init_scope(), keras.device("cpu:0"):
            for width in {self.fixed_length or max(longest - 1, 1), longest}:
                inputs = self.inputs_in_order(tf.fill([1, width], token), padding_id=-1)
                try:
                    found = part(inputs, training=False)
                except Exception:  # a layer may raise any error
                    return False
                if any(x.shape[1] != width for x in keras.tree.flatten(found)[: len(tensors)]):
                    return False
        return True

    def up_to(self, tensor: Tensor) -> Callable[..., Tensor]:
        """Returns a function, called like this object, that computes the symbolic `tensor` of the model."""
        submodel = keras.Model(self.model.inputs, tensor)

        def run(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> Tensor:
            return self._run(submodel, [tensor], ids, segments, padding_id)[0]

        return run

    def _run(
        self, model: keras.Model, symbolic: Sequence[Tensor], ids: Tensor, segments: Tensor, padding_id: int
    ) -> list[Tensor]:
        """The outputs of `model`, whose symbolic tensors are `symbolic`; it has the inputs of `self.model`."""
        width = tf.shape(ids)[1]
        is_padded = exported_weights.current() is not None and self._takes_more_columns(symbolic)
        if is_padded:
            ids = at_least_columns(ids, padding_id, FEW_ROWS)
            segments = segments if segments is None else at_least_columns(segments, 0, FEW_ROWS)
        inputs = self.model_inputs(ids, segments, padding_id)
        inputs = inputs if model is self.model else keras.tree.flatten(inputs)

        def outputs_of_model() -> list[Tensor]:
            return [half_to_float32(x) for x in keras.tree.flatten(model(inputs, training=False))]

        if self._has_projections:
            outputs = exported_weights.by_number_of_rows(tf.size(ids), outputs_of_model)
        else:
            outputs = outputs_of_model()
        return [
            x[:, :width] if is_padded and _is_of_unknown_length(tensor) else x
            for x, tensor in zip(outputs, symbolic, strict=True)
        ]

    def _takes_more_columns(self, symbolic: Sequence[Tensor]) -> bool:
        """Whether ids may get more padding: the model takes it, and all outputs can be cut to their length without."""
        if self.fixed_length is not None or (self.max_length is not None and self.max_length < FEW_ROWS):
            return False
        # Only the axis after the batch is cut.
        if any(None in tensor.shape[2:] for tensor in symbolic):
            return False
        key = tuple(map(id, symbolic))
        if key not in self._can_be_cut:
            cut = [tensor for tensor in symbolic if _is_of_unknown_length(tensor)]
            whole = [tensor for tensor in symbolic if not _is_of_unknown_length(tensor)]
            self._can_be_cut[key] = self.have_token_axis(cut, whole)
        return self._can_be_cut[key]

    def tokenize(self, tokenizer: Any, texts: Any, pairs: Any = None) -> tuple[Tensor, Tensor]:
        """Texts, or pairs of texts -> ids and segment ids, both (B, T), of the fixed length or at most `max_length`."""
        features = self.features(tokenizer, texts, pairs)
        ids = tf.convert_to_tensor(features["token_ids"])
        segments = features.get("segment_ids", tf.zeros_like(ids))
        if self.fixed_length is None:
            return at_least_columns(ids, tokenizer.pad_id), at_least_columns(segments, 0)
        if self._length_of_rows(tokenizer) < self.fixed_length:
            ids = with_columns(ids, tokenizer.pad_id, self.fixed_length)
            segments = with_columns(segments, 0, self.fixed_length)
        return ids, segments

    def features(self, tokenizer: Any, texts: Any, pairs: Any = None) -> dict[str, Any]:
        """What `tokenizer` returns for texts, or pairs of texts, whose length the model takes.

        For a model of a fixed length and a tokenizer with a lower `max_length`, rows have the lower length.
        """
        options: dict[str, Any] = {"max_length": self.max_length} if tokenizer.max_length is None else {}
        if self.fixed_length is not None:
            options = {"max_length": self._length_of_rows(tokenizer), "padding": "max_length"}
        if pairs is not None:
            options["pairs"] = pairs
        found: dict[str, Any] = tokenizer(texts, **options)
        return found

    def _length_of_rows(self, tokenizer: Any) -> int:
        """The number of tokens to which texts are truncated, for a model of a fixed length."""
        known = (self.fixed_length, tokenizer.max_length)
        return min(length for length in known if length is not None)

    @property
    def half_dtype(self) -> str | None:
        """The least precise dtype that a layer computes in, if it is less precise than float32."""
        return half_dtype_of(self.model)

    def model_inputs(self, ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> Any:
        """Ids and segment ids (B, T) -> the inputs in the structure that the model takes."""
        given = self.inputs_in_order(ids, segments, padding_id)
        return keras.tree.pack_sequence_as(self.model.input, given)

    def inputs_in_order(self, ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> list[Tensor]:
        """Ids and segment ids (B, T) -> the inputs in the order of `model.inputs`; None for one that is left out."""
        given = []
        for tensor in self.model.inputs:
            role, dtype = self.roles[tensor.name], tensor.dtype
            if role == "ids":
                given.append(tf.cast(tf.maximum(ids, 0), dtype))  # a padding id of -1 is in no embedding
            elif role == "segments":
                given.append(tf.zeros_like(ids, dtype) if segments is None else tf.cast(segments, dtype))
            else:
                given.append(None if role is None else tf.cast(tf.not_equal(ids, padding_id), dtype))
        return given

    def _check_inputs(self, layer: Any) -> None:
        for tensor in self.model.inputs:
            role, dtype = self.roles[tensor.name], tensor.dtype
            looked_up = role == "ids" and layer is not None  # Keras casts there
            if role is not None and not (looked_up or "int" in dtype or dtype == "bool"):
                raise ValueError(
                    "`model` must take integers, or booleans as a mask; a keras.Input for ids needs dtype='int32'. "
                    f"{_OTHERS} Received: input "
                    f"'{tensor.name}' of dtype {dtype}"
                )
            if role is not None and (len(tensor.shape) != 2 or tensor.shape[0] is not None):
                raise ValueError(
                    "`model` must take ids of any number of rows, (B, T). Received: input "
                    f"'{tensor.name}' of shape {tensor.shape}"
                )


def _is_of_unknown_length(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and tensor.shape[1] is None


def half_dtype_of(model: keras.Model) -> str | None:
    """The least precise dtype that a layer of `model` computes in, if it is less precise than float32."""
    dtypes = {getattr(layer, "compute_dtype", None) for layer in layers_within(model)}
    return next((dtype for dtype in reversed(HALF_DTYPES) if dtype in dtypes), None)


def half_to_float32(tensor: Tensor) -> Tensor:
    """Casts half precision to float32 and leaves all other dtypes as they are."""
    return tf.cast(tensor, "float32") if tensor.dtype.name in HALF_DTYPES else tensor


def with_columns(rows: Tensor, padding: int, length: int) -> Tensor:
    """Rows (B, T) padded on the right, or truncated, to (B, `length`)."""
    rows = tf.pad(rows[:, :length], [[0, 0], [0, length]], constant_values=padding)
    return tf.ensure_shape(rows[:, :length], [None, length])


def mean_of_real_tokens(hidden: Tensor, ids: Tensor, padding_id: int) -> Tensor:
    """Vectors (B, T, D) -> their mean over the real tokens (B, D); zeros for a row without real tokens."""
    real = tf.cast(tf.not_equal(ids, padding_id), hidden.dtype)
    total = tf.einsum("BT,BTD->BD", real, hidden)
    return total / tf.maximum(tf.reduce_sum(real, axis=1, keepdims=True), 1)


def one_line(error: BaseException) -> str:
    """The message of an error as one line of at most 500 characters, without the codes of terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))[:500]


def _as_functional(model: keras.Model) -> Any:
    function = functional_model(model)
    if function is None and isinstance(model, keras.Sequential) and functional_model(model, own_call=True) is None:
        raise ValueError(
            "`model` must be built: let it begin with a `keras.Input`, such as `keras.Input((None,), dtype='int32')`. "
            f"Received: model of type {type(model).__name__}, which is not built"
        )
    if function is None:
        raise TypeError(
            "`model` must be a TextClassifier, a MaskedLM, a CausalLM, a Seq2Seq or another functional keras.Model, "
            f"whose class has no `call` of its own. Received: model of type {type(model).__name__}"
        )
    return function


def _roles(inputs: Sequence[Tensor]) -> dict[str, str | None]:
    """The name of each input -> its role."""
    roles = {x.name: role for x in inputs for role, names in NAMES.items() if x.name in names}
    others = [x for x in inputs if x.name not in roles and not is_optional_input(x)]
    roles |= {x.name: "mask" for x in others if x.dtype == "bool" and "mask" in x.name}
    rest = [x.name for x in others if x.name not in roles]
    free = [role for role in BY_POSITION if role not in roles.values()]
    given = list(roles.values()) + free[: len(rest)]
    if len(rest) > len(free) or "ids" not in given or len(set(given)) < len(given):
        raise ValueError(
            "`model` must take token ids, and besides them at most segment ids and a padding mask. Known names of "
            f"inputs: {NAMES}. {_OTHERS} Received: inputs {[x.name for x in inputs]}"
        )
    return {x.name: None for x in inputs} | roles | dict(zip(rest, free, strict=False))


def _embedding_of(model: Any, tensor: Tensor) -> Any:
    """The layer that looks up the ids of an input, also within nested models or after a cast; None if there is none."""
    calls = list(consumers_of(tensor, model))
    layer = next((call.operation for call in calls if _table_size(call.operation) is not None), None)
    if layer is not None:
        return layer
    casts = [call.outputs[0] for call in calls if is_cast_of_numbers(call.operation)]
    return next((found for one in casts if (found := _embedding_of(model, one)) is not None), None)


def _embedding_of_segments(model: Any, tensor: Tensor) -> Any:
    """As `_embedding_of`, also after elementwise operations such as a cast."""
    if (layer := _embedding_of(model, tensor)) is not None:
        return layer
    calls = [call for call in consumers_of(tensor, model) if len(call.inputs) == len(call.outputs) == 1]
    after = [call.outputs[0] for call in calls if call.outputs[0].shape == tensor.shape]
    return next((found for one in after if (found := _embedding_of_segments(model, one)) is not None), None)


def _table_size(layer: Any) -> int | None:
    """The number of ids in the table of a layer that looks ids up, such as an embedding; None for other layers."""
    sizes = [getattr(layer, name, None) for name in ("vocabulary_size", "input_dim")]
    # That of `keras.layers.IntegerLookup` is a method.
    return next((int(size) for size in sizes if isinstance(size, (int, np.integer))), None)


def fewest_positions(model: keras.Model) -> int | None:
    """The smallest number of positions of the layers that learn them; None if there is no such layer."""
    found = [_positions_of(layer) for layer in layers_within(model)]
    return min([one for one in found if one is not None], default=None)


def _positions_of(layer: Any) -> int | None:
    """The number of positions of a layer that learns them, of this package or of KerasHub; None for other layers."""
    return layer.max_length if isinstance(layer, LearnedPositionalEncoding) else keras_hub_positions(layer)


def _named_outputs(model: Any) -> dict[str, Tensor]:
    """{name: symbolic output}: the keys of a dict, or the names of the layers, with a number where two are equal."""
    named: dict[str, Tensor] = {}
    for (path, tensor), layer_name in zip(keras.tree.flatten_with_path(model.output), model.output_names, strict=True):
        by_key = any(isinstance(part, str) for part in path)
        name = base = "_".join(map(str, path)) if by_key else layer_name
        numbers = itertools.count(1)
        while name in named:
            name = f"{base}_{next(numbers)}"
        if not tensor.shape or tensor.shape[0] is not None:
            raise ValueError(
                "`model` must have outputs with the batch as first axis, so that a server may put requests together. "
                f"Received: output '{name}' of shape {tensor.shape}"
            )
        named[name] = tensor
    return named
