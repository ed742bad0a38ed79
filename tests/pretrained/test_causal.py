"""GPT-2, Llama, Mistral, Qwen2 and Qwen3 against transformers: every option that a config can have, and generation."""

import json
import re

import numpy as np
import pytest
import transformers
from keras import ops

from keras_tx import pretrained
from keras_tx.generation import Beam, Greedy, Sample
from keras_tx.pretrained.families.causal import LastToken
from keras_tx.pretrained.files import open_tensors
from tests.pretrained import torch_models
from tests.pretrained.tiny import checkpoint, loaded, reference
from tests.tools import assert_close, normal

SIZES = {
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
GPT2 = {
    "vocab_size": 23,
    "n_embd": 12,
    "n_layer": 3,
    "n_head": 3,
    "n_positions": 13,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4}
FULL, SLIDING = "full_attention", "sliding_attention"


def edited(directory, *, without=(), **keys):
    """Changes the config.json of a directory."""
    path = directory / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
    path.write_text(json.dumps({**config, **keys}))


# Every option of the configs


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "rms_norm_eps": 1e-2}),
        ("LlamaForCausalLM", {"num_key_value_heads": None, "hidden_act": "gelu", "tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
        ("LlamaForCausalLM", {"rope_parameters": YARN}),
        ("LlamaForCausalLM", {"rope_parameters": {**YARN, "factor": None}}),
        (
            "LlamaForCausalLM",
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
                "max_position_embeddings": 5,
            },
        ),
        ("MistralForCausalLM", {"sliding_window": 3}),
        ("MistralForCausalLM", {"sliding_window": None, "head_dim": 6}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}),
        ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True, "rms_norm_eps": 1e-2}),
        (
            "Qwen3ForCausalLM",
            {"head_dim": 4, "use_sliding_window": True, "sliding_window": 2, "layer_types": [SLIDING, FULL]},
        ),
    ],
)
def test_the_llama_kind_equals_transformers(tmp_path, name, config):
    theirs = torch_models.make(tmp_path, name, **{**SIZES, **config})
    pretrained.save_pretrained(torch_models.check(tmp_path, theirs), tmp_path / "again")
    torch_models.check(tmp_path / "again", theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 17, "activation_function": "gelu"},
        {"scale_attn_weights": False, "layer_norm_epsilon": 1e-2, "reorder_and_upcast_attn": True},
        {"tie_word_embeddings": False, "activation_function": "silu"},
    ],
)
def test_gpt2_equals_transformers(tmp_path, config):
    torch_models.check(tmp_path, torch_models.make(tmp_path, "GPT2LMHeadModel", **{**GPT2, **config}))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"])
@pytest.mark.parametrize(("name", "sizes"), [("GPT2", GPT2), ("Mistral", SIZES), ("Llama", SIZES), ("Qwen2", SIZES)])
def test_the_heads_equal_those_of_transformers(tmp_path, name, sizes, head):
    labels = {} if head == "ForQuestionAnswering" else {"num_labels": 5}
    theirs = torch_models.make(tmp_path, f"{name}{head}", **sizes, **labels)
    model = torch_models.check(tmp_path, theirs)
    pretrained.save_pretrained(model, tmp_path / "again")
    _, report = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
    assert {*open_tensors(tmp_path / "again")} == {*open_tensors(tmp_path)}


def test_a_base_model_lends_its_layers_to_a_head_whose_files_have_another_prefix(tmp_path):
    torch_models.make(tmp_path, "LlamaModel", **SIZES)
    with pytest.warns(UserWarning, match="'question_answering'. They have random weights and must be trained: "):
        model = pretrained.from_pretrained(tmp_path, task="question_answering")
    base = pretrained.from_pretrained(tmp_path)
    for part in ("embedding", "decoder"):
        for one, other in zip(*[x.get_layer(part).get_weights() for x in (base, model)], strict=True):
            np.testing.assert_array_equal(one, other)


def test_positions_may_be_given(tmp_path):
    positions = np.random.default_rng(0).integers(0, 12, size=torch_models.IDS.shape).astype("int32")
    for index, (name, sizes) in enumerate((("GPT2LMHeadModel", GPT2), ("LlamaForCausalLM", SIZES))):
        theirs = torch_models.make(tmp_path / str(index), name, **sizes)
        torch_models.check(tmp_path / str(index), theirs, position_ids=positions)


