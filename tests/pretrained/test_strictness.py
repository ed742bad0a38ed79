"""A checkpoint that is not what it says is refused by name: tensors, shapes, configs, files, models from elsewhere."""

import functools
import json
import shutil
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_tx.pretrained.load as loading
from keras_tx import pretrained
from keras_tx.pretrained import PretrainedModel, generation_config, registry, variable_loader
from keras_tx.pretrained.config import CHANGING, Config
from keras_tx.pretrained.files import open_tensors, write_tensors
from keras_tx.pretrained.registry import read_family
from tests.pretrained.small_configs import small
from tests.pretrained.tiny import NAMES, assert_equals_reference, checkpoint, copied, inputs_of, loaded
from tests.tools import to_numpy


def with_tensors(name, parent, change):
    """A copy of a checkpoint after `change(dict of its tensors)`."""
    target = copied(name, parent)
    arrays = dict(arrays_of(name))
    change(arrays)
    write_tensors(target, arrays.items())
    return target


@functools.cache
def arrays_of(name):
    """{name: array} of the tensors of a checkpoint."""
    tensors = open_tensors(checkpoint(name))
    return {key: tensors.read(key) for key in tensors}


# Tensors

TOKENS = "bert.embeddings.word_embeddings.weight"
LOGITS = "lm_head.weight"


class Stored(dict):
    """{name: array} with the methods of what `open_tensors` returns."""

    @property
    def names(self):
        return tuple(self)

    def shape(self, name):
        return self[name].shape

    def dtype(self, name):
        return self[name].dtype

    def read(self, name):
        return self[name]

    def pieces(self, name):
        return iter([np.ascontiguousarray(self[name]).reshape(-1).view("uint8")])

    def check_unchanged(self):
        pass

    def close(self):
        pass


@pytest.fixture
def load(monkeypatch):
    """`load(name, arrays)`: `from_pretrained` of a checkpoint that holds these arrays, with layers made once a name."""

    def from_pretrained(name, arrays):
        model = loaded(name)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "tensors_in", lambda snapshot: Stored(arrays))
            patch.setattr(loading, "PretrainedModel", lambda *args, **options: model)
            pretrained.from_pretrained(checkpoint(name))

    return from_pretrained


def needed(name):
    """{name: array} of the tensors that must be there; without its own table of the logits, T5 is tied."""
    optional = {"final_logits_bias", "lm_head.weight" if name.startswith("t5") else ""}
    return {key: array for key, array in arrays_of(name).items() if key not in optional}


def one_of_each_rank(name):
    """The first and the last tensor with one axis, with two, and with more."""
    keys = list(needed(name))
    ranks = {key: needed(name)[key].ndim for key in keys}
    return {*{ranks[key]: key for key in keys}.values(), *{ranks[key]: key for key in reversed(keys)}.values()}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_that_is_missing_is_named(name, load):
    for key in needed(name):
        others = {other: array for other, array in arrays_of(name).items() if other != key}
        with pytest.raises(ValueError, match=f"The checkpoint must have .*{key}' of shape .* Received: no such tensor"):
            load(name, others)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_has_no_place_is_named(name, load):
    first = next(key for key in arrays_of(name) if ".0." in key)
    for key in ("surprise.weight", first.replace(".0.", ".7."), f"{first}_scale"):
        message = f"Every tensor must be used by a model .* Received: '{key}', which is"
        with pytest.raises(ValueError, match=message):
            load(name, {**arrays_of(name), key: np.ones((3, 5), "float32")})


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_does_not_fit_the_config_is_named(name, load):
    for key in one_of_each_rank(name):
        array = arrays_of(name)[key]
        changed = [array[..., :-1], np.repeat(array, 2, axis=0), array[..., None]]
        if array.ndim == 2 and array.shape[0] != array.shape[1]:
            changed.append(array.T)  # as many numbers
        for other in changed:
            with pytest.raises(ValueError, match=f"'{key}' must have the shape .* Received: "):
                load(name, {**arrays_of(name), key: other})


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_files_with_other_tensors_are_refused(name, tmp_path):
    """The same from files, with layers that are made of the config."""
    key = [*needed(name)][-1]
    changes = {
        "Received: no such tensor": lambda arrays: arrays.pop(key),
        "Received: 'surprise', which is not": lambda arrays: arrays.update(surprise=np.ones(3, "float32")),
        f"'{key}' must have the shape": lambda arrays: arrays.update({key: arrays[key][:-1]}),
    }
    for index, (message, change) in enumerate(changes.items()):
        with pytest.raises(ValueError, match=message):
            pretrained.from_pretrained(with_tensors(name, tmp_path / str(index), change))


