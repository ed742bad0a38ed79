"""Checks whether a tokenizer and a model fit together."""

from typing import Any

from keras_tx import checks


def check_fits(
    tokenizer: Any,
    vocabulary_size: int | None,
    *,
    padding_id: int | None = None,
    max_length: int | None = None,
    tokenizer_name: str = "tokenizer",
    input_name: str | None = None,
) -> None:
    """Checks that a model accepts every row of ids that a tokenizer can return.

    Args:
        tokenizer: a tokenizer of `keras_tx.text`, or any object with its attributes `vocabulary_size`, `pad_id` and
            `max_length`.
        vocabulary_size: the vocabulary size of the model, which may be larger than that of the tokenizer. None: not
            checked.
        padding_id: the model's padding id. None: not checked.
        max_length: the number of positions that the model has. None: not checked.
        tokenizer_name: the name of the tokenizer in error messages, such as the name of your argument.
        input_name: the name of the model's input for these ids, for error messages. None: the model has one input of
            ids.

    Raises:
        ValueError: the tokenizer has ids outside the model's vocabulary, another padding id, or a larger `max_length`.
            The message has both numbers.

    Examples:
        >>> tokenizer = keras_tx.text.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat"], max_length=16)
        >>> keras_tx.text.check_fits(tokenizer, 5, padding_id=0, max_length=16)
        >>> keras_tx.text.check_fits(tokenizer, 4)
        Traceback (most recent call last):
        ValueError: `tokenizer` must not have more tokens than the model. Received: tokenizer.vocabulary_size=5,
        vocabulary_size=4
    """
    of_input = "" if input_name is None else f" of the input '{input_name}'"
    if vocabulary_size is not None:
        checks.positive_int("vocabulary_size", vocabulary_size)
        if tokenizer.vocabulary_size > vocabulary_size:
            raise ValueError(
                f"`{tokenizer_name}` must not have more tokens than the model. Received: "
                f"{tokenizer_name}.vocabulary_size={tokenizer.vocabulary_size}, "
                f"vocabulary_size={vocabulary_size}{of_input}"
            )
    if padding_id is not None and tokenizer.pad_id != padding_id:
        raise ValueError(
            f"`{tokenizer_name}` must pad with the id that the model takes for padding. Received: "
            f"{tokenizer_name}.pad_id={tokenizer.pad_id}, padding_id={padding_id}{of_input}"
        )
    if max_length is not None and (tokenizer.max_length is None or tokenizer.max_length > max_length):
        raise ValueError(
            f"`{tokenizer_name}` must not make rows longer than the positions that the model has. Received: "
            f"{tokenizer_name}.max_length={tokenizer.max_length}, and {max_length} positions{of_input}"
        )
