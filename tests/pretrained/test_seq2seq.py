"""T5, BART and Marian: every hidden state, the logits and what is written, as transformers has them."""

import json
import warnings

import keras
import numpy as np
import pytest
import transformers

from keras_tx.generation import Beam, Greedy
from keras_tx.pretrained import PretrainedModel, from_pretrained, generation_config, save_pretrained
from keras_tx.pretrained.families.seq2seq import AtLast, TargetIds
from keras_tx.pretrained.families.t5 import Scale
from keras_tx.pretrained.files import open_tensors, write_tensors
from tests.pretrained import torch_models
from tests.pretrained.tiny import checkpoint, loaded, reference, tolerance
from tests.tools import assert_close, normal, to_numpy


def until(row, stop):
    """The tokens up to the first stop token; behind it transformers pads, with one token or another."""
    row = row.tolist()
    return row[: row.index(stop) + 1] if stop in row else row


@pytest.mark.parametrize("name", ["t5", "t5_v11", "bart", "marian"])
def test_a_row_alone_without_masks_is_that_row(name):
    arrays = reference(name)
    source = arrays["input_ids"][2][arrays["attention_mask"][2] == 1]
    target = arrays["decoder_input_ids"][2][arrays["decoder_attention_mask"][2] == 1]
    logits = loaded(name)({"input_ids": source[None], "decoder_input_ids": target[None]})["logits"]
    assert_close(to_numpy(logits)[0], arrays["logits"][2, : len(target)], atol=tolerance(name), rtol=0)


SETTINGS = {
    "beam4_cnn": (
        {"length_penalty": 2.0, "early_stopping": True},
        {"no_repeat_ngram_size": 3, "min_length": 6, "forced_bos_token_id": 0, "max_length": 16},
    ),
    "beam4_lp06": ({"length_penalty": 0.6, "early_stopping": True}, {"max_new_tokens": 14}),
}


@pytest.mark.parametrize(("name", "setting"), [("bart", "beam4_cnn"), ("marian", "beam4_lp06")])
def test_beams_with_the_settings_of_known_checkpoints_are_those_of_transformers(name, setting):
    model, arrays = loaded(name), reference(name)
    beam, said = SETTINGS[setting]
    options = {**generation_config.generate_options({**model.generation_config, **said}), "jit_compile": False}
    strategy = Beam(4, num_return_sequences=4, **beam)
    written, scores = model.generate(arrays["input_ids"], strategy, return_scores=True, **options)
    stop = model.config["eos_token_id"]
    rows = [until(row, stop) for row in to_numpy(written).reshape(12, -1)]
    assert rows == [until(row[1:], stop) for row in arrays[f"{setting}_ids"]]
    assert_close(np.ravel(scores), arrays[f"{setting}_scores"], atol=1e-4)


def test_older_checkpoints_say_in_the_config_how_they_generate():
    """There is no generation_config.json, and config.json asks for four beams."""
    old, new = from_pretrained(checkpoint("marian_original")), loaded("marian")
    assert not old.generation_config and new.generation_config
    assert old.family.strategy({}) == Beam(4)
    lengths = {"max_new_tokens": 14}
    options = [one.family.generation_options(one.generation_config) | lengths for one in (old, new)]
    assert options[0] == options[1]
    assert old.family.strategy({"num_beams": 1}) == Greedy()


# Small models made here

SMALL = {
    "t5": {"d_model": 10, "d_kv": 3, "d_ff": 14, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2},
    "bart": {
        "d_model": 12,
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 14 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side, heads in (("encoder", 2), ("decoder", 3))},
        "max_position_embeddings": 16,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
    },
}
SMALL["marian"] = {**SMALL["bart"], "decoder_start_token_id": 1, "scale_embedding": True}
IDS = np.array([[5, 6, 7, 2, 1], [8, 9, 10, 11, 2]])
TARGETS = np.array([[2, 12, 13], [2, 14, 15]])


def small(model_type, task="conditional_generation", tied=None, **config):
    values = {"model_type": model_type, "vocab_size": 23, **SMALL[model_type], **config}
    model = PretrainedModel(values, task, tied=tied)
    for weight in model.trainable_weights:
        weight.assign(0.5 * normal(*weight.shape, seed=len(weight.path)) + (weight.path.endswith(("scale", "gamma"))))
    return model


