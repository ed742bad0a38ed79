"""The inputs of a `PretrainedModel` by name: which must be given, and which types, ranks and values they have.

B batch, T tokens.
"""

from collections.abc import Mapping
from typing import Any

import keras

from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import masks
from keras_tx.layers.ids import check_ids, check_integers, check_no_texts
from keras_tx.layers.shapes import check_dense
from keras_tx.pretrained.family import Family

MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}  # {ids: their mask}


def by_name(family: Family, inputs: Any, further: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of all inputs of a family, with None for those that were left out.

    Args:
        family: the family of the model.
        inputs: a dict; or one input; or several in the order of `family.inputs`, a list or tuple.
        further: inputs that were given as keyword arguments.

    Raises:
        ValueError: an input is unknown, missing or given twice.
    """
    names, needed = family.inputs, family.needed
    if not isinstance(inputs, dict):
        several = isinstance(inputs, (list, tuple)) and all(hasattr(one, "shape") for one in inputs)
        inputs = dict(zip(names, inputs if several else [inputs], strict=False))
    given = {**inputs, **further}
    missing = [name for name in needed if given.get(name) is None]
    if missing or not given.keys() <= set(names) or len(given) < len(inputs) + len(further):
        raise ValueError(
            f"`inputs` must have {list(needed)}, and may have {list(names)}, each once. Received: {[*inputs, *further]}"
        )
    return {name: given.get(name) for name in names}


def check_shapes(model: keras.Model, inputs: Mapping[str, Any]) -> None:
    """Raises unless all inputs that were given are arrays or dense tensors of the rank that the model has for them."""
    ranks = {x.name: len(x.shape) for x in model.inputs}
    given = {name: x for name, x in inputs.items() if x is not None}
    check_dense(model, (), given)
    for name, x in given.items():
        check_no_texts(name, x)
        rule = f"`{name}` must be an array or tensor with {ranks[name]} axes. Received: {name} of"
        if not hasattr(x, "shape"):
            raise ValueError(f"{rule} type {type(x).__name__}")
        if getattr(x.shape, "rank", 0) is None:  # in a graph of TensorFlow that was traced for inputs of several ranks
            raise ValueError(f"{rule} unknown rank")
        shape = tuple(x.shape)
        if len(shape) != ranks[name]:
            raise ValueError(f"{rule} shape {shape}")
        if name in MASKS and shape[1] == 0:
            raise ValueError(f"`{name}` must have at least one token in each row. Received: {name} of shape {shape}")


def with_keras_masks(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs`, where the mask that Keras attached to ids is their `attention_mask` if none was given."""
    found = {
        mask: get_keras_mask(inputs[ids])
        for ids, mask in MASKS.items()
        if inputs.get(ids) is not None and mask in inputs and inputs[mask] is None
    }
    return {**inputs, **found}


def checked(inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """`inputs`, with masks of floats as booleans. Keras would cast floats to integers, and truncate large integers.

    Args:
        inputs: {name: tensor, or None for an input that was left out}.
        sizes: {name of an input of token ids: size of its vocabulary}.

    Raises:
        ValueError: ids, segments or positions are not integers, ids are outside of their vocabulary, or a mask of
            floats has other values than 1 and 0, as far as the values are known.
    """
    found = dict(inputs)
    for name, x in inputs.items():
        if x is None:
            continue
        if name in sizes:
            check_ids(name, x, sizes[name])
        elif name.endswith("_ids"):
            check_integers(name, x)
        elif name.endswith("_mask") and "float" in keras.backend.standardize_dtype(x.dtype):
            found[name] = masks.checked(name, x, has_bias=False)
    return found
