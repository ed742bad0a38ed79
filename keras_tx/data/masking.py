"""Random masking of tokens for masked language models: ids (B, T) -> masked ids (B, T), labels (B, T).

Devlin et al. 2018, arXiv:1810.04805, section 3.1: of the chosen tokens 80 % become the mask token, 10 % a random token,
and 10 % stay.
"""

from numbers import Real
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.text.argument_checks import check_seed
from keras_tx.text.base import Tokenizer
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1


def mask_tokens(features: Any, tokenizer: Tokenizer, *, rate: float = 0.15, seed: Any = None) -> Any:
    """Masks tokens at random, as for BERT's pretraining; use it in `Dataset.map`.

    Of the chosen tokens 80 % become the mask token, 10 % a random ordinary token, and 10 % stay. Special tokens,
    padding tokens and additional special tokens among them, are never chosen.

    Every pass over a dataset chooses different tokens. After `keras.utils.set_random_seed`, however, TensorFlow starts
    every pass with the same random numbers: put `.repeat()` before the `.map`, or pass a different `seed` in each
    epoch.

    Args:
        features: a dictionary with "token_ids", integers of any shape, also a `tf.RaggedTensor`, or those ids alone.
        tokenizer: a `Tokenizer` with a mask token.
        rate: the probability that a token is chosen, in (0, 1).
        seed: two integers (2,), for the same choice in every call with this seed, which `Resume` needs. None: a
            different choice in every call.

    Returns:
        `(features, labels)`: the features with masked "token_ids" (or the masked ids alone), and the labels, of the
        same shape: the original ids of the chosen tokens, and elsewhere the padding id of the tokenizer.
        Losses and metrics with `padding_id=tokenizer.pad_id`, such as `PaddedCrossentropy`, ignore it.

    Raises:
        ValueError: `rate` is outside (0, 1), `features` have no "token_ids", the ids are not integers, `seed` is not
            two integers, or `tokenizer` has no mask token or no padding token.

    Reference:
        Devlin et al. 2018, arXiv:1810.04805, section 3.1.

    Examples:
        >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hot", "dog"]
        >>> tokenizer = keras_tx.text.BertTokenizer(vocabulary)
        >>> features = tokenizer(["hot dog hot dog", "hot"])
        >>> masked, labels = keras_tx.data.mask_tokens(features, tokenizer, rate=0.999, seed=(1, 2))
        >>> labels.numpy()
        array([[0, 5, 6, 5, 6, 0],
               [0, 5, 0, 0, 0, 0]], dtype=int32)
        >>> masked["token_ids"].shape, masked["token_ids"].numpy()[:, 0]
        (TensorShape([2, 6]), array([2, 2], dtype=int32))

        In a pipeline: `dataset.map(lambda texts: mask_tokens(tokenizer(texts), tokenizer))`.
    """
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < float(rate) < 1:
        raise ValueError(f"The argument `rate` must be a number in (0, 1). Received: rate={rate!r}")
    for name, needed in (("mask", tokenizer.mask_id), ("padding", tokenizer.pad_id)):
        if needed is None:
            raise ValueError(
                f"`tokenizer` must have a {name} token. Received: special tokens {tokenizer.special_tokens}"
            )
    if isinstance(features, dict) and "token_ids" not in features:
        raise ValueError(f"`features` must have 'token_ids'. Received: features {sorted(features)}")
    given = features["token_ids"] if isinstance(features, dict) else features
    is_ragged = isinstance(given, tf.RaggedTensor)
    ids = given.flat_values if is_ragged else tf.convert_to_tensor(given)
    if not ids.dtype.is_integer:
        raise ValueError(f"`features` must hold token ids, which are integers. Received: ids of dtype {ids.dtype.name}")
    named = {tokenizer.token_to_id(token) for token in tokenizer.special_tokens.values()}
    special = sorted(named | tokenizer._special_ids())  # there may be more of them, such as those of T5
    ordinary = tf.constant(sorted(set(range(tokenizer.vocabulary_size)) - set(special)), ids.dtype)
    draw = _uniform_numbers(tf.shape(ids), seed)
    is_special = tf.reduce_any(ids[..., None] == tf.constant(special, ids.dtype), axis=-1)
    chosen = (draw[0] < rate) & ~is_special
    random_ids = tf.gather(ordinary, tf.cast(draw[2] * tf.cast(tf.size(ordinary), "float64"), "int32"))
    becomes_mask = draw[1] < MASKED_SHARE
    becomes_random = ~becomes_mask & (draw[1] < MASKED_SHARE + RANDOM_SHARE)
    replacements = tf.where(becomes_mask, tf.cast(tokenizer.mask_id, ids.dtype), ids)
    masked = tf.where(chosen, tf.where(becomes_random, random_ids, replacements), ids)
    labels = tf.where(chosen, ids, tf.cast(tokenizer.pad_id, ids.dtype))
    if is_ragged:
        masked, labels = given.with_flat_values(masked), given.with_flat_values(labels)
    return ({**features, "token_ids": masked} if isinstance(features, dict) else masked), labels


def _uniform_numbers(shape: Tensor, seed: Any) -> Tensor:
    """Three uniform numbers in [0, 1) for each token, (3, ...); float64, so that no index is rounded up too far."""
    shape = tf.concat([[3], shape], axis=0)
    if seed is None:
        return tf.random.uniform(shape, dtype="float64")
    return tf.random.stateless_uniform(shape, check_seed(seed), dtype="float64")
