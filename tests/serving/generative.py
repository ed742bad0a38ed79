"""Generative models of three kinds, and the options that tests give them."""

from keras_tx.models import CausalLM, Seq2Seq
from tests.generation import built
from tests.serving.conftest import VOCABULARY

V, NEW, STOP = len(VOCABULARY), 7, 3
TEXTS = ["the cat sat", "", "not wonderful but dull , one two", "a\x00\ufffd 🎬 café [PAD] x [SEP]"]
RULES = {
    "max_new_tokens": NEW,
    "min_new_tokens": 2,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "forbidden_tokens": [0, 10, (5, 6)],
    "forced_tokens": {1: 8, -1: 9},
}
FEW_RULES = {"max_new_tokens": NEW, "min_new_tokens": 2}  # each rule is traced anew for each signature
SIZES = {"hidden_dim": 12, "num_heads": 6, "intermediate_dim": 17}


def language_model():
    """Grouped rotary heads under a learned bias; the table is tied."""
    attention = {"rotary": True, "num_key_value_heads": 3, "key_dim": 4}
    return CausalLM(
        V,
        num_layers=1,
        **SIZES,
        embedding_options={"position_encoding": None},
        decoder_options={"position_bias": "relative", "attention_options": attention},
    )


def translator():
    """Its encoder skips padding in exports, but not in `generate`, which the tests compare with."""
    options = {"position_encoding": "learned", "max_length": 19}
    return Seq2Seq(V, num_layers=1, **SIZES, embedding_options=options, encoder_options={"skip_padding": True})


def put_together():
    """An encoder, attention and operators that a user put together, with a table of learned positions."""
    built_of = {"V": V, "SOURCE_V": V}
    before = {name: getattr(built, name) for name in built_of}
    try:
        for name, value in built_of.items():
            setattr(built, name, value)
        return built.encoder_and_decoder()
    finally:
        for name, value in before.items():
            setattr(built, name, value)


MODELS = {"language_model": language_model, "translator": translator, "put_together": put_together}
