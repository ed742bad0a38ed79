"""Every tiny checkpoint computes and generates what transformers does, whatever its padding and its file format."""

import keras
import numpy as np
import pytest

from keras_tx import generation, pretrained
from tests.pretrained.tiny import (
    DECODERS,
    ENCODERS,
    GENERATIVE,
    HALF,
    LOADABLE,
    NAMES,
    VARIANTS,
    assert_equals_reference,
    checkpoint,
    inputs_of,
    loaded,
    prompts_of,
    reference,
    tolerance,
)
from tests.tools import to_numpy

# One of each class of families that has an encoder over tokens.
SKIPPING = ["bart", "bert_cls", "distilbert", "electra", "modernbert", "roberta", "t5", "t5_v11"]
# One of each family; the heads that the others have are not in a base model. ViT's is in test_vit.py.
BASES = ["bart", "bert_cls", "distilbert", "electra", "gpt2", "llama", "marian", "modernbert", "qwen3", "roberta", "t5"]


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_logits_equal_transformers(name):
    model = loaded(name)
    compared = assert_equals_reference(model(inputs_of(name, model)), name)
    assert compared & {"logits", "start_logits"}
    assert compared & {"hidden_states", "decoder_hidden_states"}


@pytest.mark.parametrize("name", SKIPPING)
def test_an_encoder_that_skips_padding_equals_transformers(name):
    model = pretrained.from_pretrained(checkpoint(name), output_hidden_states=True, skip_padding=True)
    inputs = inputs_of(name, model)
    assert 0 in inputs["attention_mask"]
    outputs = model(inputs)
    assert_equals_reference(outputs, name)
    states = outputs["encoder_hidden_states" if "encoder_hidden_states" in outputs else "hidden_states"]
    assert all((to_numpy(one)[inputs["attention_mask"] == 0] == 0).all() for one in states[1:])
    assert model.get_config()["skip_padding"] is True


def test_a_keras_file_says_that_padding_is_skipped(tmp_path):
    model = pretrained.from_pretrained(checkpoint("bert"), skip_padding=True)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config()["skip_padding"] is True
    if keras.backend.backend() == "tensorflow":
        assert not all(layer.supports_jit for layer in again.layers)


@pytest.mark.parametrize(("name", "model_type"), [("gpt2", "gpt2"), ("vit", "vit")])
def test_only_an_encoder_over_tokens_skips_padding(name, model_type):
    message = f"`skip_padding` needs .* Received: skip_padding=True, model_type='{model_type}'"
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained(checkpoint(name), skip_padding=True)


@pytest.mark.parametrize("name", BASES)
def test_the_base_model_equals_transformers(name):
    model = pretrained.from_pretrained(checkpoint(name), task="base")
    assert model.task == "base" and "logits" not in model.output
    outputs, arrays = model(inputs_of(name, model)), reference(name)
    if "last_hidden_state" in arrays:
        assert "last_hidden_state" in assert_equals_reference(outputs, name)
    else:  # of an encoder-decoder it is the decoder's, which the reference has as the last of its hidden states
        of_decoder = "decoder_" if "decoder_hidden_states" in arrays else ""
        real = arrays[f"{of_decoder}attention_mask"].astype("bool")
        expected = arrays[f"{of_decoder}hidden_states"][-1]
        actual = to_numpy(outputs["last_hidden_state"])
        np.testing.assert_allclose(actual[real], expected[real], rtol=0, atol=tolerance(name))


# JAX takes seconds to compile each: there one of each way to count positions.
positions = pytest.mark.parametrize(
    "name", ["bert", "roberta", "modernbert"] if keras.backend.backend() == "jax" else ENCODERS
)


@positions
def test_a_row_without_mask_equals_the_row_in_a_padded_batch(name):
    model, arrays = loaded(name), reference(name)
    inputs, key = inputs_of(name, model), "logits" if "logits" in arrays else "start_logits"
    *_, length = lengths = inputs["attention_mask"].sum(axis=1)
    assert length < max(lengths)
    alone = {one: x[-1:, :length] for one, x in inputs.items() if one != "attention_mask"}
    expected = arrays[key][-1]
    expected = expected[:length] if len(expected) == inputs["input_ids"].shape[1] else expected
    np.testing.assert_allclose(to_numpy(model(alone)[key])[0], expected, rtol=0, atol=tolerance(name))


@positions
def test_segments_are_zeros_and_positions_count_slots_where_they_are_left_out(name):
    model = loaded(name)
    ids = inputs_of(name, model)["input_ids"]
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if "token_type_ids" in model.family.inputs:
        given["token_type_ids"] = np.zeros_like(ids)
    if "position_ids" in model.family.inputs:
        given["position_ids"] = np.broadcast_to(np.arange(ids.shape[1], dtype="int32"), ids.shape)
        if "roberta" in name:  # they count the tokens that are not the padding id, 1
            given["position_ids"] = np.where(ids != 1, np.cumsum(ids != 1, axis=1) + 1, 1)
    for ours, theirs in zip(*[keras.tree.flatten(model(x)) for x in (ids, given)], strict=True):
        np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", DECODERS)
