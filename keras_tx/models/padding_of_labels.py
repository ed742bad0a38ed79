"""A warning for losses and metrics that leave out another id than the padding id of the model.

Labels of padding tokens have the padding id of the tokenizer, which is that of the model. A loss with another
`padding_id` trains on them as on real tokens: the accuracy looks excellent, and the model learns to predict padding.
"""

import warnings
from typing import Any

import keras

from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Perplexity

_PADDED = (PaddedCrossentropy, PaddedAccuracy, Perplexity)


def warn_of_other_padding(padding_id: int | None, compiled: Any) -> None:
    """Warns, at the caller of `compile`, if a loss or metric has another `padding_id` than the model.

    Args:
        padding_id: that of the model; None if it has none, or if its labels are not ids of tokens.
        compiled: the arguments of `compile`, in any structure.
    """
    found = [one for one in keras.tree.flatten(compiled) if isinstance(one, _PADDED)]
    # Labels below 0, such as -100, are no ids of tokens: they were made to be left out.
    others = [one for one in found if one.padding_id >= 0 and padding_id not in (None, one.padding_id)]
    if others:
        names = [f"{type(one).__name__}(padding_id={one.padding_id})" for one in others]
        warnings.warn(
            "Losses and metrics should have the padding id of the model, and the model that of the tokenizer; "
            "otherwise labels of padding count as real tokens. Received: a model with the padding id "
            f"{padding_id}, and {', '.join(names)}. Write `{type(others[0]).__name__}(padding_id={padding_id})` if "
            f"{padding_id} is the tokenizer's `pad_id`, or `padding_id=-100` if labels are padded with -100. If an "
            "id that no token has pads the labels, ignore this warning",
            stacklevel=3,
        )
