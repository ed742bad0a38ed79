"""The examples about checkpoints, run as a newcomer runs them: offline, on a file of a few lines."""

import json
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from keras_tx import pretrained, text
from keras_tx.pretrained.files import open_tensors
from tests.test_examples import EXAMPLES, few_signatures, run, run_here, smaller
from tests.tools import to_numpy

pytestmark = [pytest.mark.tensorflow, pytest.mark.process]
WORDS = {"dull": "negative", "moving": "positive"}
TINY = ("--dataset", "mine.jsonl", "--epochs", "1", "--max-length", "11")
# For `smaller`: says what has been saved when the curves are drawn.
DRAWN = ("plots.training_curves(", "print('drawn beside', sorted(os.listdir(out))); plots.training_curves(")
SENTENCES = ["a moving film", "a dull, dull film number 7"]
# What the examples have no need of is as if it were not installed.
MISSING = dict.fromkeys(["torch", "transformers", "huggingface_hub"])
WITHOUT = f"import runpy, sys; sys.modules.update({MISSING}); "
WITHOUT += "del sys.argv[0]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
WITHOUT += "runpy.run_path(sys.argv[0], run_name='__main__')"


def run_without(folder, name, *arguments, examples):
    """As `run`, without torch, transformers and huggingface_hub."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, "-c", WITHOUT, str(examples / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With mine.jsonl in it."""
    folder = tmp_path_factory.mktemp("reviews")
    rows = [{"text": f"a {word} film number {i}", "label": label} for i in range(12) for word, label in WORDS.items()]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def finetuned(folder):
    """The folder that the example wrote, computing in bfloat16, and what it printed."""
    # The small BERT learns without a graph, in four epochs; what fine-tunes it learns in a graph, in one.
    less = ('metrics=["accuracy"])', 'metrics=["accuracy"], run_eagerly=epochs == 4)')
    examples = smaller(folder / "examples", "finetune_bert.py", less, DRAWN)
    printed = run_without(folder, "finetune_bert.py", *TINY, "--bfloat16", examples=examples)
    return folder / "saved_models/finetune_bert", printed


