"""What was loaded comes back: as a checkpoint, bit for bit and to the liking of transformers, and as a .keras file."""

import functools
import json
import logging

import keras
import numpy as np
import pytest

from keras_tx import pretrained
from keras_tx.internals.keras_models import layers_within
from keras_tx.layers.projection import TiedEmbedding
from keras_tx.pretrained.files import INDEX, open_tensors
from tests.pretrained.tiny import (
    HALF,
    LOADABLE,
    NAMES,
    VARIANTS,
    assert_equals_reference,
    checkpoint,
    copied,
    inputs_of,
    loaded,
    numbers,
    reference,
)
from tests.tools import to_numpy

# A model of each family, and of each kind of head.
OF_EACH_FAMILY = ["bart", "bert_cls", "distilbert_qa", "electra", "gpt2_inner", "llama3", "marian", "mistral"]
OF_EACH_FAMILY += ["modernbert", "qwen3", "roberta_cls", "t5_v11", "vit"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(name)`: the directory into which `save_pretrained` wrote the model of a checkpoint."""

    @functools.cache
    def directory(name):
        target = tmp_path_factory.mktemp(name)
        pretrained.save_pretrained(loaded(name), target)
        return target

    return directory


def json_of(path):
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_and_every_key_of_the_config_comes_back(name, saved):
    assert numbers(saved(name)) == numbers(checkpoint(name))
    before, after = json_of(checkpoint(name)), json_of(saved(name))
    assert after["dtype"] == after["torch_dtype"] == "float32"
    changed = {key for key in before if key in after and before[key] != after[key]}
    assert before.keys() <= after.keys() and changed <= {"tie_word_embeddings"}, changed
    generation = "generation_config.json"
    assert (saved(name) / generation).exists() == (checkpoint(name) / generation).exists()


def test_keys_of_the_config_that_nobody_knows_are_kept(tmp_path):
    source = copied("bert", tmp_path, never_heard_of={"a": [1, None]}, torch_dtype=None)
    pretrained.save_pretrained(pretrained.from_pretrained(source), tmp_path / "ours")
    assert json_of(tmp_path / "ours") == {**json_of(source), "torch_dtype": "float32"}


@pytest.mark.parametrize("variant", HALF)
def test_half_precision_comes_back_in_half_precision(variant, tmp_path):
    model = pretrained.from_pretrained(checkpoint(variant))
    pretrained.save_pretrained(model, tmp_path, max_shard_bytes=20_000)
    assert numbers(tmp_path) == numbers(checkpoint(variant))
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2 and (tmp_path / INDEX).exists()


@pytest.mark.parametrize("variant", LOADABLE)
def test_tensors_come_back_under_the_usual_names(variant, tmp_path):
    pretrained.save_pretrained(pretrained.from_pretrained(checkpoint(variant)), tmp_path)
    ours, usual = numbers(tmp_path), numbers(checkpoint(VARIANTS[variant]))
    if variant in HALF:
        assert {key: value[1] for key, value in ours.items()} == {key: value[1] for key, value in usual.items()}
    elif variant in ("bert_unprefixed", "bart_unprefixed"):  # the base model, which has no prefix
        prefix = "bert." if variant == "bert_unprefixed" else "model."
        assert ours == {key.removeprefix(prefix): x for key, x in usual.items() if key.startswith(prefix)}
    else:
        assert ours == usual


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_saved_with_an_empty_report(name, saved):
    import torch
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    architecture = getattr(transformers, json_of(saved(name))["architectures"][0])
    with torch.device("cpu"), torch.no_grad():
        model, report = architecture.from_pretrained(saved(name), output_loading_info=True, dtype=torch.float32)
        assert not any(report.values()), report
        inputs = {key: torch.tensor(x) for key, x in inputs_of(name, loaded(name)).items()}
        inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        outputs = model.double().eval()(**inputs)
    arrays = {key: x.numpy() for key, x in outputs.items() if torch.is_tensor(x)}
    assert assert_equals_reference(arrays, name, atol=1e-6)


def test_transformers_finds_shards_by_their_index_and_replaces_them(tmp_path):
    """The names of shards are not those of transformers, which reads them in the index and knows them as its own."""
    import torch
    import transformers

    pretrained.save_pretrained(loaded("bert"), tmp_path, max_shard_bytes=20_000)
    ours = {path.name for path in tmp_path.glob("model-*")}
    theirs, report = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(ours) > 2 and not any(report.values()), report
    expected = open_tensors(checkpoint("bert"))
    for name, tensor in theirs.state_dict().items():
        if name in expected:
            np.testing.assert_array_equal(tensor.numpy(), expected.read(name))
    with torch.device("cpu"):
        theirs.save_pretrained(tmp_path)
    assert not ours & {path.name for path in tmp_path.iterdir()}


def test_the_files_of_the_tokenizer_are_copied_or_written(tmp_path):
    class Tokenizer:
        def save(self, directory):
            (directory / "mine.txt").write_text("mine")

    pretrained.save_pretrained(pretrained.from_pretrained(checkpoint("bert")), tmp_path / "copied")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copied" / name).read_bytes() == (checkpoint("bert") / name).read_bytes()
    pretrained.save_pretrained(loaded("bert"), tmp_path / "written", tokenizer=Tokenizer())
    assert (tmp_path / "written" / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "written" / "vocab.txt").exists()


def test_a_checkpoint_is_saved_over_itself(tmp_path):
    source = copied("bert", tmp_path)
    before = numbers(source)
    pretrained.save_pretrained(pretrained.from_pretrained(source), source)
    assert numbers(source) == before and (source / "vocab.txt").exists()


@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_a_keras_file_holds_all_of_it(name, tmp_path):
    model = loaded(name)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config() == model.get_config() and again.generation_config == model.generation_config
    assert [weight.path for weight in again.weights] == [weight.path for weight in model.weights]
    assert len({weight.path for weight in again.weights}) == len(again.weights)
    assert len({layer.name for layer in again.layers}) == len(again.layers)
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    outputs = [keras.tree.flatten(one(inputs_of(name, model))) for one in (model, again)]
    for ours, theirs in zip(*outputs, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))
    pretrained.save_pretrained(again, tmp_path / "saved")
    assert numbers(tmp_path / "saved") == numbers(checkpoint(name))


def test_lora_is_written_into_the_kernels(tmp_path):
    model = pretrained.from_pretrained(checkpoint("bert"))
    inputs = inputs_of("bert", model)
    for layer in model.get_layer("encoder").layers:
        layer.self_attention.query_dense.enable_lora(2)
        layer.feed_forward.output_dense.enable_lora(3)
    added = [weight for weight in model.trainable_weights if "lora" in weight.path]
    assert len(added) == 8
    for weight in added:
        weight.assign(0.1 * np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    pretrained.save_pretrained(model, tmp_path)
    before, after = numbers(checkpoint("bert")), numbers(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    names = ("attention.self.query", "output.dense")
    assert changed == {f"bert.encoder.layer.{index}.{name}.weight" for index in range(2) for name in names}
    expected, actual = [to_numpy(one(inputs)["logits"]) for one in (model, pretrained.from_pretrained(tmp_path))]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert np.abs(actual - reference("bert")["logits"]).max() > 0.1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_lora_of_a_token_table_is_written_in_full_precision(tmp_path, policy):
    model = pretrained.from_pretrained(checkpoint("gpt2"), dtype=policy)
    table = next(layer for layer in layers_within(model) if isinstance(layer, TiedEmbedding))
    before = to_numpy(table.weights[0])
    table.enable_lora(2)
    for weight in (table.lora_embeddings_a, table.lora_embeddings_b):
        weight.assign(np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    update = to_numpy(table.lora_embeddings_a) @ to_numpy(table.lora_embeddings_b)
    pretrained.save_pretrained(model, tmp_path)
    tensors = open_tensors(tmp_path)
    (name,) = (name for name in tensors if name.endswith("wte.weight"))
    np.testing.assert_allclose(tensors.read(name), before + update, rtol=0, atol=1e-5)


def test_integers_with_lora_are_not_written_as_floats(tmp_path):
    model = pretrained.from_pretrained(checkpoint("gpt2"))
    model.quantize("int8", filters=["query"])
    for layer in model.get_layer("decoder").layers:
        layer.self_attention.query_dense.enable_lora(2)
    with pytest.raises(ValueError, match="`model` must have floating weights. Received: .*c_attn.* of dtype int8"):
        pretrained.save_pretrained(model, tmp_path / "new")
    assert not [*(tmp_path / "new").iterdir()]


def test_only_pretrained_models_of_floats_are_saved(tmp_path):
    with pytest.raises(TypeError, match="`model` must be a PretrainedModel. Received: model of type Sequential"):
        pretrained.save_pretrained(keras.Sequential([keras.layers.Dense(3)]), tmp_path)
    with pytest.raises(ValueError, match="`dtype` must be one of .* Received: dtype='int8'"):
        pretrained.save_pretrained(loaded("bert"), tmp_path, dtype="int8")
    model = pretrained.from_pretrained(checkpoint("bert"))
    model.get_layer("encoder").layers[1].feed_forward.output_dense.quantize("int8", type_check=False)
    with pytest.raises(
        ValueError, match=r"must have floating weights. Received: 'bert.encoder.layer.1.output.dense.wei"
    ):
        pretrained.save_pretrained(model, tmp_path)