@pytest.mark.parametrize("model_type", ["t5", "bart", "marian"])
def test_padding_changes_nothing_at_real_tokens(model_type):
    model = small(model_type)
    masks = {"attention_mask": IDS[:1] != 1, "decoder_attention_mask": np.ones((1, 3), "int32")}
    padded = model({"input_ids": IDS[:1], "decoder_input_ids": TARGETS[:1], **masks})["logits"]
    alone = model({"input_ids": IDS[:1, :4], "decoder_input_ids": TARGETS[:1]})["logits"]
    assert_close(padded, alone, atol=2e-6)
    unmasked = model({"input_ids": IDS[:1], "decoder_input_ids": TARGETS[:1]})["logits"]
    assert np.abs(to_numpy(unmasked) - to_numpy(alone)).max() > 1e-4


def test_a_target_that_begins_with_the_padding_id_is_seen_from_its_first_token_on():
    model = small("t5")
    written = model.generate(IDS[1:], start_token=0, stop_tokens=(), max_new_tokens=4, jit_compile=False)[0]
    target = [0]
    for _ in range(4):  # by hand, through the whole model
        logits = model({"input_ids": IDS[1:], "decoder_input_ids": np.array([target])})["logits"]
        target.append(int(to_numpy(logits)[0, -1].argmax()))
    assert written.tolist() == target[1:]


def test_bart_without_a_target_reads_the_source_behind_the_start():
    model = small("bart", task="base")
    given = model({"input_ids": IDS, "decoder_input_ids": np.array([[2, 5, 6, 7, 2], [2, 8, 9, 10, 11]])})
    for name, value in model(IDS).items():
        assert_close(value, given[name], atol=0)
    layer = TargetIds.from_config(TargetIds(7).get_config())
    assert to_numpy(layer(keras.ops.convert_to_tensor(IDS))).tolist() == [[7, 5, 6, 7, 2], [7, 8, 9, 10, 11]]


def test_a_marian_model_may_have_two_vocabularies(tmp_path):
    model = small("marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=19)
    inputs = {"input_ids": IDS + 7, "decoder_input_ids": TARGETS}
    logits = to_numpy(model(inputs)["logits"])
    assert logits.shape == (2, 3, 19)
    save_pretrained(model, tmp_path)
    saved = open_tensors(tmp_path)
    shapes = [saved.shape(f"model.{side}.embed_tokens.weight") for side in ("encoder", "decoder")]
    assert shapes == [(23, 12), (19, 12)] and "model.shared.weight" not in saved
    assert saved.shape("final_logits_bias") == (1, 19)
    assert_close(from_pretrained(tmp_path)(inputs)["logits"], logits, atol=0)
    with pytest.raises(ValueError, match=r"`decoder_input_ids` must be in \[0, 19\). Received: 19"):
        model({"input_ids": IDS, "decoder_input_ids": TARGETS + 7})


def test_a_copy_of_the_token_table_that_is_another_table_is_refused(tmp_path):
    save_pretrained(small("bart"), tmp_path)
    tensors = open_tensors(tmp_path)
    arrays = {name: tensors.read(name) for name in tensors}
    arrays["model.decoder.embed_tokens.weight"] = arrays["model.shared.weight"] + 1
    write_tensors(tmp_path, arrays.items())
    with pytest.raises(ValueError, match="'model.decoder.embed_tokens.weight' must be equal to 'model.shared.weight'"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(("tied", "scaled"), [(True, None), (True, False), (False, None), (False, True)])
def test_t5_is_tied_by_its_file_and_scaled_by_its_config(tmp_path, tied, scaled):
    said = {} if scaled is None else {"scale_decoder_outputs": scaled}
    model = small("t5", tied=tied, tie_word_embeddings=True, **said)
    inputs = {"input_ids": IDS, "decoder_input_ids": TARGETS}
    outputs = model(inputs)
    save_pretrained(model, tmp_path)
    tensors, saved = open_tensors(tmp_path), json.loads((tmp_path / "config.json").read_text())
    table = tensors.read("shared.weight" if tied else "lm_head.weight")
    assert ("lm_head.weight" in tensors) == (not tied) == (not saved["tie_word_embeddings"])
    hidden = to_numpy(small("t5", "base")(inputs)["last_hidden_state"])
    scale = 1.0 if scaled is False else 10**-0.5
    assert_close(outputs["logits"], hidden @ table.T * scale, atol=1e-5)
    for values in (saved, {**saved, "tie_word_embeddings": True}):  # transformers 5 writes the second
        (tmp_path / "config.json").write_text(json.dumps(values))
        again = from_pretrained(tmp_path)
        assert again.tied == tied
        assert_close(again(inputs)["logits"], outputs["logits"], atol=0)


def test_the_layers_of_the_families_come_back_from_their_configs():
    x = normal(2, 5, 3)
    assert_close(Scale.from_config(Scale(0.3).get_config())(x), x * np.float32(0.3))
    hidden = AtLast.from_config(AtLast(2).get_config())(
        keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(IDS)
    )
    assert_close(hidden, x[[0, 1], [3, 4]])


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("t5", {"feed_forward_proj": "half-relu"}, "`feed_forward_proj` .* 'gated-' .* feed_forward_proj='half-relu'"),
        ("t5", {"feed_forward_proj": "gated-sinus"}, "`feed_forward_proj` .* must be one of .*'sinus'"),
        ("t5", {"is_decoder": True}, "`is_decoder` in config.json .* Received: is_decoder=True"),
        ("bart", {"is_encoder_decoder": False}, "`is_encoder_decoder` in config.json .* is_encoder_decoder=False"),
        ("bart", {"encoder_layers": 3, "num_hidden_layers": 1}, "encoder_layers.* num_hidden_layers"),
        ("bart", {"decoder_attention_heads": 5}, "`d_model` .* divisible by `decoder_attention_heads`.* d_model=12"),
        ("marian", {"pad_token_id": None}, "`pad_token_id` .* must be an id .* pad_token_id=58100, vocab_size=23"),
        ("t5", {"pad_token_id": -1}, "`pad_token_id` .* must be an id of the vocabulary. .* pad_token_id=-1, vocab"),
        ("marian", {"activation_function": "x"}, "`activation_function` in config.json must be one of .*'x'"),
    ],
)
def test_what_a_family_does_not_do_is_refused(model_type, config, message):
    with pytest.raises(ValueError, match=message):
        small(model_type, **config)


