"""Checkpoints that are damaged or made to harm are refused by name, before anything large is made."""

import json
import os
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from keras_tx import pretrained, serving
from keras_tx.internals import keras_models
from keras_tx.pretrained import PretrainedModel, generation_config, headers, variable_loader
from keras_tx.pretrained.config import LARGEST, MOST_LABELS
from keras_tx.pretrained.files import write_tensors
from keras_tx.pretrained.registry import read_family
from tests.pretrained.test_strictness import arrays_of, with_config, with_tensors
from tests.pretrained.tiny import assert_equals_reference, checkpoint, copied, inputs_of, loaded
from tests.tools import to_numpy

BIAS = "bert.encoder.layer.1.output.dense.bias"


def assert_a_good_checkpoint_loads(name="bert"):
    model = pretrained.from_pretrained(checkpoint(name))
    assert_equals_reference(model(inputs_of(name, model)), name)


# Numbers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_nan_and_infinity_are_counted_and_refused(tmp_path, dtype):
    def change(arrays):
        array = arrays[BIAS].astype(getattr(ml_dtypes, dtype, dtype))
        array[[3, 5, 30]] = np.nan, -np.inf, np.inf
        arrays[BIAS] = array

    folder = with_tensors("bert", tmp_path, change)
    message = (
        f"Every number of the tensor '{BIAS}' must be finite. Received: 3 of 32 are not, 1 of them NaN, as {dtype}"
    )
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained(folder)
    assert_a_good_checkpoint_loads()


@pytest.mark.parametrize(
    ("stored", "policy", "largest", "dtype"),
    [
        ("float64", "float32", 1e39, "float32"),
        ("float32", "float16", 65520, "float16"),
        ("float32", "bfloat16", 3.4e38, "bfloat16"),
    ],
)
def test_numbers_that_become_infinite_are_refused(tmp_path, stored, policy, largest, dtype):
    def change(arrays):
        arrays[BIAS] = arrays[BIAS].astype(stored)
        arrays[BIAS][7] = largest

    folder = with_tensors("bert", tmp_path, change)
    with pytest.raises(
        ValueError, match=f"'{BIAS}' must be finite. Received: 1 of 32 are not, 0 of them NaN, as {dtype}"
    ):
        pretrained.from_pretrained(folder, dtype=policy)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_check_of_numbers_agrees_with_numpy_and_takes_no_memory(dtype, monkeypatch):
    monkeypatch.setattr(variable_loader, "_PIECE", 2**10)
    kind, generator = np.dtype(getattr(ml_dtypes, dtype, dtype)), np.random.default_rng(0)
    bits = generator.integers(0, 256, (20, 700 * kind.itemsize), "uint8").view(kind)  # every kind of number
    for row in bits:
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            wide = row.astype("float64")
        nans, wrong = np.isnan(wide).sum(), (~np.isfinite(wide)).sum()
        if wrong:
            with pytest.raises(ValueError, match=f"Received: {wrong} of 700 are not, {nans} of them NaN, as {dtype}"):
                variable_loader.check_finite("a", row)
    array = np.full((2**10, 2**8), ml_dtypes.finfo(kind).max, kind)
    array[::2] = -array[::2]
    tracemalloc.start()
    try:
        variable_loader.check_finite("a", array)
        variable_loader.check_finite("a", array[:, :0])
        assert tracemalloc.get_traced_memory()[1] < 2**15
    finally:
        tracemalloc.stop()


# Sizes


