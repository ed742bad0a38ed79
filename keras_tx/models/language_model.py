"""What the models that write share: the embedding's defaults, logits over the vocabulary, and `generate`."""

import keras

from keras_tx import generation
from keras_tx.layers import TokenEmbedding
from keras_tx.layers.projection import Projection
from keras_tx.models.chunked import VocabularyModel
from keras_tx.models.token_model import options


def language_embedding(embedding_options, hidden_dim, dropout):
    """The embedding's options over the defaults of Vaswani et al. 2017: scaled, so that tied logits have unit size."""
    return options(
        "embedding_options",
        embedding_options,
        TokenEmbedding,
        position_encoding="sinusoidal",
        scale=True,
        dropout=dropout,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
    )


def make_head(vocabulary_size, tie_embeddings, dtype):
    """The layer of the logits; None where the token table serves."""
    if tie_embeddings:
        return None
    return Projection(vocabulary_size, use_bias=False, dtype=dtype, name="head")


def table_of(embedding, head):
    """What the vectors are multiplied by, (V, D), and no bias."""
    return (embedding.tokens.embeddings if head is None else keras.ops.transpose(head.kernel)), None


def logits_of(hidden, embedding, head):
    """(B, T, D) -> (B, T, V)."""
    return embedding(hidden, reverse=True) if head is None else head(hidden)


class LanguageModel(VocabularyModel):
    """A model whose outputs are logits of the next token."""

    def _generation_model(self):
        """The functional model that `generate` runs step by step."""
        return self

    def generate(self, inputs, strategy=None, **options):
        """Writes on from a prompt, or the target of a source: `keras_tx.generation.generate(self, ...)`, which see."""
        return generation.generate(self, inputs, strategy, **options)

    def stream(self, inputs, strategy=None, **options):
        """Yields what `generate` writes, as it comes: `keras_tx.generation.stream(self, ...)`, which see."""
        return generation.stream(self, inputs, strategy, **options)
