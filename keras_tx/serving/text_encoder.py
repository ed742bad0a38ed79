"""A functional model that reads -> what an export must know of it, and one way to call it: ids (B, T) -> outputs.

B batch, T tokens. `TextClassifier` and `MaskedLM` are such models, those of `keras_tx.pretrained` that do not write,
and users' own: integer inputs (B, T), by name or by position the token ids and, where there are any, segment ids and
a padding mask, which is computed here.
"""

import itertools
import re

import keras
import numpy as np

from keras_tx.functional_graph import consumers_of, is_optional_input
from keras_tx.keras_internals import functional_model, keras_hub_positions, layers_within
from keras_tx.layers import LearnedPositionalEncoding
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

NAMES = {
    "ids": ("token_ids", "input_ids", "input_word_ids", "ids"),
    "segments": ("segment_ids", "token_type_ids", "input_type_ids", "type_ids"),
    "mask": ("attention_mask", "padding_mask", "input_mask"),
}
BY_POSITION = ("ids", "segments")
HALF = ("float16", "bfloat16")


class TextEncoder:
    """What goes in and out of a functional model over ids.

    Attributes:
        roles: the name of each input -> "ids", "segments", "mask", or None for an optional one that is left out.
        width: the T that the model was built for; None for any.
        vocabulary_size, padding_id: of the layer that looks the ids up; None where nothing tells.
        max_length: the fewest positions of a layer; None if nothing tells.
        outputs: the name of each output -> its symbolic tensor.

    Raises:
        TypeError: a model that is not functional.
        ValueError: inputs that are not ids and what belongs to them, or an output without the batch as first axis.
    """

    def __init__(self, model):
        self.model = _as_functional(model)
        self.roles = _roles(self.model.inputs)
        ids = next(x for x in self.model.inputs if self.roles[x.name] == "ids")
        layer = _embedding_of(self.model, ids)
        self._check_inputs(layer)
        self.width = ids.shape[1]
        self.vocabulary_size = getattr(layer, "vocabulary_size", getattr(layer, "input_dim", None))
        self.padding_id = getattr(layer, "padding_id", 0 if getattr(layer, "mask_zero", False) else None)
        lengths = [_positions_of(one) for one in layers_within(self.model)]
        self.max_length = min([n for n in [*lengths, self.width] if n is not None], default=None)
        self.outputs = _named_outputs(self.model)
        self.has_mask = "mask" in self.roles.values()

    def __call__(self, ids, segments=None, padding_id=0):
        """The outputs by name, those of half precision as float32: JSON has no numbers for them."""
        outputs = self.model(self.inputs(ids, segments, padding_id), training=False)
        return dict(zip(self.outputs, map(in_full, keras.tree.flatten(outputs)), strict=True))

    def part(self, tensor):
        """The model up to a symbolic `tensor`: a function of the same arguments that returns its value."""
        part = keras.Model(self.model.inputs, tensor)
        return lambda ids, segments=None, padding_id=0: in_full(
            part(keras.tree.flatten(self.inputs(ids, segments, padding_id)), training=False)
        )

    def tokenized(self, tokenizer, texts):
        """Texts -> ids and segment ids (B, T), as wide as the model was built for, and no longer than it can take."""
        options = {"max_length": self.max_length} if tokenizer.max_length is None else {}
        if self.width is not None:
            options = {"max_length": self.width, "padding": "max_length"}
        features = tokenizer(texts, **options)
        ids = tf.convert_to_tensor(features["token_ids"])
        segments = features.get("segment_ids", tf.zeros_like(ids))
        if self.width is not None:
            return ids, segments
        return with_a_column(ids, tokenizer.pad_id), with_a_column(segments, 0)

    @property
    def half(self):
        """The coarsest dtype that a layer computes in, if it is coarser than float32."""
        return half_of(self.model)

    def inputs(self, ids, segments=None, padding_id=0):
        given = []
        for tensor in self.model.inputs:
            role, dtype = self.roles[tensor.name], tensor.dtype
            if role == "ids":
                given.append(tf.cast(tf.maximum(ids, 0), dtype))  # padding may be -1, where all other ids are tokens
            elif role == "segments":
                given.append(tf.zeros_like(ids, dtype) if segments is None else tf.cast(segments, dtype))
            else:
                given.append(None if role is None else tf.cast(tf.not_equal(ids, padding_id), dtype))
        return keras.tree.pack_sequence_as(self.model.input, given)

    def _check_inputs(self, layer):
        for tensor in self.model.inputs:
            role, dtype = self.roles[tensor.name], tensor.dtype
            looked_up = role == "ids" and layer is not None  # Keras casts there
            if role is not None and not (looked_up or "int" in dtype or dtype == "bool"):
                raise ValueError(
                    "`model` must take integers; a keras.Input for ids needs dtype='int32'. Received: input "
                    f"'{tensor.name}' of dtype {dtype}"
                )
            if role is not None and (len(tensor.shape) != 2 or tensor.shape[0] is not None):
                raise ValueError(
                    "`model` must take ids of any number of rows, (B, T). Received: input "
                    f"'{tensor.name}' of shape {tensor.shape}"
                )