@pytest.mark.parametrize("model_type", ["t5", "bart", "marian"])
def test_a_mask_that_shows_the_padding_id_of_a_source_is_refused(model_type):
    """The encoder finds the padding by its id, so that `generate` would leave the token out."""
    model = small(model_type)
    padding_id = model.family.embedding.padding_id
    ids = np.array([[5, 7, 9], [6, padding_id, 8]])
    message = (
        f"`attention_mask` must be 0 at the padding id {padding_id} of a source, .* of row 1, with the real tokens"
    )
    with pytest.raises(ValueError, match=message):
        model.generate({"input_ids": ids, "attention_mask": np.ones_like(ids)}, start_token=2)
    inputs = {"input_ids": ids, "attention_mask": ids != padding_id}
    options = {"start_token": 2, "max_new_tokens": 3, "jit_compile": False}
    np.testing.assert_array_equal(model.generate(inputs, **options), model.generate(ids, **options))


def test_a_given_target_keeps_its_padding_ids(tmp_path):
    """T5's targets begin with the padding id; without a mask transformers takes all ids of a target for real."""
    import torch

    theirs = torch_models.make(
        tmp_path, "T5ForConditionalGeneration", vocab_size=23, decoder_start_token_id=0, **SMALL["t5"]
    )
    model = from_pretrained(tmp_path)
    source, target = np.array([[5, 7, 9], [6, 3, 8]]), np.array([[0, 4, 0], [0, 11, 6]])
    with torch.device("cpu"):
        expected = theirs.generate(torch.tensor(source), decoder_input_ids=torch.tensor(target), max_new_tokens=4)
    inputs = {"input_ids": source, "decoder_input_ids": target}
    found = model.generate(inputs, max_new_tokens=4, jit_compile=False)
    np.testing.assert_array_equal(found, expected.numpy()[:, 3:])
    for sources, targets in ((source.tolist(), target.tolist()), (source.tolist(), target), (source, target.tolist())):
        inputs = {"input_ids": sources, "decoder_input_ids": targets}
        assert model.generate(inputs, max_new_tokens=4, jit_compile=False) == [until(row, 1) for row in found]