# config.json


@pytest.mark.parametrize("name", [name for name in NAMES if "_" not in name])
def test_a_config_without_a_key_that_is_needed_is_refused_by_name(name):
    """Each key is left out: then there is a default, or the error names the key."""
    config, refused = loaded(name).config, []
    large = {"pad_token_id", "relative_attention_num_buckets"}  # their defaults do not fit models as small as these
    for key in config.keys() - large:
        try:
            read_family({other: value for other, value in config.items() if other != key})
        except ValueError as error:
            refused.append(key)
            assert f"`{key}`" in str(error)
    assert "model_type" in refused and ("vocab_size" in refused or name == "vit")
    PretrainedModel({key: value for key, value in config.items() if key in large.union(refused)})


@pytest.mark.parametrize("key", sorted(CHANGING))
def test_a_key_that_changes_the_computation_is_refused_unless_it_says_what_is_done_anyway(key):
    config = loaded("bert").config
    values = {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}, "layer_types": ["full"]}
    with pytest.raises(ValueError, match=f"`{key}` in config.json .* Received: {key}="):
        read_family({**config, key: values.get(key, 3)})
    for neutral in (None, *CHANGING[key]):
        read_family({**config, key: neutral})


def test_a_config_is_refused_before_a_layer_is_built(monkeypatch):
    monkeypatch.setattr(keras.layers.Layer, "build", None)  # would raise
    config = loaded("bert").config
    for wrong in ({"sliding_window": 5}, {"hidden_act": "x"}, {"vocab_size": None}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
            PretrainedModel({**config, **wrong})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "bert",
            {"hidden_act": "gelu_10"},
            r"`hidden_act` in config.json must be one of .*'gelu_new'.* hidden_act='gelu_10'",
        ),
        (
            "bert",
            {"hidden_act": ["gelu"]},
            r"`hidden_act` in config.json must be one of .* Received: hidden_act=\['gelu'\]",
        ),
        (
            "bert",
            {"num_attention_heads": 5},
            "must be divisible by `num_attention_heads`. Received: hidden_size=32, num_a",
        ),
        ("bert", {"num_hidden_layers": 0}, "`num_hidden_layers` in config.json must be a positive integer. .*=0"),
        ("bert", {"num_hidden_layers": True}, "`num_hidden_layers` in config.json must be a positive integer. .*=True"),
        ("bert", {"layer_norm_eps": -1}, "`layer_norm_eps` in config.json must be a positive number. .*=-1"),
        ("bert", {"hidden_dropout_prob": 1.5}, r"`hidden_dropout_prob` in .* a number in \[0, 1\). .*=1.5"),
        ("bert", {"position_embedding_type": "relative_key"}, "must be 'absolute'; nothing else .*='relative_key'"),
        ("bert", {"is_decoder": True}, "`is_decoder` in config.json must be False; nothing else .*=True"),
        ("roberta", {"add_cross_attention": True}, "`add_cross_attention` in config.json must be False; nothing else"),
        (
            "bert",
            {"quantization_config": {"bits": 4}},
            "`quantization_config` in .* not supported for model_type='bert'",
        ),
        ("bert", {"auto_map": {"AutoModel": "x.Y"}}, r"code inside the checkpoint, .* auto_map=\{'AutoModel'"),
        (
            "bert",
            {"model_type": "bart_ish"},
            r"one of \['bart', 'bert', .*'xlm-roberta'\]. Received: model_type='bart_ish'",
        ),
        ("bert", {"model_type": None}, "`model_type` in config.json must be one of .* Received: model_type=None"),
        (
            "bert",
            {"architectures": ["BertLMHeadModel"]},
            r"must begin with one of \['BertModel', .*\['BertLMHeadModel'\]",
        ),
        ("bert", {"architectures": None}, "or pass `task`, one of .*'masked_lm'.* Received: architectures=None"),
        ("bert_cls", {"id2label": None, "num_labels": 0}, "`num_labels` in config.json must be a positive integer"),
    ],
)
def test_values_that_are_not_supported_are_named(name, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained(copied(name, tmp_path, **changes))


def test_a_key_that_is_needed_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"config.json must have `vocab_size`. Received: vocab_size=None, keys \['add_cros"
    ):
        pretrained.from_pretrained(copied("bert", tmp_path, vocab_size=None))
    with pytest.raises(ValueError, match="`config` must be a dict, that of config.json. Received: config='bert'"):
        PretrainedModel("bert")


