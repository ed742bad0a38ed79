"""Every checkpoint of the fixtures equals transformers, however it is padded, and writes the same token for token."""

import json

import keras
import numpy as np
import pytest

from keras_tx import generation, pretrained
from tests.pretrained.tiny import (
    NAMES,
    READING,
    TINY,
    VARIANTS,
    WRITING,
    assert_equals_reference,
    inputs_of,
    loaded,
    needs_tiny,
    reference,
    tolerance,
)
from tests.tools import to_numpy

pytestmark = needs_tiny


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_logits_equal_transformers(name):
    model = loaded(name)
    compared = assert_equals_reference(model(inputs_of(name, model)), name)
    assert compared & {"logits", "start_logits", "last_hidden_state"}
    assert compared & {"hidden_states", "decoder_hidden_states"}


@pytest.mark.parametrize("name", [name for name in NAMES if name in READING or "t5" in name or name == "bart"])
def test_an_encoder_that_skips_padding_equals_transformers_too(name, tmp_path):
    model = pretrained.from_pretrained(TINY / name, output_hidden_states=True, skip_padding=True)
    inputs = inputs_of(name, model)
    assert 0 in inputs["attention_mask"]
    outputs = model(inputs)
    assert_equals_reference(outputs, name)
    states = outputs["encoder_hidden_states" if "encoder_hidden_states" in outputs else "hidden_states"]
    assert all((to_numpy(one)[inputs["attention_mask"] == 0] == 0).all() for one in states[1:])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config()["skip_padding"] is True
    if keras.backend.backend() == "tensorflow":
        assert not all(layer.supports_jit for layer in again.layers)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_only_an_encoder_over_tokens_skips_padding(name):
    family = json.loads((TINY / name / "config.json").read_text())["model_type"]
    with pytest.raises(ValueError, match=f"`skip_padding` needs .* Received: skip_padding=True, model_type='{family}'"):
        pretrained.from_pretrained(TINY / name, skip_padding=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "vit"])
def test_the_base_model_equals_transformers(name):
    model = pretrained.from_pretrained(TINY / name, task="base")
    assert model.task == "base" and "logits" not in model.output
    # That of an encoder-decoder is the decoder's, which the reference has as the last of its hidden states.
    outputs = model(inputs_of(name, model))
    if "last_hidden_state" in reference(name):
        assert "last_hidden_state" in assert_equals_reference(outputs, name)
    else:
        arrays = reference(name)
        of_decoder = "decoder_" if "decoder_hidden_states" in arrays else ""
        real = arrays[f"{of_decoder}attention_mask"].astype("bool")
        expected = arrays[f"{of_decoder}hidden_states"][-1]
        np.testing.assert_allclose(
            to_numpy(outputs["last_hidden_state"])[real], expected[real], rtol=0, atol=tolerance(name)
        )


@pytest.mark.parametrize("name", READING)
def test_a_row_alone_without_mask_equals_the_row_in_a_padded_batch(name):
    model, arrays = loaded(name), reference(name)
    inputs, key = inputs_of(name, model), "logits" if "logits" in arrays else "start_logits"
    lengths = inputs["attention_mask"].sum(axis=1)
    assert len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        alone = {one: x[row : row + 1, :length] for one, x in inputs.items() if one != "attention_mask"}
        expected = arrays[key][row]
        expected = expected[:length] if len(expected) == inputs["input_ids"].shape[1] else expected
        np.testing.assert_allclose(to_numpy(model(alone)[key])[0], expected, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", READING)
def test_segments_are_zeros_and_positions_slots_where_they_are_left_out(name):
    model = loaded(name)
    ids = inputs_of(name, model)["input_ids"]
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if "token_type_ids" in model.family.inputs:
        given["token_type_ids"] = np.zeros_like(ids)
    if "position_ids" in model.family.inputs and "roberta" not in name:
        given["position_ids"] = np.broadcast_to(np.arange(ids.shape[1], dtype="int32"), ids.shape)
    if "position_ids" in model.family.inputs and "roberta" in name:  # they count what is not the padding id, 1
        given["position_ids"] = np.where(ids != 1, np.cumsum(ids != 1, axis=1) + 1, 1)
    for ours, theirs in zip(*[keras.tree.flatten(model(x)) for x in (ids, given)], strict=True):
        np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in WRITING if "lp_logits" in reference(name)])
def test_a_left_padded_batch_equals_transformers(name):
    arrays, model = reference(name), loaded(name)
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = {one: arrays[f"lp_{one}"] for one in names}
    real = inputs["attention_mask"].astype("bool")
    actual = to_numpy(model(inputs)["logits"])[real]
    np.testing.assert_allclose(actual, arrays["lp_logits"][real], rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "bert_bin"])
