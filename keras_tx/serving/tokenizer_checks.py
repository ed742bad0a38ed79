"""Checks of tokenizers for serving that do not depend on the model: a TensorFlow graph, and a limited length.

`keras_tx.text.check_fits` checks whether a tokenizer fits a model.
"""

from typing import Any


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