@pytest.mark.parametrize("beginning", [[[2]], [[2, 0]], [[2, 0, 13, 6]]], ids=len)
def test_a_given_target_counts_in_lengths_and_behind_it_no_first_token_is_forced(tmp_path, beginning):
    import torch

    config = {
        **SMALL["bart"],
        "vocab_size": 23,
        "bos_token_id": 0,
        "eos_token_id": [2, 14],
        "decoder_start_token_id": 2,
    }
    theirs = torch_models.make(tmp_path, "BartForConditionalGeneration", **config)
    said = {"forced_bos_token_id": 0, "max_length": 9, "min_length": 6, "decoder_start_token_id": 2, "pad_token_id": 1}
    theirs.generation_config = transformers.GenerationConfig(**said, eos_token_id=[2, *range(14, 23)])
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`eos_token_id` in config.json must be an integer .* Received: .*\[2, 14\]"):
        from_pretrained(tmp_path, task="sequence_classification", num_labels=3)
    model, source = from_pretrained(tmp_path), np.array([[0, 5, 7, 9, 2], [0, 6, 3, 8, 2]])
    target = np.repeat(beginning, 2, axis=0)
    with torch.device("cpu"):
        expected = theirs.generate(torch.tensor(source), decoder_input_ids=torch.tensor(target)).numpy()
    found = model.generate({"input_ids": source, "decoder_input_ids": target}, jit_compile=False)
    np.testing.assert_array_equal(found, expected[:, target.shape[1] :])
    assert target.shape[1] > 1 or (found[:, 0] == 0).all()
    with pytest.raises(
        ValueError, match="`max_new_tokens` must be given if the prompt is as long as .* 9, max_length=9"
    ):
        model.generate({"input_ids": source, "decoder_input_ids": np.full((2, 9), 5)}, jit_compile=False)


def test_a_base_model_does_not_write():
    with pytest.raises(ValueError, match="`generate` needs a generative model.* Received: task='base'"):
        small("t5", "base").generate(IDS, max_new_tokens=3)


def test_stored_positions_of_marian_must_be_sinusoids(tmp_path):
    save_pretrained(small("marian"), tmp_path)
    tensors, name = open_tensors(tmp_path), "model.decoder.embed_positions.weight"
    arrays = {key: tensors.read(key) for key in tensors}
    angles = np.arange(16)[:, None] / 10000 ** (np.arange(6) / 6)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    for wrong in (table[:, ::-1], table[:, :-1]):
        write_tensors(tmp_path, {**arrays, name: wrong.astype("float16")}.items())
        with pytest.raises(ValueError, match=rf"'{name}' must be sinusoids.* width 12. .* shape \(16, 1[12]\)"):
            from_pretrained(tmp_path)
    write_tensors(tmp_path, {**arrays, name: table.astype("float16")}.items())
    from_pretrained(tmp_path)


# Against transformers: models that no tiny checkpoint has

