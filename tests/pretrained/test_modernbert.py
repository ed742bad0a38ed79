"""ModernBERT against transformers: every option that its config can have, in the spellings of versions 4 and 5."""

import json

import pytest

from keras_tx import pretrained
from tests.pretrained import torch_models

SIZES = {
    "vocab_size": 23,
    "hidden_size": 12,
    "intermediate_size": 17,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "local_attention": 4,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def edited(directory, *, without, **keys):
    path = directory / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps({**config, **keys}))


@pytest.mark.parametrize(
    "config",
    [
        {"local_attention": 7, "norm_bias": True, "mlp_bias": True, "decoder_bias": False, "norm_eps": 1e-2},
        {
            "attention_bias": True,
            "classifier_bias": True,
            "classifier_activation": "relu",
            "tie_word_embeddings": False,
        },
        {"layer_types": [SLIDING, FULL, SLIDING], "local_attention": 2, "hidden_activation": "silu"},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
                SLIDING: {"rope_type": "default", "rope_theta": 20.0},
            }
        },
    ],
)
def test_modernbert_equals_transformers(tmp_path, config):
    theirs = torch_models.make(tmp_path, "ModernBertForMaskedLM", **{**SIZES, **config})
    model = torch_models.check(tmp_path, theirs)
    first = model.family.encoder.layers[0]
    assert first.self_attention_norm is None and model.family.encoder.layers[1].self_attention_norm is not None


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_sentence_is_classified_as_in_transformers(tmp_path, pooling):
    name, config = "ModernBertForSequenceClassification", {"num_labels": 5, "classifier_pooling": pooling}
    torch_models.check(tmp_path, torch_models.make(tmp_path, name, **SIZES, **config))


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering"])
def test_the_heads_of_tokens_equal_those_of_transformers(tmp_path, head):
    labels = {} if head == "ForQuestionAnswering" else {"num_labels": 5}
    torch_models.check(tmp_path, torch_models.make(tmp_path, f"ModernBert{head}", **SIZES, **labels))


def test_the_words_of_version_4_are_read(tmp_path):
    bases = {FULL: {"rope_type": "default", "rope_theta": 300.0}, SLIDING: {"rope_type": "default", "rope_theta": 20.0}}
    types = {"layer_types": [FULL, SLIDING, FULL], "rope_parameters": bases}
    theirs = torch_models.make(tmp_path, "ModernBertForMaskedLM", **SIZES, **types)
    words = {"global_attn_every_n_layers": 2, "global_rope_theta": 300.0, "local_rope_theta": 20.0}
    edited(tmp_path, without=types, **words, position_embedding_type="absolute")
    torch_models.check(tmp_path, theirs)


@pytest.mark.parametrize("removed", [(), ("rope_parameters",)])
def test_the_scaling_of_version_4_has_the_effect_that_it_has_in_transformers(tmp_path, removed):
    import torch
    import transformers

    torch_models.make(tmp_path, "ModernBertModel", **SIZES)
    edited(tmp_path, without=removed, rope_scaling={"rope_type": "linear", "factor": 2.0})
    theirs = transformers.ModernBertModel.from_pretrained(tmp_path, dtype=torch.float32).eval().double()
    torch_models.check(tmp_path, theirs)
    # transformers does not read a "type" here, and so scales nothing.
    edited(tmp_path, without=(), rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="`rope_parameters` in config.json cannot be used: .*'default'"):
        pretrained.from_pretrained(tmp_path)


def test_it_is_written_in_the_words_of_both_versions(tmp_path):
    import transformers

    theirs = torch_models.make(tmp_path, "ModernBertModel", **SIZES)
    model = torch_models.check(tmp_path, theirs)
    pretrained.save_pretrained(model, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["global_rope_theta"] == 160000.0 and config["local_rope_theta"] == 10000.0
    again, report = transformers.ModernBertModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch_models.check(tmp_path, again.double())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"layer_types": [FULL]}, r"`layer_types` .* must be 3 of .*=\['full_attention'\]"),
        ({"layer_types": [FULL, FULL, "chunked"]}, "`layer_types` .* must be 3 of .*'chunked'"),
        (
            {"rope_parameters": {"rope_theta": 3.0}},
            "`rope_parameters` .* with the keys .* Received: .*'rope_theta': 3.0",
        ),
        ({"rope_parameters": 3}, "`rope_parameters` .* Received: rope_parameters=3"),
        ({"rope_parameters": {FULL: 3}}, r"`rope_parameters\['full_attention'\]` .* must be a dict. Received: .*=3"),
        ({"rope_scaling": "linear"}, "`rope_scaling` .* must be a dict. Received: rope_scaling='linear'"),
        ({"classifier_pooling": "max"}, "`classifier_pooling` .*'max'"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type` .*'relative_key'"),
        ({"num_attention_heads": 5}, "hidden_size=12, num_attention_heads=5"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused_by_name(keys, text):
    config = {"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", **SIZES, **keys}
    with pytest.raises(ValueError, match=text):
        pretrained.PretrainedModel(config)
