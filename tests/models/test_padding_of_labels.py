"""A loss or metric with another padding id than the model has is named when the model is compiled."""

import re
import warnings

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.pretrained import PretrainedModel
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Perplexity

V, SIZES = 13, {"num_layers": 1, "hidden_dim": 6, "num_heads": 3, "dropout": 0.0}
OWN = {"embedding_options": {"padding_id": 1}}
BERT = {"vocab_size": V, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 7}
BERT |= {"max_position_embeddings": 11}
LLAMA = {"model_type": "llama", "vocab_size": V, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
LLAMA |= {"intermediate_size": 7, "max_position_embeddings": 11, "bos_token_id": 2, "eos_token_id": 5}
BART = {"model_type": "bart", "vocab_size": V, "d_model": 6, "encoder_layers": 1, "decoder_layers": 1}
BART |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 7, "decoder_ffn_dim": 7}
BART |= {"max_position_embeddings": 11}
WITH_1 = {
    "masked": lambda: MaskedLM(V, **SIZES, **OWN),
    "causal": lambda: CausalLM(V, **SIZES, **OWN),
    "pairs": lambda: Seq2Seq(V, 17, **SIZES, **OWN),
    "roberta": lambda: PretrainedModel({"model_type": "roberta", **BERT}, "masked_lm"),
    "bert": lambda: PretrainedModel({"model_type": "bert", **BERT, "pad_token_id": 1}, "masked_lm"),
    "llama": lambda: PretrainedModel({**LLAMA, "pad_token_id": 1}, "causal_lm"),
    "bart": lambda: PretrainedModel(BART, "conditional_generation"),
}
WITHOUT = {
    "no padding": lambda: CausalLM(V, **SIZES, embedding_options={"padding_id": None}),
    "classes": lambda: TextClassifier(V, 3, **SIZES, **OWN),
    "llama": lambda: PretrainedModel(LLAMA, "causal_lm"),
    "llama that ends with padding": lambda: PretrainedModel({**LLAMA, "pad_token_id": 5}, "causal_lm"),
    "labels of tokens": lambda: PretrainedModel({"model_type": "roberta", **BERT}, "token_classification"),
}


@pytest.mark.parametrize("name", WITH_1)
def test_another_padding_id_is_named_at_the_caller(name):
    model = WITH_1[name]()
    message = (
        "^Losses and metrics should have the padding id of the model, .* Received: a model with the padding id 1, and "
        r"PaddedCrossentropy\(padding_id=0\). Write `PaddedCrossentropy\(padding_id=1\)` if 1 is the tokenizer's "
        "`pad_id`, or `padding_id=-100` if labels are padded with -100. If an id that no token has pads the "
        "labels, ignore this warning$"
    )
    with pytest.warns(UserWarning, match=message) as found:
        model.compile("adam", PaddedCrossentropy())
    assert len(found) == 1 and found[0].filename == __file__
    for padding_id in (1, -100, -1):
        model.compile(
            "adam", PaddedCrossentropy(padding_id=padding_id), metrics=[PaddedAccuracy(padding_id=padding_id)]
        )


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_a_padding_id_of_labels_are_left_alone(name):
    WITHOUT[name]().compile("adam", PaddedCrossentropy(padding_id=3), metrics=[PaddedAccuracy()])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loss": [PaddedCrossentropy(padding_id=3)]}, "PaddedCrossentropy(padding_id=3)"),
        ({"loss": "mse", "metrics": [PaddedAccuracy()]}, "PaddedAccuracy(padding_id=0)"),
        ({"loss": "mse", "weighted_metrics": [[Perplexity(padding_id=2)]]}, "Perplexity(padding_id=2)"),
        (
            {"loss": {"logits": PaddedCrossentropy()}, "metrics": {"logits": [PaddedAccuracy(), "mse"]}},
            "PaddedCrossentropy(padding_id=0), PaddedAccuracy(padding_id=0)",
        ),
    ],
)
def test_losses_and_metrics_in_any_structure(arguments, named):
    with pytest.warns(UserWarning, match=re.escape(f"padding id 1, and {named}. Write `")) as found:
        WITH_1["roberta"]().compile("adam", **arguments)
    assert len(found) == 1


def test_a_saved_model_is_not_warned_of_again(tmp_path):
    model = WITH_1["masked"]()
    with pytest.warns(UserWarning, match="padding id 1"):
        model.compile("adam", PaddedCrossentropy())
    model.fit(np.array([[3, 5, 1]]), np.array([[4, 0, 0]]), verbose=0)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not [one for one in found if "padding id" in str(one.message)] and loaded.loss.padding_id == 0
