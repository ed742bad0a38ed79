"""Whatever takes a folder or a file to write refuses a URL, of which `Path` would make a folder `gs:`."""

import re
from pathlib import Path

import pytest

from keras_tx import data, plots, pretrained, serving, text, training
from keras_tx.checks import local_path
from keras_tx.models import TextClassifier
from keras_tx.pretrained.files import write_tensors
from keras_tx.serving.serve import Server

CONFIG = {"model_type": "bert", "vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"intermediate_size": 5, "max_position_embeddings": 7}


def word_tokenizer():
    return text.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fun"])


def classifier():
    return TextClassifier(7, 3, num_layers=1, hidden_dim=2, num_heads=1, intermediate_dim=5)


WRITERS = {
    "export": ("path", lambda path: serving.export(classifier(), path)),
    "check": ("path", serving.check),
    "serve": ("folder", lambda path: Server(path)),
    "save": ("directory", lambda path: word_tokenizer().save(path)),
    "save_pretrained": (
        "directory",
        lambda path: pretrained.save_pretrained(pretrained.PretrainedModel(CONFIG, "base"), path),
    ),
    "write_tensors": ("directory", lambda path: write_tensors(path, [])),
    "write_tokens": ("directory", lambda path: data.write_tokens(["fun"], word_tokenizer(), path, verbose=0)),
    "Resume": ("directory", training.Resume),
    "plots": ("path", lambda path: plots.training_curves({"loss": [0.5, 0.3]}, path)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_url_and_a_null_character_are_refused_and_nothing_is_written(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, write = WRITERS[writer]
    for path in ("gs://bucket/reviews", "file:///tmp/reviews", Path("s3://bucket/reviews")):
        received = re.escape(f"Received: {name}={str(path)!r}")
        with pytest.raises(ValueError, match=f"The argument `{name}` must be a local path, and not a URL. {received}"):
            write(path)
    with pytest.raises(ValueError, match=rf"`{name}` must not contain a null character. Received: {name}='a\\x00b'"):
        write("a\0b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", ["C:/reviews", "C:\\reviews", "a:/b", "runs/gs:/a", "./gs:/a", "gs", "12:30/a", "a: b"]
)
def test_drives_and_folders_with_a_colon_are_local(path):
    assert local_path("path", path) == Path(path)
