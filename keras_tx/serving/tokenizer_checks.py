"""Checks of tokenizers for serving: whether they run in a TensorFlow graph, limit the length, and take pairs of texts.

`keras_tx.text.check_fits` checks whether a tokenizer fits a model.
"""

from typing import Any

import numpy as np

from keras_tx.serving.text_encoder import TextEncoder, one_line


def check_in_graph(name: str, tokenizer: Any) -> None:
    """Checks that the tokenizer in the argument `name` runs in a TensorFlow graph.

    Raises:
        TypeError: it does not; the message has the tokenizer's own reason, if it gives one.
    """
    if not getattr(tokenizer, "in_graph", hasattr(tokenizer, "vocabulary_size")):
        reason = getattr(tokenizer, "not_in_graph", None)
        raise TypeError(
            f"`{name}` must be one that runs in a TensorFlow graph, such as BertTokenizer. Received: {name} of type "
            f"{type(tokenizer).__name__}{f': {reason}' if reason else ''}"
        )


def check_length_limit(tokenizer: Any) -> None:
    """Checks that a tokenizer limits the length of its rows; for models without a limit of their own.

    Raises:
        ValueError: the tokenizer has no `max_length`.
    """
    if tokenizer.max_length is None:
        raise ValueError(
            "`tokenizer` must have a `max_length`, or one long text takes all memory of a server. Received: "
            "tokenizer.max_length=None"
        )


def check_pairs(tokenizer: Any, encoder: TextEncoder) -> None:
    """Checks that a tokenizer makes of a pair of texts what the model takes; it calls the tokenizer.

    Raises:
        ValueError: the tokenizer takes no pairs, returns segment ids that the model does not know, or returns none for
            a model that tells the two texts apart by segment ids.
    """
    kind = type(tokenizer).__name__
    try:
        features = encoder.features(tokenizer, ["a"], ["a"])
    except Exception as error:  # a user's tokenizer may raise any error
        raise ValueError(
            f"`tokenizer` must take pairs of texts for `text_pairs=True`. Received: tokenizer of type {kind}: "
            f"{one_line(error)}"
        ) from error
    known = encoder.num_segments
    if not encoder.has_segments:
        return
    if "segment_ids" not in features:
        if known != 1:
            raise ValueError(
                "`tokenizer` must return 'segment_ids' for `text_pairs=True` and a model that takes segment ids, or "
                f"both texts would have the same ones. Received: tokenizer of type {kind}, which returns "
                f"{sorted(features)}"
            )
        return
    largest = int(np.max(np.asarray(features["segment_ids"])))
    if known is not None and largest >= known:
        raise ValueError(
            "`model` must have a segment for each text of a pair that `tokenizer` numbers, for `text_pairs=True`. "
            f"Received: {known} segments, and the segment id {largest} of tokenizer of type {kind}"
        )