def test_tensors_must_be_floats_and_stored_once(tmp_path):
    name = "bert.embeddings.LayerNorm.bias"
    folder = with_tensors("bert", tmp_path / "a", lambda arrays: arrays.update({name: arrays[name].astype("int8")}))
    with pytest.raises(ValueError, match=f"'{name}' must have a floating dtype. Received: int8"):
        pretrained.from_pretrained(folder)
    folder = with_tensors("bert", tmp_path / "b", lambda arrays: arrays.update({name[:-4] + "beta": arrays[name]}))
    with pytest.raises(ValueError, match=f"stored under one name. Received: '{name}' and '{name[:-4]}beta'"):
        pretrained.from_pretrained(folder)


def test_a_copy_must_be_one(tmp_path):
    def copy(arrays, factor):
        arrays["cls.predictions.decoder.bias"] = factor * arrays["cls.predictions.bias"]
        arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"]

    assert pretrained.from_pretrained(with_tensors("bert", tmp_path / "a", lambda arrays: copy(arrays, 1))).tied
    with pytest.raises(
        ValueError, match="'cls.predictions.decoder.bias' must be equal to 'cls.predictions.bias'. Received"
    ):
        pretrained.from_pretrained(with_tensors("bert", tmp_path / "b", lambda arrays: copy(arrays, 2)))


def test_a_table_of_the_logits_that_is_no_copy_is_untied_whatever_the_config_says(tmp_path):
    table = np.random.default_rng(5).normal(size=arrays_of("bert")[TOKENS].shape).astype("float32")
    folder = with_tensors("bert", tmp_path, lambda arrays: arrays.update({"cls.predictions.decoder.weight": table}))
    model = pretrained.from_pretrained(folder)
    np.testing.assert_array_equal(to_numpy(model.get_layer("head_output").kernel), table.T)
    assert not model.tied
    pretrained.save_pretrained(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not pretrained.from_pretrained(tmp_path / "saved").tied
    tensors = open_tensors(tmp_path / "saved")
    np.testing.assert_array_equal(tensors.read("cls.predictions.decoder.weight"), table)
    assert pretrained.from_pretrained(folder, task="base").task == "base"  # has no place for it


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_transformers_loads_what_has_a_table_of_the_logits_of_its_own(name, tmp_path):
    import torch
    import transformers

    shape = open_tensors(checkpoint(name)).shape("model.shared.weight")
    table = np.random.default_rng(5).normal(size=shape).astype("float32")
    model = pretrained.from_pretrained(with_tensors(name, tmp_path, lambda arrays: arrays.update({LOGITS: table})))
    assert not model.tied
    pretrained.save_pretrained(model, tmp_path / "saved")
    kind = transformers.AutoModelForSeq2SeqLM
    theirs, report = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    inputs = inputs_of(name, model)
    with torch.no_grad():
        expected = theirs.eval()(**{key: torch.tensor(value).long() for key, value in inputs.items()}).logits.numpy()
    real = inputs["decoder_attention_mask"] == 1
    np.testing.assert_allclose(to_numpy(model(inputs)["logits"])[real], expected[real], rtol=0, atol=1e-4)
    assert pretrained.from_pretrained(tmp_path / "saved").tied is False


def test_untied_by_the_config_it_needs_its_own_table(tmp_path):
    folder = copied("bert", tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"must have 'cls.predictions.decoder.weight' of shape \(\d+, 32\); or pass"):
        pretrained.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "task", "new"),
    [
        (
            "bert",
            "sequence_classification",
            {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"},
        ),
        ("bert_cls", "question_answering", {"qa_outputs.weight", "qa_outputs.bias"}),
        (
            "roberta",
            "sequence_classification",
            {f"classifier.{x}.{y}" for x in ("dense", "out_proj") for y in ("weight", "bias")},
        ),
        (
            "distilbert_cls",
            "masked_lm",
            {f"vocab_{x}.{y}" for x in ("transform", "layer_norm") for y in ("weight", "bias")}
            | {"vocab_projector.bias"},
        ),
        ("electra", "token_classification", {"classifier.weight", "classifier.bias"}),
    ],
)
def test_a_head_that_is_asked_for_and_not_there_is_new_and_named(name, task, new):
    with pytest.warns(
        UserWarning, match=f"lacks tensors of the task '{task}'. They have random weights and must be trained: "
    ) as caught:
        model = pretrained.from_pretrained(checkpoint(name), task=task)
    (named,) = [str(one.message).split("trained: ")[1] for one in caught if "trained: " in str(one.message)]
    assert set(eval(named.split(", in the layers")[0])) == new
    assert model.task == task and all(np.isfinite(to_numpy(x)).all() for x in model.weights)


