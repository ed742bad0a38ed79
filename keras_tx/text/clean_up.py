"""Removes the spaces before punctuation and in English contractions from decoded texts, as transformers does."""

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# What `clean_up_tokenization_spaces` replaces, in this order, as in transformers.
CLEAN_UP = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
CLEAN_UP += [(" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]


def clean_up(texts: list[str]) -> list[str]:
    """Texts without these spaces."""
    for spaced, joined in CLEAN_UP:
        texts = [text.replace(spaced, joined) for text in texts]
    return texts


def clean_up_in_graph(texts: Tensor) -> Tensor:
    """String tensor (B,) -> string tensor (B,), without these spaces."""
    for spaced, joined in CLEAN_UP:
        texts = tf.strings.regex_replace(texts, spaced.replace(".", r"\.").replace("?", r"\?"), joined)
    return texts
