"""Where models and tokenizers meet: whether the ids of a tokenizer are the ids of a model."""

from typing import Any

from keras_tx import checks


def check_fits(
    tokenizer: Any, vocabulary_size: int, *, padding_id: int | None = None, max_length: int | None = None
) -> None:
    """Checks that a tokenizer makes only rows that a model can take.

    Args:
        tokenizer: any of `keras_tx.text`.
        vocabulary_size: of the model's embedding; it may be larger than the tokenizer's.
        padding_id: the id that the model takes for padding; None: not checked.
        max_length: the positions that the model has; None: not checked.

    Raises:
        ValueError: the tokenizer has ids beyond the vocabulary, pads with another id, or makes longer rows.
    """
    checks.positive_int("vocabulary_size", vocabulary_size)
    if tokenizer.vocabulary_size > vocabulary_size:
        raise ValueError(
            "`tokenizer` must not have more tokens than the model. Received: "
            f"tokenizer.vocabulary_size={tokenizer.vocabulary_size}, vocabulary_size={vocabulary_size}"
        )
    if padding_id is not None and tokenizer.pad_id != padding_id:
        raise ValueError(
            "`tokenizer` must pad with the id that the model takes for padding. Received: "
            f"tokenizer.pad_id={tokenizer.pad_id}, padding_id={padding_id}"
        )
    if max_length is not None and (tokenizer.max_length is None or tokenizer.max_length > max_length):
        raise ValueError(
            "`tokenizer` must not make rows longer than the positions that the model has. Received: "
            f"tokenizer.max_length={tokenizer.max_length}, max_length={max_length}"
        )