def test_half_a_head_is_an_error_even_where_it_was_asked_for(tmp_path):
    folder = with_tensors("bert_cls", tmp_path, lambda arrays: arrays.pop("classifier.bias"))
    with pytest.raises(
        ValueError, match=r"The checkpoint must have 'classifier.bias' of shape \(3,\). Received: no such"
    ):
        pretrained.from_pretrained(folder, task="sequence_classification")


def test_another_number_of_labels_is_a_new_head():
    with pytest.warns(
        UserWarning, match=r"They have random weights and must be trained: \['classifier.weight', 'classifier.bias'\]"
    ):
        model = pretrained.from_pretrained(checkpoint("bert_cls"), num_labels=7)
    assert model(inputs_of("bert_cls", model))["logits"].shape == (3, 7) and len(model.config["id2label"]) == 7
    same = pretrained.from_pretrained(checkpoint("bert_cls"), num_labels=3)
    np.testing.assert_array_equal(to_numpy(same.weights[-1]), to_numpy(loaded("bert_cls").weights[-1]))
    with pytest.raises(ValueError, match="`num_labels` must be a positive integer or None. Received: num_labels=0"):
        pretrained.from_pretrained(checkpoint("bert_cls"), num_labels=0)


def test_labels_have_the_names_that_are_given(tmp_path):
    names = ["good", "bad", "so-so"]
    model = pretrained.from_pretrained(checkpoint("bert_cls"), labels=names)  # as many: the head is the checkpoint's
    np.testing.assert_array_equal(to_numpy(model.weights[-1]), to_numpy(loaded("bert_cls").weights[-1]))
    pretrained.save_pretrained(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["id2label"] == {"0": "good", "1": "bad", "2": "so-so"} and saved["label2id"]["so-so"] == 2
    assert list(pretrained.from_pretrained(tmp_path, num_labels=3).config["id2label"].values()) == names
    again = pretrained.from_pretrained(checkpoint("bert_cls"), labels=np.array(names))
    assert again.config == model.config and {type(label) for label in again.config["label2id"]} == {str}
    for labels in ("good", [], ["good", "good"], ["good", 7], ["good", ""]):
        with pytest.raises(ValueError, match="`labels` must be different non-empty strings, one for each class. Rec"):
            pretrained.from_pretrained(checkpoint("bert_cls"), labels=labels)
    with pytest.raises(
        ValueError, match="`labels` must have the length `num_labels`. Received: .*'so-so'], num_labels=4"
    ):
        pretrained.from_pretrained(checkpoint("bert_cls"), labels=names, num_labels=4)


@pytest.mark.parametrize("given", [{"labels": ["good", "bad"]}, {"num_labels": 2}])
@pytest.mark.parametrize("task", [None, "base", "question_answering"])
def test_labels_for_a_task_without_classes_are_refused(given, task):
    with pytest.raises(ValueError, match="`labels` and `num_labels` are for the tasks .* task='(masked_lm|base|quest)"):
        pretrained.from_pretrained(checkpoint("bert"), task=task, **given)


@pytest.mark.parametrize(("count", "kept"), [(3, "multi_label_classification"), (5, None)])
def test_another_number_of_labels_is_no_longer_the_old_kind_of_problem(tmp_path, count, kept):
    folder = with_config("bert_cls", tmp_path, problem_type="multi_label_classification")
    with warnings.catch_warnings(action="ignore"):
        model = pretrained.from_pretrained(folder, labels=[f"class {index}" for index in range(count)])
    assert model.config.get("problem_type") == kept


def test_tasks_that_a_family_has_not_are_refused():
    with pytest.raises(
        ValueError, match=r"`task` must be None or, for \('bert',\), one of \['base', .* task='causal_lm'"
    ):
        pretrained.from_pretrained(checkpoint("bert"), task="causal_lm")


def test_paths_and_files_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`path` must have a config.json. Received: path="):
        pretrained.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="`path` must be a directory, or a model id of the hub. Received: path='/no/such/folder'"
    ):
        pretrained.from_pretrained("/no/such/folder")
    for path in ("./nothing", "../nothing", "~/nothing"):
        with pytest.raises(ValueError, match=f"`path` must be a directory, .* path='{path}'"):
            pretrained.from_pretrained(path)
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="config.json.* must"):
        pretrained.from_pretrained(tmp_path)
    remedy = r"can run any code while it is loaded.* python -c .*getattr\(t, c.architectures\[0\]\).*save_pretrained"
    with pytest.raises(ValueError, match=remedy):
        pretrained.from_pretrained(checkpoint("bert_bin"))


