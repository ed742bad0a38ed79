"""Transformer layers. All docstrings use the same letters for the sizes of axes:

B batch, T queries or tokens, S keys, N query heads, K key heads, G = N/K, H size of a head, D hidden size (of the
model), F intermediate size (of the feed-forward network), V vocabulary, L layers.
"""

from keras_tx.layers.attention.layer import MultiHeadAttention
from keras_tx.layers.decoder import Decoder, DecoderLayer
from keras_tx.layers.embeddings import TokenEmbedding
from keras_tx.layers.encoder import Encoder, EncoderLayer
from keras_tx.layers.feed_forward import FeedForward
from keras_tx.layers.patches import PatchEmbedding
from keras_tx.layers.position_bias import AlibiBias, RelativePositionBias
from keras_tx.layers.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from keras_tx.layers.rotary import RotaryEmbedding

__all__ = [
    "AlibiBias",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LearnedPositionalEncoding",
    "MultiHeadAttention",
    "PatchEmbedding",
    "RelativePositionBias",
    "RotaryEmbedding",
    "SinusoidalPositionalEncoding",
    "TokenEmbedding",
]
