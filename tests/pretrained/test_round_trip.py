"""What was loaded comes back: as a checkpoint, bit for bit and to the liking of transformers, and as a .keras file."""

import json
import logging

import keras
import numpy as np
import pytest

from keras_tx import pretrained
from keras_tx.pretrained.files import open_tensors
from tests.pretrained.tiny import (
    NAMES,
    TINY,
    VARIANTS,
    assert_equals_reference,
    copied,
    inputs_of,
    loaded,
    needs_tiny,
    reference,
)
from tests.tools import to_numpy

pytestmark = needs_tiny


def numbers(path):
    """{name: (dtype, shape, bytes)} of a checkpoint."""
    tensors = open_tensors(path)
    arrays = {name: np.ascontiguousarray(tensors.read(name)) for name in tensors}
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_comes_back_bit_for_bit(name, tmp_path):
    pretrained.save_pretrained(loaded(name), tmp_path)
    assert numbers(tmp_path) == numbers(TINY / name)


@pytest.mark.parametrize("variant", ["bert_fp16", "llama_bf16_sharded"])
def test_half_precision_comes_back_in_half_precision(variant, tmp_path):
    model = pretrained.from_pretrained(TINY / "variants" / variant)
    pretrained.save_pretrained(model, tmp_path, max_shard_bytes=20_000)
    assert numbers(tmp_path) == numbers(TINY / "variants" / variant)
    assert len(list(tmp_path.glob("model-0*.safetensors"))) > 2 and (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "bert_bin"])
def test_what_awkward_checkpoints_hold_comes_back_under_the_usual_names(variant, tmp_path):
    folder = TINY / "variants" / variant
    name = json.loads((folder / "variant.json").read_text())["reference"].split("/")[-2]
    pretrained.save_pretrained(pretrained.from_pretrained(folder), tmp_path)
    ours, usual = numbers(tmp_path), numbers(TINY / name)
    if variant in ("bert_fp16", "llama_bf16_sharded"):
        assert {key: value[1] for key, value in ours.items()} == {key: value[1] for key, value in usual.items()}
    elif variant in ("bert_unprefixed", "bart_unprefixed"):  # the base model, which has no prefix
        prefix = "bert." if variant == "bert_unprefixed" else "model."
        assert ours == {key.removeprefix(prefix): x for key, x in usual.items() if key.startswith(prefix)}
    else:
        assert ours == usual


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_saved_with_an_empty_report(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    pretrained.save_pretrained(loaded(name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    options = {"output_loading_info": True, "dtype": torch.float32}
    model, report = architecture.from_pretrained(tmp_path, **options)
    assert not any(report.values()), report
    inputs = {key: torch.tensor(x) for key, x in inputs_of(name, loaded(name)).items()}
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    assert assert_equals_reference(
        {key: x.numpy() for key, x in outputs.items() if torch.is_tensor(x)}, name, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_config_keeps_every_key_and_says_the_dtype_twice(name, tmp_path):
    source = copied(name, tmp_path, never_heard_of={"a": [1, None]}, torch_dtype=None)
    pretrained.save_pretrained(pretrained.from_pretrained(source), tmp_path / "ours")
    before, after = [json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "ours")]
    assert after["never_heard_of"] == {"a": [1, None]}
    assert after["dtype"] == after["torch_dtype"] == "float32"
    changed = {key for key in before if key in after and before[key] != after[key]} - {"torch_dtype"}
    assert before.keys() <= after.keys() and changed <= {"tie_word_embeddings"}, changed
    assert (tmp_path / "ours" / "generation_config.json").exists() == (source / "generation_config.json").exists()


def test_the_files_of_the_tokenizer_are_copied_or_written(tmp_path):
    class Tokenizer:
        def save(self, directory):
            (directory / "mine.txt").write_text("mine")

    pretrained.save_pretrained(pretrained.from_pretrained(TINY / "bert"), tmp_path / "copied")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copied" / name).read_bytes() == (TINY / "bert" / name).read_bytes()
    pretrained.save_pretrained(loaded("bert"), tmp_path / "written", tokenizer=Tokenizer())
    assert (tmp_path / "written" / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "written" / "vocab.txt").exists()


def test_a_checkpoint_is_saved_over_itself(tmp_path):
    source = copied("bert", tmp_path)
    before = numbers(source)
    pretrained.save_pretrained(pretrained.from_pretrained(source), source)
    assert numbers(source) == before and (source / "vocab.txt").exists()


def test_another_dtype_is_written_where_it_is_asked_for(tmp_path):
    pretrained.save_pretrained(loaded("bert"), tmp_path, dtype="bfloat16")
    tensors = open_tensors(tmp_path)
    assert {str(tensors.dtype(name)) for name in tensors} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = pretrained.from_pretrained(tmp_path)
    assert_equals_reference(again(inputs_of("bert", again)), "bert", atol=0.3)  # torch in bfloat16: 0.13


@pytest.mark.parametrize("name", NAMES)
def test_a_keras_file_holds_all_of_it(name, tmp_path):
    model = loaded(name)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config() == model.get_config() and again.generation_config == model.generation_config
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    outputs = [keras.tree.flatten(one(inputs_of(name, model))) for one in (model, again)]
    for ours, theirs in zip(*outputs, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    pretrained.save_pretrained(again, tmp_path / "saved")
    assert numbers(tmp_path / "saved") == numbers(TINY / name)


def test_lora_is_written_into_the_kernels(tmp_path):
    model = pretrained.from_pretrained(TINY / "bert")
    inputs = inputs_of("bert", model)
    for layer in model.get_layer("encoder").layers:
        layer.self_attention.query_dense.enable_lora(2)
        layer.feed_forward.output_dense.enable_lora(3)
    added = [weight for weight in model.trainable_weights if "lora" in weight.path]
    assert len(added) == 8
    for weight in added:
        weight.assign(0.1 * np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    pretrained.save_pretrained(model, tmp_path)
    before, after = numbers(TINY / "bert"), numbers(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    names = ("attention.self.query", "output.dense")
    assert changed == {f"bert.encoder.layer.{index}.{name}.weight" for index in range(2) for name in names}
    expected, actual = [to_numpy(one(inputs)["logits"]) for one in (model, pretrained.from_pretrained(tmp_path))]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert np.abs(actual - reference("bert")["logits"]).max() > 0.1


def test_only_pretrained_models_of_floats_are_saved(tmp_path):
    with pytest.raises(TypeError, match="`model` must be a PretrainedModel. Received: model of type Sequential"):
        pretrained.save_pretrained(keras.Sequential([keras.layers.Dense(3)]), tmp_path)
    with pytest.raises(ValueError, match="`dtype` must be one of .* Received: dtype='int8'"):
        pretrained.save_pretrained(loaded("bert"), tmp_path, dtype="int8")
    model = pretrained.from_pretrained(TINY / "bert")
    model.get_layer("encoder").layers[1].feed_forward.output_dense.quantize("int8", type_check=False)
    with pytest.raises(
        ValueError, match=r"must have floating weights. Received: 'bert.encoder.layer.1.output.dense.wei"
    ):
        pretrained.save_pretrained(model, tmp_path)