def test_an_adapter_is_not_left_out_silently(tmp_path):
    shutil.copytree(checkpoint("bert"), tmp_path, dirs_exist_ok=True)
    pretrained.from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(
        ValueError,
        match="must be a checkpoint without a PEFT adapter.* Received: path='.*', which has adapter_config.json",
    ):
        pretrained.from_pretrained(tmp_path)


def test_ids_of_the_hub_go_through_its_client(monkeypatch):
    """Safetensors are asked for first, TensorFlow's file where there are none, pickles never."""
    asked = []

    class Hub:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            return checkpoint("distilbert_cls_tf_h5" if name.startswith("old") else "bert")

    monkeypatch.setattr(loading, "huggingface_hub", Hub)
    assert pretrained.from_pretrained("some/model").task == "masked_lm"
    assert [name for name, _ in asked] == ["some/model"] and "model*.safetensors" in asked[0][1]
    assert pretrained.from_pretrained("old-model").task == "sequence_classification"
    assert "tf_model.h5" in asked[2][1] and not any(
        "bin" in pattern or "*" == pattern for _, p in asked for pattern in p
    )


def test_a_hub_id_with_pickles_alone_is_refused_with_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub = SimpleNamespace(
        snapshot_download=lambda name, allow_patterns: tmp_path,
        list_repo_files=lambda name: ["config.json", "pytorch_model.bin"],
    )
    monkeypatch.setattr(loading, "huggingface_hub", hub)
    with pytest.raises(
        ValueError, match="can run any code.* d = .some/model.; .* Received: path='some/model/pytorch_m"
    ):
        pretrained.from_pretrained("some/model")