SIZES = {
    "bart": "vocab_size d_model encoder_ffn_dim decoder_attention_heads max_position_embeddings",
    "bert": "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings type_vocab_size",
    "distilbert": "vocab_size dim hidden_dim n_heads max_position_embeddings",
    "electra": "embedding_size",
    "gpt2": "vocab_size n_embd n_head n_positions n_inner",
    "llama": "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim",
    "modernbert": "vocab_size hidden_size intermediate_size local_attention",
    "t5": "vocab_size d_model d_kv d_ff num_heads relative_attention_num_buckets",
    "vit": "hidden_size image_size num_channels patch_size",
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_beyond_the_file_is_refused_before_anything_is_made(name, tmp_path, monkeypatch):
    def initialize():
        raise AssertionError("variables of sizes that the file has not")

    folder, begun = copied(name, tmp_path), time.monotonic()
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(keras_models, "_initialize_all_variables", initialize)
    for index, key in enumerate(SIZES[name].split()):
        value = 10**18 if key == "local_attention" else (10**6, LARGEST + 1)[index % 2]
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ValueError, match=f"`{key}`.* Received: .*{key}={value}"):
            pretrained.from_pretrained(folder)
    # A size that is only another one is found out by the shapes of the tensors.
    key = SIZES[name].split()[0]
    (folder / "config.json").write_text(json.dumps({**config, key: config[key] // 2}))
    with pytest.raises(
        ValueError, match=r"' must have the shape \(.* Received: \(|must fit|must be divisible|an id of"
    ):
        pretrained.from_pretrained(folder)
    assert time.monotonic() - begun < 10
    if name == "bert":
        monkeypatch.undo()
        assert_a_good_checkpoint_loads()


@pytest.mark.parametrize("wrong", [None, 5, b"bert"])
def test_what_is_no_path_is_refused(wrong):
    with pytest.raises(TypeError, match="The argument `path` must be a path, a `str` or `Path`. Received: path="):
        pretrained.from_pretrained(wrong)
    with pytest.raises(TypeError, match="The argument `path` must be a path, a `str` or `Path`. Received: path="):
        serving.export(None, wrong)


def test_layers_without_tensors_are_refused(tmp_path):
    for layers in (10**9, len(arrays_of("bert"))):
        folder = with_config("bert", tmp_path / str(layers), num_hidden_layers=layers)
        with pytest.raises(ValueError, match=f"`num_hidden_layers` .* at most .* Received: num_hidden_layers={layers}"):
            pretrained.from_pretrained(folder)


def test_a_variable_that_cannot_be_made_leaves_keras_as_it_was(monkeypatch):
    """As in a process whose memory is full."""

    def full(*args, **options):
        raise MemoryError("no memory")

    monkeypatch.setattr(variable_loader, "_tensor", full)
    monkeypatch.setattr(variable_loader.ops, "zeros", full)
    with pytest.raises(MemoryError, match="no memory"):
        pretrained.from_pretrained(checkpoint("bert"))
    monkeypatch.undo()
    assert_a_good_checkpoint_loads()


def test_a_number_of_labels_beyond_reason_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=f"`num_labels` must be at most {MOST_LABELS}. Received: num_labels=1000000000"
    ):
        pretrained.from_pretrained(checkpoint("bert_cls"), num_labels=10**9)
    folder = with_config("bert_cls", tmp_path, id2label=None, num_labels=10**9)
    with pytest.raises(
        ValueError, match="`num_labels` in config.json must be at most .* Received: num_labels=1000000000"
    ):
        pretrained.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "modernbert",
            {"local_attention": 10**18},
            f"`local_attention` .* positive integer, at most {LARGEST}. .*=10{17 * '0'}",
        ),
        ("mistral", {"sliding_window": 10**18}, f"`sliding_window` .* positive integer, at most {LARGEST}. Received: "),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1},
            "`max_window_layers` .* non-negative integer",
        ),
        (
            "qwen2",
            {"layer_types": [["full_attention"], 3]},
            "`layer_types` in config.json must be 2 of 'full_attention' ",
        ),
        (
            "roberta",
            {"pad_token_id": -1},
            "`pad_token_id` .* position before the last .*=-1, max_position_embeddings=42",
        ),
        ("roberta", {"pad_token_id": 41}, "`pad_token_id` .* must be a position before the last one. Received: .*=41"),
        ("bart", {"decoder_start_token_id": 10**6}, "`decoder_start_token_id` .* an id of the vocabulary. .*=1000000"),
        (
            "bart",
            {"eos_token_id": "x"},
            "`eos_token_id` in config.json must be an integer of 32 bits. Received: .*='x'",
        ),
        ("bert", {"pad_token_id": 2**40}, "`pad_token_id` .* an integer of 32 bits. Received: .*=1099511627776"),
        ("bert", {"tie_word_embeddings": "false"}, "`tie_word_embeddings` .* must be true or false. .*='false'"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "x"}},
            "`rope_param.*positive int",
        ),
        (
            "llama",
            {"original_max_position_embeddings": 0, "rope_scaling": {"type": "yarn"}},
            "must be a positive integer",
        ),
    ],
)
def test_values_that_would_overflow_or_be_misread_are_refused(name, values, message):
    config = loaded(name).config
    config = {**config, "rope_parameters": None} if "rope_scaling" in values else config
    with pytest.raises(ValueError, match=message):
        read_family({**config, **values})