@pytest.fixture(scope="module")
def adapted(folder, finetuned):
    """The same of a run with LoRA in float32, from the checkpoint that the other run made, on columns of other names.

    The largest number of tokens is the example's own, for which the checkpoint has not enough positions. Here, too,
    MISSING are as if they were not installed.
    """
    rows = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    (folder / "mine.csv").write_text("\n".join(["review,opinion", *(f"{row['text']},{row['label']}" for row in rows)]))
    arguments = ["--checkpoint", str(finetuned[0] / "small_bert"), "--lora", "3", "--learning-rate", "0.01"]
    arguments += ["--dataset", "mine.csv", "--text-column", "review", "--label-column", "opinion", "--epochs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        for name in MISSING:
            patch.setitem(sys.modules, name, None)
        printed = run_here(folder, "finetune_bert.py", *arguments, "--out", "adapted")
    return folder / "adapted/finetune_bert", printed


def features_of(directory):
    """SENTENCES as the tokenizer of a directory gives them to a model."""
    ids = to_numpy(text.load_tokenizer(directory)(SENTENCES)["token_ids"])
    return {"input_ids": ids, "attention_mask": (ids != 0).astype("int32")}


def tensors_of(directory):
    tensors = open_tensors(directory)
    return {name: np.array(tensors.read(name)) for name in tensors}


def test_bert_features_serves_a_head_on_the_vectors_of_the_checkpoint(folder, tmp_path):
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tensorflow_text")  # brings the ops of the graph
    few = few_signatures("serving_default", "embed")
    # BERT learns without a graph, whose tracing takes longer; its head learns in one.
    eager = ("keras.optimizers.Adam(schedule), loss,", "keras.optimizers.Adam(schedule), loss, run_eagerly=True,")
    examples = smaller(tmp_path / "examples", "bert_features.py", few, eager, DRAWN)
    printed = run(folder, "bert_features.py", *TINY, quiet=True, examples=examples)
    assert "saved_models/bert_features/1: ok" in printed and re.search(r"test accuracy [01]\.\d{4}\n", printed)
    assert "Trainable params: 130 " in printed  # 64 * 2 + 2
    assert "drawn beside ['1', 'checkpoint']" in printed
    assert len(re.findall(r"^ *(?:negative|positive) [01]\.\d{3}  \w", printed, re.MULTILINE)) == 3
    out = folder / "saved_models/bert_features"
    for name in ("1/saved_model.pb", "checkpoint/model.safetensors", "training_curves.png"):
        assert (out / name).stat().st_size > 1000
    served = tf.saved_model.load(str(out / "1")).signatures["embed"](text=tf.constant(SENTENCES))["embedding"]
    inputs = features_of(out / "checkpoint")
    vectors = to_numpy(pretrained.from_pretrained(out / "checkpoint")(inputs)["last_hidden_state"])
    real = inputs["attention_mask"][..., None]
    expected = (vectors * real).sum(axis=1) / real.sum(axis=1)
    np.testing.assert_allclose(served.numpy(), expected, rtol=0, atol=1e-5)


def test_bert_features_cuts_texts_where_the_positions_of_a_checkpoint_end(folder, finetuned, tmp_path):
    stop = "print(tokenizer(['a film ' * 97])['token_ids'].shape)\nraise SystemExit\n# 6. Fit the head\n"
    examples = smaller(tmp_path / "examples", "bert_features.py", ("# 6. Fit the head\n", stop))
    arguments = ("--checkpoint", str(finetuned[0] / "small_bert"), "--dataset", "mine.jsonl", "--out", "cut")
    printed = run_here(folder, "bert_features.py", *arguments, examples=examples)
    assert printed.endswith("\n(1, 11)\n") and "the checkpoint has 11 positions: longer texts are cut" in printed


def test_finetune_bert_saves_what_it_trained_with_the_names_of_the_labels(finetuned):
    out, printed = finetuned
    assert "drawn beside ['checkpoint', 'small_bert']" in printed
    found = re.search(r"test accuracy (\S+), loaded again (\S+); largest difference (\S+)\n", printed)
    assert found[1] == found[2] and float(found[3]) <= 1e-4
    assert (out / "training_curves.png").stat().st_size > 1000
    before, after = tensors_of(out / "small_bert"), tensors_of(out / "checkpoint")
    assert set(after) == {f"bert.{name}" for name in before} | {"classifier.weight", "classifier.bias"}
    trained = sum(tensor.size for tensor in after.values())
    assert f"\n{trained} of {trained} weights are trained\n" in printed
    moved = {name for name in before if not np.array_equal(before[name], after[f"bert.{name}"])}
    assert {name for name in before if name.endswith("weight")} <= moved

    assert {tensor.dtype.name for tensor in after.values()} == {"float32"}
    query = after["bert.encoder.layer.0.attention.self.query.weight"]
    assert np.any(query.view("uint32") & 0xFFFF)  # more than bfloat16 holds

    model = pretrained.from_pretrained(out / "checkpoint")
    assert model.task == "sequence_classification"
    assert model.config["id2label"] == {"0": "negative", "1": "positive"}
    assert text.load_tokenizer(out / "checkpoint").max_length == 11
    sentences = re.findall(r"^ *(negative|positive) ([01]\.\d{3})  (.*)$", printed, re.MULTILINE)
    tokens = to_numpy(text.load_tokenizer(out / "checkpoint")([sentence for *_, sentence in sentences])["token_ids"])
    logits = to_numpy(model(tokens, attention_mask=tokens != 0)["logits"]).astype("float64")
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert len(sentences) == 2  # the test split
    for (label, chance, _), row in zip(sentences, chances, strict=True):
        assert model.config["id2label"][str(row.argmax())] == label and abs(row.max() - float(chance)) < 0.02


def test_finetune_bert_saves_lora_as_part_of_the_kernels(finetuned, adapted):
    """Kernels of the encoder differ from the checkpoint's by products of thin matrices, tables and norms not at all."""
    out, printed = adapted
    assert "the checkpoint has 11 positions: longer texts are cut there\n" in printed
    assert text.load_tokenizer(out / "checkpoint").max_length == 11
    classified = re.findall(r"^ *(?:negative|positive) [01]\.\d{3}  a .*film number \d+$", printed, re.MULTILINE)
    assert len(classified) == 2  # the test split
    found = re.search(r"test accuracy (\S+), loaded again (\S+); largest difference (\S+)\n", printed)
    assert found[1] == found[2] and float(found[3]) <= 1e-4
    before, after = tensors_of(finetuned[0] / "small_bert"), tensors_of(out / "checkpoint")
    thin = {name for name in before if name.startswith("encoder") and before[name].ndim == 2}
    assert len(thin) == 12
    trained = 0
    for name, tensor in before.items():
        other = after[f"bert.{name}"]
        if name in thin:
            changed = np.linalg.svd(other - tensor, compute_uv=False)
            assert changed[0] > 1e-4 and changed[3] < 1e-3 * changed[0], name
            trained += 3 * sum(tensor.shape)
        elif name.startswith("pooler") or name.replace(".bias", ".weight") in thin:
            trained += tensor.size
        else:
            np.testing.assert_array_equal(other, tensor, err_msg=name)
    trained += after["classifier.weight"].size + after["classifier.bias"].size
    assert f"\n{trained} of " in printed


@pytest.mark.parametrize("results", ["finetuned", "adapted"])
def test_transformers_loads_what_finetune_bert_saved(results, request):
    import torch
    import transformers

    directory = request.getfixturevalue(results)[0] / "checkpoint"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    architecture = transformers.AutoModelForSequenceClassification
    theirs, report = architecture.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    assert theirs.config.id2label == {0: "negative", 1: "positive"}
    inputs = features_of(directory)
    rows = transformers.AutoTokenizer.from_pretrained(directory)(SENTENCES, padding=True, truncation=True)
    np.testing.assert_array_equal(rows["input_ids"], inputs["input_ids"])
    with torch.no_grad():
        expected = theirs.eval()(**{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()
    actual = to_numpy(pretrained.from_pretrained(directory)(inputs)["logits"])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