def with_config(name, folder, **values):
    target = copied(name, folder)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    return target


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bart", {"scale_embedding": "false"}, "`scale_embedding` .* must be true or false. Received: .*='false'"),
        ("gpt2", {"num_attention_heads": 7}, "`n_head` and `num_attention_heads` .* must be equal. Received: n_head="),
        (
            "t5",
            {"dense_act_fn": "silu"},
            "`feed_forward_proj` and `dense_act_fn` .* agree. Received: .*'relu', dense_act_fn='silu'",
        ),
        (
            "llama",
            {"tie_last_hidden_states": False},
            "`tie_last_hidden_states` .* Received: tie_last_hidden_states=False",
        ),
        ("vit", {"tie_last_hidden_states": True}, "`tie_last_hidden_states` .* Received: tie_last_hidden_states=True"),
        ("bert", {"num_hidden_layers": 10**9}, "`num_hidden_layers` .* at most the number of tensors, .*=1000000000"),
        ("bert", {"architectures": {"a": 1}}, "`architectures` .* must be a list. Received: architectures="),
        ("bert_cls", {"id2label": -1}, "`id2label` .* must be a dict. Received: id2label=-1"),
        ("llama", {"pad_token_id": "x"}, "`pad_token_id` .* must be an integer of 32 bits. Received: .*'x'"),
    ],
)
def test_what_transformers_would_take_otherwise_is_refused(name, values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        pretrained.from_pretrained(with_config(name, tmp_path, **values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"stop_strings": ["."]},
            r"`stop_strings` of the generation config must be None.*Received: stop_strings=\['.'\]",
        ),
        ({"min_length": 5}, "`min_length` of the generation config must be one of .* Received: min_length=5"),
        (
            {"forced_bos_token_id": 5},
            "`forced_bos_token_id` of the .* must be one of .* Received: forced_bos_token_id=5",
        ),
        ({"num_return_sequences": 2}, "`num_return_sequences` of the generation .* Received: num_return_sequences=2"),
        ({"max_length": 3}, "`max_new_tokens` must be given .* Received: a prompt of 4, max_length=3"),
    ],
)
def test_what_a_generation_config_asks_for_and_cannot_be_had_is_refused(values, message):
    model = loaded("gpt2")
    kept = model.generation_config
    try:
        model.generation_config = {**kept, **values}
        with pytest.raises(ValueError, match=message):
            model.generate([[5, 7, 11, 13]])
    finally:
        model.generation_config = kept


def test_max_length_of_a_generation_config_counts_the_prompt():
    model = loaded("gpt2")
    kept = model.generation_config
    try:
        model.generation_config = {**kept, "max_length": 9, "eos_token_id": None}
        options = {"jit_compile": False}
        assert model.generate(np.array([[5, 7, 11, 13], [3, 5, 7, 11]], "int32"), **options).shape == (2, 9)
        assert len(model.generate([5, 7, 11, 13], **options)) == 9
        assert len(list(model.stream([5, 7], **options))) == 7
        for wrong in ([], [[5, 7], 5]):
            with pytest.raises(ValueError, match="must be rows of ids|must have a token in each row"):
                model.generate(wrong)
    finally:
        model.generation_config = kept