def test_every_way_to_store_a_checkpoint_gives_the_same_model(variant):
    folder = TINY / "variants" / variant
    name = json.loads((folder / "variant.json").read_text())["reference"].split("/")[-2]
    model = pretrained.from_pretrained(folder, output_hidden_states=True)
    rough = {"bert_fp16": 2e-2, "llama_bf16_sharded": 2e-1}  # they were stored in half precision
    only = None if variant != "bart_unprefixed" else {"encoder_hidden_states", "decoder_hidden_states"}
    assert assert_equals_reference(model(inputs_of(name, model)), name, atol=rough.get(variant), only=only)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bert_fp16", "llama_bf16_sharded"])
def test_half_precision_on_disk_is_computed_in_float32(variant):
    """Against transformers in float32 on the same rounded weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = TINY / "variants" / variant
    ours = pretrained.from_pretrained(folder)
    name = "bert" if variant == "bert_fp16" else "llama"
    architecture = getattr(transformers, ours.config["architectures"][0])
    theirs = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = inputs_of(name, ours)
    with torch.no_grad():
        expected = theirs(**{key: torch.tensor(x) for key, x in inputs.items()}).logits.numpy()
    real = inputs["attention_mask"].astype("bool")
    np.testing.assert_allclose(to_numpy(ours(inputs)["logits"])[real], expected[real], rtol=0, atol=tolerance(name))


def prompts(name):
    arrays = reference(name)
    start = "lp_" if "lp_input_ids" in arrays else ""
    return {key: arrays[f"{start}{key}"] for key in ("input_ids", "attention_mask")}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
def test_greedy_ids_equal_transformers(name):
    expected = reference(name)["greedy_ids"]
    model = loaded(name)
    ids = model.generate(prompts(name), generation.Greedy(), max_new_tokens=14, jit_compile=False)
    if "lp_input_ids" not in reference(name):  # theirs begins with the start token
        expected = expected[:, 1:]
    np.testing.assert_array_equal(ids, expected[:, : ids.shape[1]])
    assert ids.shape == expected.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
def test_the_ids_and_scores_of_four_beams_equal_transformers(name):
    arrays, model = reference(name), loaded(name)
    options = {"max_new_tokens": 14, "return_scores": True, "jit_compile": False}
    ids, scores = model.generate(prompts(name), generation.Beam(4, num_return_sequences=4), **options)
    expected = arrays["beam4_ids"].reshape(len(ids), 4, -1)
    begin = arrays["lp_input_ids"].shape[1] if "lp_input_ids" in arrays else 1
    ends = model.family.generation_options(model.generation_config)["stop_tokens"]
    for ours, theirs in zip(ids.reshape(-1, ids.shape[-1]), expected.reshape(-1, expected.shape[-1]), strict=True):
        theirs, ours = theirs[begin:], ours[begin if "lp_input_ids" in arrays else 0 :]
        stops = np.flatnonzero(np.isin(theirs, ends))
        length = stops[0] + 1 if stops.size else len(theirs)
        np.testing.assert_array_equal(ours[:length], theirs[:length])
    np.testing.assert_allclose(np.ravel(scores), arrays["beam4_scores"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_compiled_search_writes_the_same(name):
    expected = reference(name)["greedy_ids"]
    ids = loaded(name).generate(prompts(name), max_new_tokens=14)
    np.testing.assert_array_equal(ids, expected[:, expected.shape[1] - ids.shape[1] :])


@pytest.mark.parametrize("name", [name for name in WRITING if reference(name).get("lp_logits") is not None])
def test_the_padding_id_is_a_token_where_the_model_writes_it(name):
    """What follows is what the whole model says of the same text, which was told that nothing in it is padding."""
    model = loaded(name)
    written = {0: 7, 1: model.config["pad_token_id"]}
    row = model.generate([[5, 11, 7]], max_new_tokens=8, stop_tokens=(), forced_tokens=written, jit_compile=False)[0]
    assert row[4] == written[1] and len(row) == 11
    said = to_numpy(model(np.array([row], "int32"))["logits"])[0].argmax(axis=-1)
    assert row[5:] == said[4:-1].tolist()


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["bert", "roberta_cls", "electra", "distilbert_qa", "vit"])
def test_graphs_with_and_without_xla_equal_transformers(name):
    import tensorflow as tf

    model = loaded(name)
    inputs = {key: tf.constant(x) for key, x in inputs_of(name, model).items()}
    for jit_compile in (False, True):
        outputs = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)(inputs)
        assert assert_equals_reference(outputs, name)