SIZES = {
    "t5": {**SMALL["t5"], "vocab_size": 23},
    "bart": {**SMALL["bart"], "vocab_size": 23, "bos_token_id": 0, "forced_eos_token_id": 2},
}
SIZES["marian"] = {**SIZES["bart"], "decoder_start_token_id": 1}
START = {"decoder_start_token_id": 0}
SENTENCES = np.array([[5, 6, 2, 7, 8, 2, 1], [9, 2, 10, 11, 12, 13, 2]])  # the sentence is its last stop token


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BartForSequenceClassification", {**SIZES["bart"], "num_labels": 3}),
        ("BartForSequenceClassification", {**SIZES["bart"], "num_labels": 5, "scale_embedding": True}),
        ("BartForQuestionAnswering", {**SIZES["bart"], "activation_function": "gelu_new"}),
        ("BartModel", SIZES["bart"]),
        ("T5ForConditionalGeneration", {**SIZES["t5"], "feed_forward_proj": "gated-silu"}),
        ("T5Model", {**SIZES["t5"], "feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3}),
        ("MT5ForConditionalGeneration", SIZES["t5"]),
        ("T5EncoderModel", SIZES["t5"]),
        ("T5ForSequenceClassification", {**SIZES["t5"], "num_labels": 3, "eos_token_id": 2, **START}),
        ("T5ForTokenClassification", {**SIZES["t5"], "num_labels": 5}),
        ("T5ForQuestionAnswering", {**SIZES["t5"], **START}),
        ("MT5EncoderModel", SIZES["t5"]),
        ("MT5ForSequenceClassification", {**SIZES["t5"], "num_labels": 3, "eos_token_id": 2, **START}),
        ("MT5ForTokenClassification", {**SIZES["t5"], "num_labels": 5}),
        ("MT5ForQuestionAnswering", {**SIZES["t5"], **START}),
        (
            "MarianMTModel",
            {**SIZES["marian"], "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19},
        ),
        ("MarianModel", {**SIZES["marian"], "activation_function": "relu", "scale_embedding": True}),
    ],
)
def test_further_models_equal_transformers(tmp_path, name, config):
    theirs = torch_models.make(tmp_path, name, **config)
    if "Marian" in name:  # the sinusoids became random too
        for part in theirs.modules():
            if hasattr(part, "create_weight"):
                part.weight.data = part.create_weight()
        theirs.float().save_pretrained(tmp_path)
        theirs.double()
    arrays = {"input_ids": SENTENCES, "attention_mask": (SENTENCES != 1).astype("int32")}
    alone = name.startswith("Bart") or any(part in name for part in ("Encoder", "Classification", "Question"))
    targets = {} if alone else {"decoder_input_ids": np.array([[1, 12, 13], [1, 14, 15]])}
    expected = torch_models.answer(theirs, arrays["input_ids"], arrays["attention_mask"], **targets)
    model = from_pretrained(tmp_path, output_hidden_states=True)
    outputs = model({**arrays, **targets})
    assert set(outputs) == set(expected)
    for key, value in expected.items():
        pairs = zip(outputs[key], value, strict=True) if key.endswith("hidden_states") else [(outputs[key], value)]
        for ours, wanted in pairs:
            real = arrays["attention_mask"] == 1 if wanted.shape[:2] == SENTENCES.shape else np.s_[:]
            assert_close(to_numpy(ours)[real], wanted[real], atol=3e-5, rtol=3e-5)
    save_pretrained(model, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", tmp_path)
    _, report = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report


def assert_same_tensors(folder, other):
    """Bit for bit; copies of a table, and sinusoids, may be left out."""
    ours, theirs = open_tensors(folder), open_tensors(other)
    for name in ours:
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    assert {name for name in theirs if "embed_" not in name and name != "lm_head.weight"} <= {*ours}


@pytest.mark.parametrize("task", ["encoder", "token_classification", "sequence_classification", "question_answering"])
def test_a_whole_t5_lends_its_stacks_to_other_tasks(tmp_path, task):
    whole = small("t5")
    save_pretrained(whole, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_pretrained(tmp_path, task=task, num_labels=None if "class" not in task else 3)
    new = [str(one.message) for one in caught if "must be trained" in str(one.message)]
    assert bool(new) == (task != "encoder")
    if task == "encoder":
        expected = whole({"input_ids": IDS, "decoder_input_ids": TARGETS})["encoder_last_hidden_state"]
        assert_close(model(IDS)["last_hidden_state"], expected, atol=1e-6)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.task == task
    ids = np.where(IDS == 2, 1, IDS)  # 1 is the end of a text, at which it is classified
    for name, value in model(ids).items():
        assert_close(again(ids)[name], value, atol=0)


# How they write


def test_a_forced_start_without_an_id_forces_nothing():
    options = generation_config.generate_options({"force_bos_token_to_be_generated": True, "bos_token_id": None})
    assert not options.get("forced_tokens")


def test_the_generation_config_becomes_keywords():
    values = {
        "decoder_start_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": [2, 3],
        "forced_bos_token_id": 0,
        "forced_eos_token_id": [2],
        "max_length": 142,
        "min_length": 56,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.5,
        "bad_words_ids": [[1], [2], [4, 5]],  # a stop token is none, as in transformers
        "suppress_tokens": [7],
        "num_beams": 4,
        "encoder_no_repeat_ngram_size": 0,
    }
    assert generation_config.generate_options(values) == {
        "start_token": 2,
        "stop_tokens": (2, 3),
        "forced_tokens": {0: 0, -1: 2},
        "max_new_tokens": 141,
        "min_new_tokens": 55,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.5,
        "forbidden_tokens": [[1], [4, 5], [7]],
    }
    few = {"bos_token_id": 0, "eos_token_id": 2, "max_new_tokens": 9, "min_new_tokens": 3, "min_length": 2}
    expected = {"start_token": 0, "stop_tokens": (2,), "max_new_tokens": 9, "min_new_tokens": 3}
    assert generation_config.generate_options(few) == expected
    assert generation_config.generate_options({}) == {"max_new_tokens": 20, "min_new_tokens": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beam_groups", 2), ("sequence_bias", []), ("guidance_scale", 1.5), ("max_time", 3), ("dola_layers", "low")],
)
def test_settings_that_are_not_done_are_refused(name, value):
    message = f"`{name}` of the generation config must be None, .* Received: {name}={value!r}".replace("[]", r"\[\]")
    with pytest.raises(ValueError, match=message):
        generation_config.generate_options({name: value})