def test_what_a_config_is_silent_about_is_as_in_transformers(tmp_path):
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 64, "sliding_window": 4096}
    sizes["intermediate_size"] = 37
    theirs = torch_models.make(tmp_path, "MistralForCausalLM", **{**SIZES, **sizes, "rope_parameters": None})
    silent = ("num_key_value_heads", "sliding_window", "rope_parameters", "rms_norm_eps", "head_dim", "hidden_act")
    edited(tmp_path, without=silent)
    model = torch_models.check(tmp_path, theirs)
    assert model.family.decoder.layers[0].self_attention.sliding_window == 4096


LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("scaling", [None, LINEAR, {**LINEAR, "original_max_position_embeddings": 8}])
def test_rotary_parameters_in_the_words_of_version_4_are_read(tmp_path, scaling):
    parameters = {"rope_theta": 50.0, **({"rope_type": "linear", "factor": 2.0} if scaling else {})}
    theirs = torch_models.make(tmp_path, "LlamaForCausalLM", **{**SIZES, "rope_parameters": parameters})
    edited(tmp_path, without=["rope_parameters"], rope_theta=50.0, rope_scaling=scaling)
    torch_models.check(tmp_path, theirs)


def test_what_a_tokenizer_of_transformers_returns_is_a_dict():
    model = loaded("gpt2")
    x = {"input_ids": np.array([[9, 9, 5, 7], [3, 8, 6, 4]]), "attention_mask": np.array([[0, 0, 1, 1], [1, 1, 1, 1]])}
    encoded, options = transformers.BatchEncoding(x), {"max_new_tokens": 3, "jit_compile": False}
    assert_close(model(encoded)["logits"], model(x)["logits"], atol=0)
    np.testing.assert_array_equal(model.generate(encoded, **options), model.generate(x, **options))
    for one, two in zip(model.stream(encoded, **options), model.stream(x, **options), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_last_token_is_the_last_that_is_not_padding():
    x, ids = normal(3, 5, 7), np.array([[4, 1, 6, 1, 1], [1, 1, 5, 8, 9], [1, 1, 1, 1, 1]])
    real = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    assert_close(LastToken(1)(x, ids, real), np.stack([x[0, 2], x[1, 4], x[2, 0]]))
    assert_close(LastToken()(x, ids, real), np.stack([x[0, 3], x[1, 4], x[2, 1]]))
    assert LastToken.from_config(LastToken(3).get_config()).padding_id == 3


# What is refused


@pytest.mark.parametrize(
    ("name", "keys", "text"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "longrope"}}, "`rope_type` .* one of .*=.longrope."),
        ("LlamaForCausalLM", {"rope_parameters": 3}, "`rope_parameters` .* must be a dict. Received: .*=3"),
        ("LlamaForCausalLM", {"rope_parameters": {"factor": 2.0}}, "`rope_parameters` .* 'factor': 2.0"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` .*0.5"),
        ("LlamaForCausalLM", {"attention_bias": "some"}, "`attention_bias` .*'some'"),
        ("LlamaForCausalLM", {"mlp_bias": 3}, "`mlp_bias` .*3"),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}, "num_attention_heads=6, num_key_value_heads=4"),
        ("LlamaForCausalLM", {"hidden_size": 25, "head_dim": None}, "hidden_size=25, num_attention_heads=6"),
        ("LlamaForCausalLM", {"add_cross_attention": True}, "`add_cross_attention` .*True"),
        ("MistralForCausalLM", {"attention_bias": True}, "`attention_bias` .*True"),
        ("MistralForCausalLM", {"mlp_bias": True}, "`mlp_bias` .*True"),
        ("MistralForCausalLM", {"layer_types": [FULL, SLIDING]}, "`layer_types` .*full_attention"),
        ("Qwen2ForCausalLM", {"mlp_bias": True}, "`mlp_bias` .*True"),
        ("Qwen2ForCausalLM", {"layer_types": [FULL]}, r"`layer_types` .* must be 2 of .*=\['full_attention'\]"),
        ("Qwen2ForCausalLM", {"layer_types": [FULL, "chunked"]}, "`layer_types` .* must be 2 of .*'chunked'"),
        ("Qwen2ForCausalLM", {"layer_types": [FULL, SLIDING]}, "must not have 'sliding_attention' without"),
        ("GPT2LMHeadModel", {"n_embd": 13}, "n_embd=13, n_head=3"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused_by_name(name, keys, text):
    model_type = re.match("[A-Z0-9][a-z]*(PT2|[0-9])?", name)[0].lower()
    config = {"architectures": [name], "model_type": model_type, **(GPT2 if "GPT2" in name else SIZES), **keys}
    with pytest.raises(ValueError, match=text):
        pretrained.PretrainedModel(config)


# Generation


def made(config=None, **generation_config):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **(config or {})}
    return pretrained.PretrainedModel(config, generation_config=generation_config)


def test_the_generation_config_says_how_to_write():
    family = made().family
    values = {"eos_token_id": [2, 5], "max_new_tokens": 7, "max_length": 99, "bad_words_ids": [[3], [4, 6]]}
    options = family.generation_options({**values, "repetition_penalty": 1.3, "bos_token_id": 0})
    assert options["stop_tokens"] == (2, 5) and options["max_new_tokens"] == 7
    assert options["forbidden_tokens"] == [[3], [4, 6]] and options["repetition_penalty"] == 1.3
    assert "start_token" not in options
    assert family.generation_options({})["stop_tokens"] == (2,)  # of config.json


def test_the_strategy_is_that_of_the_generation_config():
    family = made().family
    assert family.strategy({}) is None or family.strategy({}) == Greedy()
    assert family.strategy({"num_beams": 3, "length_penalty": 0.5}) == Beam(3, length_penalty=0.5)
    assert family.strategy({"do_sample": True, "temperature": 0.7, "top_p": 0.9}) == Sample(0.7, top_k=50, top_p=0.9)
    assert family.strategy({"do_sample": True, "top_k": 0, "min_p": 0.1}) == Sample(min_p=0.1)


@pytest.mark.parametrize(("name", "value"), [("num_beams", 3), ("typical_p", 0.9), ("eta_cutoff", 1e-3)])
def test_sampling_that_is_not_supported_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of the generation config .* Received: {name}={value}"):
        made().family.strategy({"do_sample": True, name: value})


def test_a_padding_id_that_also_ends_a_text_is_a_token_of_a_prompt():
    assert made().family.padding_id == 1
    assert made({"pad_token_id": 2}).family.padding_id is None
    assert made({"pad_token_id": 2, "eos_token_id": [3, 2]}).family.padding_id is None
    assert made({"pad_token_id": 23}).family.padding_id is None  # outside the vocabulary
    assert made({"pad_token_id": None}).family.padding_id is None


def test_a_model_without_a_vocabulary_to_write_does_not_write():
    config = {"architectures": ["LlamaForTokenClassification"], "model_type": "llama", **SIZES}
    with pytest.raises(ValueError, match="token_classification"):
        pretrained.PretrainedModel(config).generate([[3]], max_new_tokens=2)


@pytest.mark.parametrize("name", ["gpt2_inner", "mistral", "qwen3"])
def test_prompts_of_different_lengths_are_continued_as_by_transformers(name):
    arrays, model = reference(name), pretrained.from_pretrained(checkpoint(name))
    real = arrays["lp_attention_mask"] == 1
    prompts = [row[mask].tolist() for row, mask in zip(arrays["lp_input_ids"], real, strict=True)]
    answers = model.generate(prompts, max_new_tokens=14, jit_compile=False)
    stop = model.config["eos_token_id"]
    for prompt, answer, row in zip(prompts, answers, arrays["greedy_ids"], strict=True):
        new = row[real.shape[1] :].tolist()
        assert answer == prompt + (new[: new.index(stop) + 1] if stop in new else new)


def continued(theirs, ids, mask=None):
    """What transformers generates; without a mask it finds the padding by its id."""
    import torch

    with torch.device("cpu"):
        mask = {} if mask is None else {"attention_mask": torch.tensor(mask)}
        return theirs.generate(torch.tensor(ids), **mask).numpy()


@pytest.mark.parametrize(("name", "sizes"), [("LlamaForCausalLM", SIZES), ("GPT2LMHeadModel", GPT2)])
def test_with_a_mask_the_padding_id_may_be_a_token_of_a_prompt(tmp_path, name, sizes):
    theirs = torch_models.make(tmp_path, name, **sizes)
    theirs.generation_config.max_new_tokens = 6
    model = pretrained.from_pretrained(tmp_path)
    ids = np.array([[13, 4, 1, 1, 5, 9], [1, 1, 1, 6, 1, 4]])
    mask = np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    found = model.generate(inputs, max_new_tokens=6, jit_compile=False)
    np.testing.assert_array_equal(found, continued(theirs, ids, mask))
    without = model.generate(ids, max_new_tokens=6, jit_compile=False)
    np.testing.assert_array_equal(without, continued(theirs, ids))
    assert (without != found).any()
    for given, expected in ((inputs, found), (ids, without)):
        pieces = np.stack([*model.stream(given, max_new_tokens=6, jit_compile=False)], axis=1)
        for new, row in zip(pieces, expected[:, 6:], strict=True):
            end = 1 + row.tolist().index(2) if 2 in row else 6  # rows that have ended are filled with other ids
            assert new[:end].tolist() == row[:end].tolist()


@pytest.mark.parametrize("extra", ["bogus", "decoder_attention_mask"])
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_unknown_names_of_inputs_are_refused(method, extra):
    rule = r"The keys of `inputs` must be among \['input_ids'\], or be masks of the inputs given."
    message = rf"{rule} Received: \['input_ids', '{extra}'\]"
    with pytest.raises(ValueError, match=message):
        getattr(made(), method)({"input_ids": [[5, 7]], extra: np.ones((1, 2))}, max_new_tokens=2)


@pytest.mark.parametrize(("name", "sizes"), [("LlamaForCausalLM", SIZES), ("GPT2LMHeadModel", GPT2)])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("written", [{}, {"max_length": 20}, {"max_length": 11}, {"max_new_tokens": 5}])
def test_without_max_new_tokens_lengths_are_those_of_transformers(tmp_path, name, sizes, written):
    """20 new tokens by default, but no more than the positions of the config; `max_length` counts the prompt, too."""
    several = {"max_position_embeddings": 27} if name.startswith("Llama") else {"n_positions": 27}
    theirs = torch_models.make(tmp_path, name, **{**sizes, **several})
    for key, value in written.items():
        setattr(theirs.generation_config, key, value)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.save_pretrained(tmp_path)
    model = pretrained.from_pretrained(tmp_path)
    for length in (3, 10):
        ids = np.arange(3, 3 + length)[None]
        found = model.generate(ids, jit_compile=False)
        np.testing.assert_array_equal(found, continued(theirs, ids))


@pytest.mark.parametrize(("written", "filler"), [({"pad_token_id": None}, 9), ({"pad_token_id": 4}, 4)])
def test_generated_rows_are_filled_as_the_generation_config_says(tmp_path, written, filler):
    """Without a padding id there, transformers takes the first end token, whatever config.json says."""
    theirs = torch_models.make(tmp_path, "LlamaForCausalLM", **SIZES)
    settings = {"eos_token_id": [9, 17, 10], "max_new_tokens": 6, **written}
    for key, value in settings.items():
        setattr(theirs.generation_config, key, value)
    theirs.generation_config.save_pretrained(tmp_path)
    ids = np.array([[5, 6, 3], [7, 8, 4], [11, 2, 12], [3, 9, 10], [4, 13, 6]])
    found = pretrained.from_pretrained(tmp_path).generate(ids, jit_compile=False)
    np.testing.assert_array_equal(found, continued(theirs, ids, np.ones_like(ids)))
    assert (found[:, -1] == filler).any() and (found[:, -1] != filler).any()
    assert made()._padding_id() == 1  # of config.json, where there is no other


@pytest.mark.usefixtures("eager")
def test_prompts_may_be_tensors_in_a_list_and_arrays_of_objects():
    model, options = loaded("gpt2"), {"max_new_tokens": 3, "jit_compile": False}
    rows = [[5, 7], [6, 8, 9]]
    expected = model.generate(rows, **options)
    tensors = [ops.convert_to_tensor(np.array(row, "int32")) for row in rows]
    objects = np.empty(2, object)
    objects[:] = [np.array(row) for row in rows]
    for given in (tensors, objects):
        assert model.generate(given, **options) == expected
    limited = {"jit_compile": False}
    assert model.generate(tensors, **limited) == model.generate(rows, **limited)