def test_a_window_of_any_allowed_width_is_none(tmp_path):
    """The positions beside the largest windows do not overflow."""
    ids = np.array([[5, 7, 11, 13, 17, 19, 23]], "int32")
    found = []
    for width in (100, LARGEST):
        model = pretrained.from_pretrained(with_config("mistral", tmp_path / str(width), sliding_window=width))
        found.append(to_numpy(model(ids)["logits"]))
    np.testing.assert_array_equal(*found)


# JSON


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("depth", [150, 100_000])
def test_deep_json_is_refused(tmp_path, name, depth):
    folder = copied("gpt2", tmp_path)
    if "index" in name:
        write_tensors(folder, arrays_of("gpt2").items(), max_shard_bytes=20_000)
    content = json.loads((folder / name).read_text())
    text = json.dumps({**content, "deep": 0}).replace('"deep": 0', '"deep": ' + "[" * depth + "]" * depth)
    (folder / name).write_text(text)
    message = f"{name} must be a JSON object in UTF-8. Received: values nested more than 100 levels deep"
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_of_a_gigabyte_is_refused(tmp_path, name):
    folder = copied("gpt2", tmp_path)
    os.truncate(folder / name, 2**30)  # a file of holes, which takes no space
    with pytest.raises(ValueError, match=f"{name} must have at most 100000000 bytes. Received: 1073741824 bytes"):
        pretrained.from_pretrained(folder)


# generation_config.json

