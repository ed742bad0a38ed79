"""Ids -> ids with some of them masked, and as labels the ids that were there: (B, T) -> (B, T), (B, T).

Devlin et al. 2018, arXiv:1810.04805, section 3.1: of the tokens chosen 80 % become the mask token, 10 % any token, 10 %
stay.
"""

from typing import Any

from keras_tx.checks import rate as check_rate
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

MASKED, ANY = 0.8, 0.1


def mask_tokens(features: Any, tokenizer: Any, *, rate: float = 0.15, seed: Any = None) -> Any:
    """Hides tokens at random, for `MaskedLM`: a function for `Dataset.map`.

    ```python
    dataset.map(lambda sentences: mask_tokens(tokenizer(sentences), tokenizer))
    ```

    Special tokens, padding among them, are never chosen, and no token becomes a special one but the mask. Each pass
    over a dataset chooses others; after `keras.utils.set_random_seed` only if it is repeated before it is mapped, for
    TensorFlow then begins each iteration with the same numbers.

    Args:
        features: a dict with "token_ids", integers of any shape, or those ids alone.
        tokenizer: a `BertTokenizer` with a mask token.
        rate: the probability that a token is chosen, in (0, 1).
        seed: None, or two integers (2,) that decide the choice: the same seed gives the same, as `Resume` needs it.

    Returns:
        The features with other "token_ids", and the labels: the ids that were there where a token was chosen, the
        padding id elsewhere, which `PaddedCrossentropy` leaves out.

    Raises:
        ValueError: for a rate outside (0, 1), features without "token_ids", or a tokenizer without a mask token.
    """
    if not check_rate("rate", rate):
        raise ValueError(f"The argument `rate` must be a number in (0, 1). Received: rate={rate!r}")
    if tokenizer.mask_id is None:
        raise ValueError(f"`tokenizer` must have a mask token. Received: special tokens {tokenizer.special_tokens}")
    if isinstance(features, dict) and "token_ids" not in features:
        raise ValueError(f"`features` must have 'token_ids'. Received: features {sorted(features)}")
    ids = features["token_ids"] if isinstance(features, dict) else tf.convert_to_tensor(features)
    special = [tokenizer.token_to_id(token) for token in tokenizer.special_tokens.values()]
    ordinary = tf.constant(sorted(set(range(tokenizer.vocabulary_size)) - set(special)), ids.dtype)
    draw = _draws(tf.shape(ids), seed)
    is_special = tf.reduce_any(ids[..., None] == tf.constant(special, ids.dtype), axis=-1)
    chosen = (draw[0] < rate) & ~is_special
    anything = tf.gather(ordinary, tf.cast(draw[2] * tf.cast(tf.size(ordinary), "float64"), "int32"))
    others = tf.where(draw[1] < MASKED, tf.cast(tokenizer.mask_id, ids.dtype), ids)
    others = tf.where((draw[1] >= MASKED) & (draw[1] < MASKED + ANY), anything, others)
    hidden = tf.where(chosen, others, ids)
    labels = tf.where(chosen, ids, tf.cast(tokenizer.pad_id, ids.dtype))
    return ({**features, "token_ids": hidden} if isinstance(features, dict) else hidden), labels


def _draws(shape, seed):
    """Three times uniform numbers in [0, 1) of this shape; float64, so that no index reaches the size of its table."""
    shape = tf.concat([[3], shape], axis=0)
    if seed is None:
        return tf.random.uniform(shape, dtype="float64")
    return tf.random.stateless_uniform(shape, seed, dtype="float64")
