"""Exported tokenizers answer in a process of their own: no Python of ours, no table, no file, whatever the locale."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from keras_tx import text
from tests.text.made import TRICKY

KINDS = ["llama3", "t5", "llama2", "marian"]
SPELLINGS = ["TITLE I É ÉI IDEAL", "İ ΣΑΣ"]
PROCESS = """
import json, sys
import tensorflow as tf, tensorflow_text
version, texts, words, spellings = sys.argv[1], *map(json.loads, sys.argv[2:])
loaded, found = tf.saved_model.load(version), {}
for kind, function in loaded.signatures.items():
    answer = function(texts=tf.constant([text.encode() for text in texts]))
    found[kind] = [answer["ids"].numpy().tolist(), [text.decode() for text in answer["decoded"].numpy()]]
assert not {"keras_tx", "tokenizers", "sentencepiece"} & set(sys.modules)
from keras_tx.text import BertTokenizer
trained = BertTokenizer.train(words, 300, strip_accents=False)
found["trained"] = [trained.vocabulary, trained.tokenize(spellings).to_list()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tokenizers(made, uncased):
    found = {"bert": uncased}
    for kind in KINDS:
        ours = text.load_tokenizer(made / kind)
        found[kind] = type(ours)(**(ours.get_config() | {"pad_token": ours.vocabulary[3]}))
    return found


@pytest.fixture(scope="module")
def exported(tokenizers, tmp_path_factory):
    """The directory of one SavedModel with a signature for each tokenizer."""

    def signature(ours):
        def both_ways(texts):
            ids = ours(texts)["token_ids"]
            return {"ids": ids, "decoded": ours.decode(ids)}

        return tf.function(both_ways, input_signature=[tf.TensorSpec([None], tf.string, name="texts")])

    module, directory = tf.Module(), tmp_path_factory.mktemp("exported") / "1"
    signatures = {kind: signature(ours) for kind, ours in tokenizers.items()}
    tf.saved_model.save(module, str(directory), signatures=signatures)
    return directory


def test_they_need_no_table_no_python_function_and_no_file(exported):
    assert not list((exported / "assets").rglob("*"))
    saved = saved_model_pb2.SavedModel.FromString((exported / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    ops = {node.op for nodes in [graph.node, *(f.node_def for f in graph.library.function)] for node in nodes}
    assert {"SentencepieceOp", "RegexSplitWithOffsets", "FastWordpieceTokenizeWithOffsets"} <= ops
    assert not [op for op in ops if re.search("Table|PyFunc|Xla|VarHandle|Trim|Detokenize", op)]


@pytest.mark.slow
@pytest.mark.process
def test_another_process_with_a_turkish_locale_does_the_same(exported, tokenizers, sentences, tmp_path):
    """There the capital of "i" is another letter, and hashes have another seed."""
    texts = [*sentences, "a<mask>  \x00 ΣΑΣ", "[MASK]ing \x00 ΣΑΣ", "", *SPELLINGS, *TRICKY[:9]]
    words = [*sentences, "title ideal é éi σας"] * 2
    environment = os.environ | {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "77"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", PROCESS, str(exported), *map(json.dumps, (texts, words, SPELLINGS))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    vocabulary, ids = found.pop("trained")
    here = text.BertTokenizer.train(words, 300, strip_accents=False)
    assert vocabulary == here.vocabulary
    assert ids == here.tokenize(["title i é éi ideal", "i\u0307 σασ"]).to_list()
    for kind, ours in tokenizers.items():
        rows = np.asarray(ours(texts)["token_ids"])
        assert found.pop(kind) == [rows.tolist(), ours.decode(rows)], kind
    assert not found