WRONG = [
    ({"num_beams": -3}, "`num_beams` in .* must be a positive integer, at most 2147483647. Received: num_beams=-3"),
    ({"num_beams": "4"}, "`num_beams` in .* must be a positive integer.* Received: num_beams='4'"),
    ({"num_beams": True}, "`num_beams` in .* must be a positive integer.* Received: num_beams=True"),
    ({"num_return_sequences": 0}, "`num_return_sequences` in .* must be a positive integer.*=0"),
    ({"do_sample": "yes"}, "`do_sample` in .* must be true or false. Received: do_sample='yes'"),
    ({"early_stopping": "always"}, "`early_stopping` in .* must be true, false or 'never'. .*='always'"),
    ({"length_penalty": "1"}, "`length_penalty` in .* must be a finite number. Received: length_penalty='1'"),
    ({"temperature": -0.5}, "`temperature` in .* must be a non-negative number. Received: temperature=-0.5"),
    ({"temperature": 0, "do_sample": True}, "`temperature` in .* must be a positive number, with `do_sample`. .*=0"),
    ({"top_p": 0.0, "do_sample": True}, "`top_p` in .* must be a positive number, with `do_sample`. .*=0.0"),
    ({"top_k": -1}, "`top_k` in .* must be a non-negative integer, at most .* Received: top_k=-1"),
    ({"top_p": 1.5}, "`top_p` in .* must be a number from 0 to 1. Received: top_p=1.5"),
    ({"min_p": [0.5]}, r"`min_p` in .* must be a number from 0 to 1. Received: min_p=\[0.5\]"),
    ({"typical_p": "1"}, "`typical_p` in .* must be a number from 0 to 1. Received: typical_p='1'"),
    ({"epsilon_cutoff": 2}, "`epsilon_cutoff` in .* must be a number from 0 to 1. Received: epsilon_cutoff=2"),
    ({"eta_cutoff": -1}, "`eta_cutoff` in .* must be a number from 0 to 1. Received: eta_cutoff=-1"),
    (
        {"max_length": "x"},
        "`max_length` in .* must be a positive integer, at most 2147483647. Received: max_length='x'",
    ),
    ({"max_new_tokens": 10**12}, "`max_new_tokens` in .* must be a positive integer.*=1000000000000"),
    ({"min_length": -1}, "`min_length` in .* must be a non-negative integer.* Received: min_length=-1"),
    ({"min_new_tokens": 1.5}, "`min_new_tokens` in .* must be a non-negative integer.* Received: min_new_tokens=1.5"),
    ({"repetition_penalty": 0}, "`repetition_penalty` in .* must be a positive number. Received: repetition_penalty=0"),
    ({"no_repeat_ngram_size": "3"}, "`no_repeat_ngram_size` in .* must be a non-negative integer.*='3'"),
    ({"renormalize_logits": 1}, "`renormalize_logits` in .* must be true or false. Received: renormalize_logits=1"),
    ({"eos_token_id": "x"}, "`eos_token_id` in .* must be an id or a list of ids. Received: eos_token_id='x'"),
    ({"eos_token_id": []}, r"`eos_token_id` in .* must be an id or a list of ids. Received: eos_token_id=\[\]"),
    ({"pad_token_id": [0]}, r"`pad_token_id` in .* must be an id, an integer of 32 bits. Received: pad_token_id=\[0\]"),
    ({"bos_token_id": 2**31}, "`bos_token_id` in .* must be an id, an integer of 32 bits. Received: .*=2147483648"),
    ({"decoder_start_token_id": {}}, "`decoder_start_token_id` in .* must be an id, .* Received: .*={}"),
    ({"forced_bos_token_id": -2}, "`forced_bos_token_id` in .* must be a non-negative integer.*=-2"),
    ({"forced_eos_token_id": [1, "x"]}, r"`forced_eos_token_id` in .* a non-negative id or a list of .*=\[1, 'x'\]"),
    ({"force_bos_token_to_be_generated": 0}, "`force_bos_token_to_be_generated` in .* must be true or false. .*=0"),
    ({"bad_words_ids": 5}, "`bad_words_ids` in .* must be a list of lists of non-negative ids. Received: .*=5"),
    ({"bad_words_ids": [[5], []]}, r"`bad_words_ids` in .* a list of lists of .* Received: .*=\[\[5\], \[\]\]"),
    ({"suppress_tokens": [-1]}, r"`suppress_tokens` in .* must be a list of non-negative ids. .*=\[-1\]"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_a_setting_of_generation_is_refused_with_its_file(values, message):
    with pytest.raises(ValueError, match=message) as error:
        generation_config.check(values, "a/generation_config.json")
    assert "a/generation_config.json" in str(error.value)
    generation_config.check(dict.fromkeys(values), "a/generation_config.json")  # null is like a missing key


def test_every_setting_that_is_used_has_a_rule():
    """A dict that tells which keys are read shows that none is read without a rule."""

    class Told(dict):
        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

    read = set()
    for name in ("gpt2", "bart"):
        family = loaded(name).family
        for values in ({"do_sample": True}, {"do_sample": False, "num_beams": 3, "length_penalty": 1.0}):
            told = Told(values)
            family.strategy(told), family.generation_options(told), family.max_length(told, 7)
    assert {"num_beams", "eos_token_id", "bad_words_ids", "max_length"} <= read
    assert read - set(generation_config._UNSUPPORTED) <= set(generation_config._RULES)
    assert {key for values, _ in WRONG for key in values} == set(generation_config._RULES)


def test_settings_of_generation_are_checked_when_they_are_read_and_again_when_they_are_changed(tmp_path):
    folder = copied("gpt2", tmp_path)
    path = folder / "generation_config.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps({**good, "num_beams": -3}))
    with pytest.raises(ValueError, match=f"`num_beams` in {path} must be a positive integer.* Received: num_beams=-3"):
        pretrained.from_pretrained(folder)
    with pytest.raises(ValueError, match="`num_beams` in generation_config.json must be .* Received: num_beams='4'"):
        PretrainedModel(loaded("gpt2").config, generation_config={"num_beams": "4"})
    path.unlink()  # older checkpoints have the settings in config.json
    config = loaded("gpt2").config
    (folder / "config.json").write_text(json.dumps({**config, "max_length": "x"}))
    with pytest.raises(ValueError, match="`max_length` in config.json must be .* Received: max_length='x'"):
        pretrained.from_pretrained(folder)
    assert pretrained.from_pretrained(folder, task="base").task == "base"  # generates nothing
    model = loaded("gpt2")
    kept = model.generation_config
    try:
        model.generation_config = {"bad_words_ids": 5}
        with pytest.raises(ValueError, match="`bad_words_ids` in generation_config.json must be .*=5"):
            model.generate([[5, 7, 11]], max_new_tokens=1)
    finally:
        model.generation_config = kept


def test_a_key_that_is_there_twice_is_found_in_one_pass():
    keys = [*map(str, range(40_000)), "39999"]
    text, begun = "{" + ", ".join(f'"{key}": 1' for key in keys) + "}", time.monotonic()
    with pytest.raises(ValueError, match="Received: the key '39999' twice"):
        headers.json_object("config.json", text.encode())
    assert time.monotonic() - begun < 3  # comparing all pairs of keys takes many seconds
