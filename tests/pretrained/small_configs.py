"""Configs of transformers with small sizes."""


def small(config):
    """The config of a model that is made in no time."""
    sizes = {"vocab_size": 103, "hidden_size": 24, "n_embd": 24, "dim": 24, "d_model": 24, "intermediate_size": 32}
    sizes |= {
        "num_hidden_layers": 1,
        "n_layer": 1,
        "n_layers": 1,
        "num_layers": 1,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    sizes |= {"num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "d_kv": 12}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_ff": 32, "hidden_dim": 32, "head_dim": 12}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_decoder_layers": 1, "decoder_vocab_size": 103}
    sizes |= {"max_position_embeddings": 40, "n_positions": 40, "embedding_size": 16, "layer_types": ["full_attention"]}
    ids = {key: 1 for key in config if key.endswith("token_id") and isinstance(config[key], int)}
    return {**config, **{key: value for key, value in sizes.items() if key in config}, **ids}