def test_a_left_padded_batch_equals_transformers(name):
    arrays, model = reference(name), loaded(name)
    inputs = {one: arrays[f"lp_{one}"] for one in ("input_ids", "attention_mask", "position_ids")}
    real = inputs["attention_mask"].astype("bool")
    actual = to_numpy(model(inputs)["logits"])[real]
    np.testing.assert_allclose(actual, arrays["lp_logits"][real], rtol=0, atol=tolerance(name))


# Files do not depend on the backend, the dtypes of tensors do. `test_round_trip.py`, on PyTorch too, writes them again.
@pytest.mark.parametrize("variant", LOADABLE if keras.backend.backend() == "torch" else HALF)
def test_every_way_to_store_a_checkpoint_gives_the_same_model(variant):
    name = VARIANTS[variant]
    model = pretrained.from_pretrained(checkpoint(variant), output_hidden_states=True)
    only = {"encoder_hidden_states", "decoder_hidden_states"} if variant == "bart_unprefixed" else None
    assert assert_equals_reference(model(inputs_of(name, model)), name, atol=HALF.get(variant), only=only)


@pytest.mark.parametrize("variant", HALF)
def test_half_precision_on_disk_is_computed_in_float32(variant):
    """Against transformers in float64 with the same rounded weights."""
    import torch
    import transformers

    ours, name = pretrained.from_pretrained(checkpoint(variant)), VARIANTS[variant]
    architecture = getattr(transformers, ours.config["architectures"][0])
    theirs = architecture.from_pretrained(checkpoint(variant), dtype=torch.float64).to("cpu").eval()
    inputs = inputs_of(name, ours)
    with torch.no_grad():
        expected = theirs(**{key: torch.tensor(x, device="cpu") for key, x in inputs.items()}).logits.numpy()
    real = inputs["attention_mask"].astype("bool")
    np.testing.assert_allclose(to_numpy(ours(inputs)["logits"])[real], expected[real], rtol=0, atol=tolerance(name))


# Generation

not_on_jax = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="JAX compiles each search for seconds; tests/generation covers its searches",
)


@not_on_jax  # The other names: compiled below, and from prompts of different lengths in test_causal.py.
@pytest.mark.parametrize("name", ["bart", "gpt2", "llama", "llama3", "marian", "qwen2", "t5_v11"])
@pytest.mark.usefixtures("eager")
def test_greedy_ids_equal_transformers(name):
    ids = loaded(name).generate(prompts_of(name), generation.Greedy(), max_new_tokens=14, jit_compile=False)
    expected = reference(name)["greedy_ids"]
    if name not in DECODERS:  # theirs begins with the start token
        expected = expected[:, 1:]
    np.testing.assert_array_equal(ids, expected)


@not_on_jax
@pytest.mark.parametrize("name", GENERATIVE)
def test_the_ids_and_scores_of_four_beams_equal_transformers(name, request):
    if name not in ("bart", "gpt2", "llama3", "t5_v11"):  # one of each kind in a graph
        request.getfixturevalue("eager")
    arrays, model = reference(name), loaded(name)
    options = {"max_new_tokens": 14, "return_scores": True, "jit_compile": False}
    ids, scores = model.generate(prompts_of(name), generation.Beam(4, num_return_sequences=4), **options)
    begin = arrays["lp_input_ids"].shape[1] if name in DECODERS else 1
    ends = model.family.generation_options(model.generation_config)["stop_tokens"]
    for ours, theirs in zip(ids.reshape(12, -1), arrays["beam4_ids"], strict=True):
        theirs, ours = theirs[begin:], ours[begin if name in DECODERS else 0 :]
        stops = np.flatnonzero(np.isin(theirs, ends))
        length = stops[0] + 1 if stops.size else len(theirs)  # what follows is padding, in one way or another
        np.testing.assert_array_equal(ours[:length], theirs[:length])
    np.testing.assert_allclose(np.ravel(scores), arrays["beam4_scores"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_compiled_search_generates_the_same():
    ids = loaded("t5").generate(prompts_of("t5"), max_new_tokens=14)
    np.testing.assert_array_equal(ids, reference("t5")["greedy_ids"][:, 1:])


@not_on_jax
@pytest.mark.parametrize("name", ["gpt2_inner", "llama"])
@pytest.mark.usefixtures("eager")
def test_a_padding_id_that_the_model_generates_is_a_token(name):
    """What follows it is what the whole model computes from the same ids without a mask."""
    model = loaded(name)
    forced = {0: 7, 1: model.config["pad_token_id"]}
    row = model.generate([[5, 11, 7]], max_new_tokens=8, stop_tokens=(), forced_tokens=forced, jit_compile=False)[0]
    assert row[4] == forced[1] and len(row) == 11
    expected = to_numpy(model(np.array([row], "int32"))["logits"])[0].argmax(axis=-1)
    assert row[5:] == expected[4:-1].tolist()


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["electra", "roberta_cls", "vit"])
def test_graphs_with_and_without_xla_equal_transformers(name):
    import tensorflow as tf

    model = loaded(name)
    inputs = {key: tf.constant(x) for key, x in inputs_of(name, model).items()}
    for jit_compile in (False, True):
        outputs = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)(inputs)
        assert assert_equals_reference(outputs, name)
