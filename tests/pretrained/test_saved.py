"""What `save_pretrained` writes can be loaded, here and by transformers, or an error says why it cannot be saved."""

import json
import re

import numpy as np
import pytest
import torch
import transformers

from keras_tx.pretrained import PretrainedModel, from_pretrained, save_pretrained
from tests.tools import to_numpy

GPT2 = {"model_type": "gpt2", "vocab_size": 23, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 11}
BERT = {
    **{"model_type": "bert", "vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3},
    **{"intermediate_size": 14, "max_position_embeddings": 11, "id2label": {"0": "a", "1": "b", "2": "c"}},
}
T5 = {"model_type": "t5", "vocab_size": 23, "d_model": 12, "d_kv": 4, "d_ff": 14, "num_heads": 3, "num_layers": 1}
IDS = np.array([[5, 9, 7, 1]])


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, None), (1e5, "float16")])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(value, dtype, tmp_path):
    model = PretrainedModel(GPT2, "causal_lm")
    save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weight = model.family.embedding.positions.embeddings
    changed = to_numpy(weight).copy()
    changed[3, 5] = value
    weight.assign(changed)
    with pytest.raises(ValueError, match=r"'transformer.wpe.weight' must be finite"):
        save_pretrained(model, tmp_path, dtype=dtype)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({}, {"max_length": "20"}, "`max_length` in generation_config.json must be a positive integer, .*='20'"),
        ({}, {"temperature": np.nan}, "`temperature` in generation_config.json must be .* Received: temperature=nan"),
        ({}, {"of_a_user": [np.inf]}, "generation_config.json must be a JSON object .* Received: the number Infinity"),
        ({"of_a_user": np.nan}, {}, "config.json must be a JSON object in UTF-8. Received: the number NaN"),
        (
            {"id2label": {0: "a", "0": "b"}},
            {},
            "config.json must be a JSON object in UTF-8. Received: the key '0' twice",
        ),
    ],
)
def test_settings_that_could_not_be_read_again_do_not_replace_a_checkpoint(config, settings, message, tmp_path):
    save_pretrained(PretrainedModel(GPT2, "causal_lm"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = PretrainedModel({**GPT2, **config}, "causal_lm")
    model.generation_config.update(settings)
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_head_of_other_classes_of_modernbert_is_none_for_answers(tmp_path):
    sizes = {name: BERT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = {**sizes, "model_type": "modernbert", "intermediate_size": 14, "id2label": BERT["id2label"]}
    save_pretrained(PretrainedModel(config, "sequence_classification"), tmp_path / "classifier")
    with pytest.raises(ValueError, match=r"'classifier.weight' must have the shape \(2, 12\). Received: \(3, 12\)"):
        from_pretrained(tmp_path / "classifier", task="question_answering")
    model = PretrainedModel(config, "question_answering")
    save_pretrained(model, tmp_path / "answers")
    again = from_pretrained(tmp_path / "answers")
    np.testing.assert_array_equal(to_numpy(again(IDS)["start_logits"]), to_numpy(model(IDS)["start_logits"]))


@pytest.mark.parametrize("labels", [{}, {"num_labels": 2}])
def test_answers_have_a_begin_and_an_end_whatever_labels_the_checkpoint_had(labels, tmp_path):
    save_pretrained(PretrainedModel({**BERT, **labels}, "sequence_classification"), tmp_path / "classifier")
    with pytest.warns(UserWarning, match="lacks tensors of the task 'question_answering'"):
        model = from_pretrained(tmp_path / "classifier", task="question_answering")
    save_pretrained(model, tmp_path / "answers")
    theirs, report = transformers.BertForQuestionAnswering.from_pretrained(
        tmp_path / "answers", output_loading_info=True
    )
    assert not any(report.values()) and theirs.config.num_labels == 2
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).start_logits.numpy()
    np.testing.assert_allclose(to_numpy(model(IDS)["start_logits"]), expected, rtol=0, atol=2e-5)


def test_a_number_of_labels_does_not_contradict_their_names(tmp_path):
    save_pretrained(PretrainedModel({**GPT2, "num_labels": 3}, "sequence_classification"), tmp_path / "3")
    with pytest.warns(UserWarning, match="lacks tensors"):
        model = from_pretrained(tmp_path / "3", num_labels=5)
    save_pretrained(model, tmp_path / "5")
    assert "num_labels" not in config_of(tmp_path / "5")
    assert transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "5").score.weight.shape == (5, 12)
    contradicting = PretrainedModel({**BERT, "num_labels": 2}, "sequence_classification")
    save_pretrained(contradicting, tmp_path / "names")
    assert from_pretrained(tmp_path / "names")(IDS)["logits"].shape == (1, 3)
    assert transformers.BertForSequenceClassification.from_pretrained(tmp_path / "names").config.num_labels == 3


def test_the_tokenizer_is_copied_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(PretrainedModel(GPT2, "causal_lm"), "first")
    (tmp_path / "first/vocab.json").write_text("{}")
    model = from_pretrained("first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save_pretrained(model, tmp_path / "second")
    assert (tmp_path / "second/vocab.json").read_text() == "{}"
    (tmp_path / "first").rename(tmp_path / "moved")
    rule = "No files of a tokenizer are saved, because the directory that the model was loaded from no longer exists: "
    with pytest.warns(UserWarning, match=re.escape(f"{rule}{str(tmp_path / 'first')!r}. Pass `tokenizer`")):
        save_pretrained(model, tmp_path / "third")


@pytest.mark.parametrize("task", ["SequenceClassification", "QuestionAnswering"])
def test_the_start_of_a_target_is_said_to_transformers(task, tmp_path):
    model = PretrainedModel(T5, {"SequenceClassification": "sequence_classification"}.get(task, "question_answering"))
    save_pretrained(model, tmp_path)
    with torch.no_grad():
        theirs = getattr(transformers, f"T5For{task}").from_pretrained(tmp_path)(torch.tensor(IDS))
    for name, value in model(IDS).items():
        if name.endswith("logits"):
            np.testing.assert_allclose(to_numpy(value), getattr(theirs, name).numpy(), rtol=0, atol=2e-5)


def test_of_several_forced_ends_the_first_id_is_written(tmp_path):
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "bos_token_id": 0, "eos_token_id": 2}))
    theirs.generation_config.update(max_new_tokens=4, pad_token_id=1, forced_eos_token_id=[8, 5], eos_token_id=2)
    theirs.save_pretrained(tmp_path)
    prompt = np.array([[5, 9, 7, 11, 6]])
    with torch.no_grad():
        expected = theirs.eval().generate(torch.tensor(prompt), do_sample=False).numpy()
    assert expected[0, -1] == 5
    np.testing.assert_array_equal(from_pretrained(tmp_path).generate(prompt, jit_compile=False), expected)