def half_of(model):
    """The coarsest dtype that a layer of `model` computes in, if it is coarser than float32."""
    dtypes = {getattr(layer, "compute_dtype", None) for layer in layers_within(model)}
    return next((dtype for dtype in reversed(HALF) if dtype in dtypes), None)


def in_full(tensor):
    """`tensor`, as float32 if it is of half precision."""
    return tf.cast(tensor, "float32") if tensor.dtype.name in HALF else tensor


def with_a_column(ids, padding_id):
    """Ids (B, T), as (B, 1) where T is 0: of no rows at all, or of rows without tokens. Models may look for a first."""
    missing = tf.maximum(1 - tf.shape(ids)[1], 0)
    return tf.pad(ids, [[0, 0], [0, missing]], constant_values=padding_id)


def mean_of_real(hidden, ids, padding_id):
    """Vectors (B, T, D) -> their mean over the tokens that are not padding (B, D); of none of them zeros."""
    real = tf.cast(tf.not_equal(ids, padding_id), hidden.dtype)
    total = tf.einsum("BT,BTD->BD", real, hidden)
    return total / tf.maximum(tf.reduce_sum(real, axis=1, keepdims=True), 1)


def check_padding(reader, padding_id, ids, width):
    """Raises unless a row of `ids` has the same answer each time, alone and filled up with padding to `width`.

    Only then may rows of different lengths share a batch. This also sees whether the model takes so many tokens.

    Raises:
        ValueError: the answers differ, or the model does not run on `width` tokens.
    """
    tolerance = 0.05 if reader.half else 1e-4
    alone = np.array([ids], "int32")
    filled = np.full((1, max(width, len(ids))), padding_id, "int32")
    filled[:, : len(ids)] = alone
    with keras.device("cpu:0"):
        first, again, second = (_tried(reader, row, padding_id) for row in (alone, alone, filled))
    for name, expected in first.items():
        error = _difference(again[name], expected)
        if not error <= tolerance:
            raise ValueError(
                "`model` must give the same answer every time. Received: output "
                f"'{name}' that differs by {error:.1e} between two calls"
            )
        error = _difference(second[name][tuple(slice(size) for size in expected.shape)], expected)
        if not error <= tolerance:
            raise ValueError(
                f"`model` must not see padding, the id {padding_id}, or rows of different lengths could not share a "
                "batch: mask it (`TokenEmbedding(padding_id=...)`, `keras.layers.Embedding(mask_zero=True)`, an input "
                f"'padding_mask'), or give the `keras.Input` of the ids its fixed length. Received: output '{name}' "
                f"that differs by {error:.1e} between {len(ids)} tokens alone and filled up to {width}"
            )


def _difference(got, expected):
    """The largest difference of two outputs, relative to the largest number if that is over 1."""
    got, expected = (np.asarray(x).astype("float64") for x in (got, expected))
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    scale = max(1.0, float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0)))
    with np.errstate(invalid="ignore"):  # of infinities that are equal
        return float(np.max(np.abs(np.where(same, 0, got - expected)), initial=0)) / scale


def _tried(reader, row, padding_id):
    try:
        return reader(tf.constant(row), padding_id=padding_id)
    except Exception as error:  # whatever a layer raises
        raise ValueError(
            "`model` must take rows as long as `tokenizer` makes them; give that a `max_length`. Received: "
            f"{row.shape[1]} tokens, on which the model fails: {one_line(error)}"
        ) from error


def one_line(error):
    """The message of an error in one line, cut, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(error).split()))[:500]


def _as_functional(model):
    function = functional_model(model)
    if function is None:
        raise TypeError(
            "`model` must be a TextClassifier, a MaskedLM, a CausalLM, a Seq2Seq or another functional keras.Model. "
            f"Received: model of type {type(model).__name__}"
        )
    return function


def _roles(inputs):
    """The name of each input -> its role."""
    roles = {x.name: role for x in inputs for role, names in NAMES.items() if x.name in names}
    rest = [x.name for x in inputs if x.name not in roles and not is_optional_input(x)]
    free = [role for role in BY_POSITION if role not in roles.values()]
    given = list(roles.values()) + free[: len(rest)]
    if len(rest) > len(free) or "ids" not in given or len(set(given)) < len(given):
        raise ValueError(
            "`model` must take token ids, and beside them at most segment ids and a padding mask; names that are known "
            f"are {NAMES}. Received: inputs {[x.name for x in inputs]}"
        )
    return {x.name: None for x in inputs} | roles | dict(zip(rest, free, strict=False))


def _embedding_of(model, tensor):
    """The layer of `model` that looks the ids of an input up, also within nested models; None if there is none."""
    layers = [call.operation for call in consumers_of(tensor, model)]
    return next((x for x in layers if hasattr(x, "vocabulary_size") or hasattr(x, "input_dim")), None)


def _positions_of(layer):
    """The number of positions of a layer of learned ones, of this package or of KerasHub; None of any other."""
    return layer.max_length if isinstance(layer, LearnedPositionalEncoding) else keras_hub_positions(layer)


def _named_outputs(model):
    """{name: symbolic output}: the keys of a dict, else the names of the layers, with a number where two are equal."""
    named = {}
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