def test_logits_with_a_table_and_a_bias_of_their_own_are_those_of_transformers(tmp_path):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint("bert"))
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    theirs = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        theirs.cls.predictions.decoder.bias.normal_()  # the other bias stays zero: it is dead
    theirs.save_pretrained(tmp_path / "theirs")
    ids = np.array([[5, 7, 11, 13, 17]], "int32")
    with torch.no_grad():
        expected = theirs(torch.tensor(ids).long()).logits.numpy()
    ours = pretrained.from_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(to_numpy(ours(ids)["logits"]), expected, rtol=0, atol=2e-5)
    pretrained.save_pretrained(ours, tmp_path / "ours")
    again, report = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        np.testing.assert_allclose(again.eval()(torch.tensor(ids).long()).logits.numpy(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("t5", "shared.weight", "encoder.embed_tokens.weight"),
        ("bart", "model.shared.weight", "lm_head.weight"),
        ("gpt2", "transformer.wte.weight", "lm_head.weight"),
        ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_a_tied_table_under_its_other_name_is_found(name, usual, other, tmp_path):
    folder = with_tensors(name, tmp_path, lambda arrays: arrays.update({other: arrays.pop(usual)}))
    model = pretrained.from_pretrained(folder)
    assert model.tied
    assert_equals_reference(model(inputs_of(name, model)), name)


def test_without_prefix_a_head_keeps_its_name(tmp_path):
    def strip(arrays):
        for key in [*arrays]:
            arrays[key.removeprefix("bert.")] = arrays.pop(key)

    model = pretrained.from_pretrained(with_tensors("bert_cls", tmp_path, strip), output_hidden_states=True)
    assert_equals_reference(model(inputs_of("bert_cls", model)), "bert_cls")


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_a_bias_of_the_logits_that_is_missing_is_zeros(name, tmp_path):
    folder = with_tensors(name, tmp_path / "without", lambda arrays: arrays.pop("final_logits_bias"))
    model, usual = pretrained.from_pretrained(folder), loaded(name)
    inputs = inputs_of(name, model)
    bias = open_tensors(checkpoint(name)).read("final_logits_bias")
    logits, expected = (to_numpy(one(inputs)["logits"]) for one in (model, usual))
    np.testing.assert_allclose(logits + bias, expected, rtol=0, atol=1e-5)
    pretrained.save_pretrained(model, tmp_path / "saved")
    saved = open_tensors(tmp_path / "saved")
    assert not saved.read("final_logits_bias").any() and {*saved} == {*open_tensors(checkpoint(name))}


def test_t5_without_a_table_of_the_logits_is_tied_whatever_the_config_says_and_not_scaled_if_it_says_so(tmp_path):
    old = {"tie_word_embeddings": False, "scale_decoder_outputs": None}  # version 4 had no second
    model, usual = pretrained.from_pretrained(copied("t5", tmp_path / "a", **old)), loaded("t5")
    inputs = inputs_of("t5", model)
    logits, scaled = (to_numpy(one(inputs)["logits"]) for one in (model, usual))
    np.testing.assert_allclose(logits, scaled * model.config["d_model"] ** 0.5, rtol=1e-5, atol=1e-4)
    pretrained.save_pretrained(model, tmp_path / "b")
    again = pretrained.from_pretrained(tmp_path / "b")
    np.testing.assert_array_equal(to_numpy(again(inputs)["logits"]), logits)


def test_stop_tokens_outside_the_vocabulary_stop_nothing(tmp_path):
    model = pretrained.from_pretrained(copied("gpt2", tmp_path))
    model.generation_config = {"eos_token_id": [50256, -1], "pad_token_id": 0}
    ids = np.array([[3, 5, 7]])
    written = model.generate(ids, max_new_tokens=4, jit_compile=False)
    np.testing.assert_array_equal(written, model.generate(ids, max_new_tokens=4, stop_tokens=(), jit_compile=False))


def test_older_configs_say_how_a_model_writes(tmp_path):
    folder = copied("gpt2", tmp_path, num_beams=3, length_penalty=0.5)
    (folder / "generation_config.json").unlink()
    strategy = pretrained.from_pretrained(folder).family.strategy({})
    assert (strategy.num_beams, strategy.length_penalty) == (3, 0.5)
    old = {"force_bos_token_to_be_generated": True, "bos_token_id": 5}
    assert generation_config.generate_options(old)["forced_tokens"] == {0: 5}
    assert generation_config.generate_options({**old, "forced_bos_token_id": 7})["forced_tokens"] == {0: 7}


def test_space_before_a_config_is_allowed(tmp_path):
    folder = copied("bert", tmp_path)
    (folder / "config.json").write_text("\n " + (folder / "config.json").read_text())
    assert pretrained.from_pretrained(folder).config == loaded("bert").config


def test_a_tokenizer_that_does_not_fit_is_not_saved(tmp_path):
    tokenizer = SimpleNamespace(vocabulary_size=10**6)
    with pytest.raises(ValueError, match="`tokenizer` must not have more tokens than the model. Received: .*=1000000"):
        pretrained.save_pretrained(loaded("bert"), tmp_path / "ours", tokenizer=tokenizer)
    assert not (tmp_path / "ours").exists()


def test_every_variable_needs_a_row(monkeypatch):
    family = registry.family_of(Config(loaded("bert").config))
    rows = family.rows
    monkeypatch.setattr(
        family, "rows", lambda self: [row for row in rows(self) if row.theirs != "cls.predictions.bias"]
    )
    monkeypatch.setattr(family, "ignored", {r"cls\.predictions\.bias": "for this test"})
    with pytest.raises(
        ValueError, match=r"Every variable must have a row .* Received: \['head_bias/bias'\] without one"
    ):
        pretrained.from_pretrained(checkpoint("bert"))


@pytest.mark.parametrize("model_type", sorted(registry.FILES))
def test_every_key_of_the_config_class_in_transformers_is_read_or_known_to_change_nothing(model_type):
    """Else a checkpoint that sets it would be silently another model here."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type).to_dict()
    base = transformers.PretrainedConfig().to_dict()
    values = {key: value for key, value in small(config).items() if key not in base or key in CHANGING or value}
    read = set()
    for task in registry.family_of(Config({"model_type": model_type})).tasks:
        family = read_family(values, task, tied=True)
        if task in ("causal_lm", "conditional_generation"):
            family.generation_options({})
        family.saved_values()
        read |= family.config._read
    left = {key for key in config if key not in base and key not in read and key not in CHANGING} - HARMLESS
    assert not left, left


HARMLESS = {
    # of training; new weights of ModernBERT are cut off at two standard deviations, the default
    "decoder_layerdrop", "encoder_layerdrop", "gradient_checkpointing", "initializer_cutoff_factor",
    # of how it is computed, not of what, or of how long a text may be
    "max_position_embeddings", "reorder_and_upcast_attn",
    "deterministic_flash_attn", "pretraining_tp", "reference_compile", "repad_logits_with_grad", "use_cache",
    # of tasks that no family here has
    "encoder_stride", "sparse_pred_ignore_index", "sparse_prediction", "summary_activation", "summary_first_dropout",
    "summary_last_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    # of the tokenizer and of generation, which reads what there is
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "forced_eos_token_id", "pad_token_id",
    "sep_token_id",
    # read before there is a family
    "tie_word_embeddings",
    # the same as another key, or read where another says so
    "classifier_dropout", "decoder_vocab_size", "max_window_layers",
    "num_hidden_layers",
    # of the table that is stored
    "sinusoidal_pos_embds",
}  # fmt: skip


def test_the_copies_of_these_tests_are_copies(tmp_path):
    tensors = open_tensors(with_tensors("bert", tmp_path, lambda arrays: None))
    assert all(np.array_equal(tensors.read(name), array) for name, array in arrays_of("bert").items())


def test_an_error_while_reading_comes_out_and_leaves_keras_as_it_was(tmp_path, monkeypatch):
    source = tmp_path / "ours"
    pretrained.save_pretrained(loaded("bert"), source)  # with checksums
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    with pytest.raises(ValueError, match="must have the checksum that the file gives.*; the file is damaged"):
        pretrained.from_pretrained(source)
    layer = keras.layers.Dense(3)
    with keras.StatelessScope():
        layer.build((None, 5))
    assert layer(np.ones((2, 5), "float32")).shape == (2, 3)


def test_large_tensors_are_taken_as_they_are(monkeypatch):
    monkeypatch.setattr(variable_loader, "LARGE", 1)
    model = pretrained.from_pretrained(checkpoint("bert_cls"))
    inputs = inputs_of("bert_cls", model)
    expected = to_numpy(loaded("bert_cls")(inputs)["logits"])
    np.testing.assert_allclose(to_numpy(model(inputs)["logits"]), expected, rtol=0, atol=1e-6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    model.fit(inputs, np.array([2, 0, 1]), verbose=0)
    assert np.abs(to_numpy(model(inputs)["logits"]) - expected).max() > 1e-4
    again = pretrained.from_pretrained(checkpoint("bert_cls"))  # what was read is nobody else's
    np.testing.assert_allclose(to_numpy(again(inputs)["logits"]), expected, rtol=0, atol=1e-6)


def test_values_are_assigned_where_keras_does_not_ask_for_them(monkeypatch):
    """Should another version of Keras not read `_initializer`."""
    monkeypatch.setattr(variable_loader, "functools", SimpleNamespace(partial=lambda *args: keras.initializers.Zeros()))
    model = pretrained.from_pretrained(checkpoint("bert"), output_hidden_states=True)
    assert assert_equals_reference(model(inputs_of("bert", model)), "bert")


@pytest.mark.parametrize("value", [0.0, "0", True, 2**31, [0, None], {}])
def test_ids_of_tokens_are_integers(tmp_path, value):
    with pytest.raises(ValueError, match=r"`sep_token_id` in config.json must be an integer of 32 bits.*sep_token_id="):
        pretrained.from_pretrained(copied("electra", tmp_path, sep_token_id=value))


@pytest.mark.parametrize("key", ["model_type", "tie_word_embeddings", "hidden_act", "architectures", "id2label"])
def test_long_values_are_shortened_in_errors(tmp_path, key):
    with pytest.raises(ValueError, match=f"{key}='xxxx") as error:
        pretrained.from_pretrained(copied("bert", tmp_path, **{key: "x" * 5000}))
    assert len(str(error.value)) < 1000
