"""One row for each public layer: how to make it, and inputs for it. The contract tests run over all rows."""

from dataclasses import dataclass

import keras
import numpy as np

from keras_tx import layers
from tests.tools import normal

B, T, D = 2, 5, 12


def _vectors(batch=B, length=T):
    return {"inputs": normal(batch, length, D)}


def _ids(batch=B, length=T):
    return {"inputs": np.random.default_rng(length).integers(1, 23, size=(batch, length)).astype("int32")}


def _images(batch=B, length=6):
    return {"inputs": normal(batch, length, 4, 3)}


def _query(batch=B, length=T):
    return {"query": normal(batch, length, D)}


def _heads(batch=B, length=T):
    return {"inputs": normal(batch, length, 3, 8)}


def _inputs_and_memory(batch=B, length=T):
    return {"inputs": normal(batch, length, D), "memory": normal(batch, 7, 11, seed=1)}


def _query_and_value(batch=B, length=T):
    return {"query": normal(batch, length, D), "value": normal(batch, 7, 11, seed=1)}


@dataclass(frozen=True)
class Row:
    layer: type
    arguments: dict
    inputs: callable = _vectors
    scores: bool = False
    per_example: bool = True  # whether the first axis of the output is the batch
    any_length: bool = True  # whether the second axis of the inputs may have any size

    def make(self, **kwargs):
        return self.layer(**{**self.arguments, **kwargs})


ROWS = [
    Row(
        layers.MultiHeadAttention,
        {"num_heads": 6, "key_dim": 3, "num_key_value_heads": 2},
        _query_and_value,
        scores=True,
    ),
    Row(
        layers.MultiHeadAttention,
        {
            "num_heads": 3,
            "key_dim": 5,
            "value_dim": 7,
            "use_gate": True,
            "qk_norm": True,
            "sliding_window": 3,
            "scale": 0.3,
        },
        _query_and_value,
        scores=True,
    ),
    Row(layers.SinusoidalPositionalEncoding, {"max_wavelength": 100, "layout": "concatenated"}),
    Row(layers.LearnedPositionalEncoding, {"max_length": 13}),
    Row(
        layers.TokenEmbedding,
        {
            "vocabulary_size": 23,
            "hidden_dim": 10,
            "scale": True,
            "position_encoding": "learned",
            "max_length": 13,
            "num_segments": 3,
            "normalization": "layer_norm",
        },
        _ids,
    ),
    Row(layers.FeedForward, {"intermediate_dim": 17, "activation": "gelu", "gated": True}),
    Row(layers.EncoderLayer, {"intermediate_dim": 17, "num_heads": 3}, scores=True),
    Row(
        layers.EncoderLayer,
        {
            "intermediate_dim": 17,
            "num_heads": 3,
            "normalize_first": True,
            "normalization": "rms_norm",
            "gated": True,
            "activation": "silu",
            "use_bias": False,
            "attention_options": {"num_key_value_heads": 1, "key_dim": 5},
        },
        scores=True,
    ),
    Row(
        layers.Encoder, {"num_layers": 2, "intermediate_dim": 17, "num_heads": 3, "normalize_first": True}, scores=True
    ),
    Row(
        layers.Encoder,
        {
            "num_layers": 2,
            "intermediate_dim": 17,
            "num_heads": 3,
            "position_bias": "relative",
            "attention_options": {"rotary": True, "key_dim": 4},
        },
        scores=True,
    ),
    Row(layers.DecoderLayer, {"intermediate_dim": 17, "num_heads": 3}, scores=True),
    Row(
        layers.DecoderLayer,
        {
            "intermediate_dim": 17,
            "num_heads": 3,
            "cross_attention": True,
            "normalize_first": True,
            "attention_options": {"num_key_value_heads": 1, "sliding_window": 2, "key_dim": 4, "rotary": True},
        },
        _inputs_and_memory,
        scores=True,
    ),
    Row(
        layers.Decoder,
        {"num_layers": 2, "intermediate_dim": 17, "num_heads": 3, "cross_attention": True, "position_bias": "alibi"},
        _inputs_and_memory,
        scores=True,
    ),
    Row(layers.RotaryEmbedding, {"base": 100, "layout": "interleaved", "fraction": 0.5}, _heads),
    Row(layers.AlibiBias, {"num_heads": 3}, _query, per_example=False),
    Row(
        layers.RelativePositionBias,
        {"num_heads": 3, "num_buckets": 8, "max_distance": 17, "bidirectional": False},
        _query,
        per_example=False,
    ),
    Row(
        layers.MultiHeadAttention,
        {"num_heads": 3, "key_dim": 5, "use_output_bias": False, "qk_norm": True, "qk_norm_epsilon": 0.01},
        _query_and_value,
        scores=True,
    ),
    Row(
        layers.Encoder,
        {
            "num_layers": 2,
            "intermediate_dim": 17,
            "num_heads": 3,
            "normalize_first": True,
            "normalization": "layer_norm_no_bias",
            "attention_options": [{"rotary": True, "key_dim": 4}, {"sliding_window": 2, "use_output_bias": False}],
            "normalize_inputs": False,
        },
        scores=True,
    ),
    Row(layers.LearnedPositionalEncoding, {"max_length": 13, "offset": 2}),
    Row(
        layers.TokenEmbedding,
        {
            "vocabulary_size": 23,
            "hidden_dim": 10,
            "embedding_dim": 7,
            "position_encoding": "sinusoidal",
            "num_segments": 2,
            "normalization": "layer_norm",
        },
        _ids,
    ),
    Row(layers.FeedForward, {"intermediate_dim": 17, "activation": "gelu_tanh", "use_bias": False}),
    Row(layers.PatchEmbedding, {"patch_size": 2, "hidden_dim": 11}, _images, any_length=False),
    Row(
        layers.Encoder,
        {"num_layers": 2, "intermediate_dim": 17, "num_heads": 3, "skip_padding": True},
        scores=True,
    ),
    Row(
        layers.Decoder,
        {
            "num_layers": 2,
            "intermediate_dim": 17,
            "num_heads": 3,
            "normalize_first": True,
            "normalization": keras.layers.LayerNormalization(epsilon=0.5, center=False),
            "bias_initializer": "ones",
        },
        scores=True,
    ),
    Row(
        layers.TokenEmbedding,
        {
            "vocabulary_size": 23,
            "hidden_dim": 10,
            "zero_padding": True,
            "normalization": keras.layers.RMSNormalization,
            "dropout": 0.5,
            "dropout_before_norm": True,
        },
        _ids,
    ),
    Row(layers.SinusoidalPositionalEncoding, {"frequencies": [1.0, 0.5, 0.25, 0.1, 0.01, -0.3]}),
    Row(layers.AlibiBias, {"num_heads": 3, "alibi_bias_max": 5}, _query, per_example=False),
]


def name(row):
    return f"{row.layer.__name__}-{ROWS.index(row)}"
