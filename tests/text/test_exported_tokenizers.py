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

KINDS = ["llama3", "t5", "llama2", "marian", "words", "characters", "pieces"]
UPPER, LOWER = ["TITLE I É ÉI IDEAL", "İ ΣΑΣ"], ["title i é éi ideal", "i\u0307 σασ"]
PROCESS = """
import json, sys
import tensorflow as tf, tensorflow_text
texts, loaded, found = json.loads(sys.argv[2]), tf.saved_model.load(sys.argv[1]), {}
for kind, function in loaded.signatures.items():
    answer = function(texts=tf.constant([text.encode() for text in texts]))
    found[kind] = [answer["ids"].numpy().tolist(), [text.decode() for text in answer["decoded"].numpy()]]
assert not {"keras_tx", "tokenizers", "sentencepiece"} & set(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tokenizers(made, uncased, sentences):
    found = {
        "bert": uncased,
        "bert with accents": text.BertTokenizer.train(sentences + LOWER, 300, strip_accents=False),
    }
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
    signatures = {kind.replace(" ", "_"): signature(ours) for kind, ours in tokenizers.items()}
    tf.saved_model.save(module, str(directory), signatures=signatures)
    return directory


def test_they_need_no_table_no_python_function_and_no_file(exported):
    assert not list((exported / "assets").rglob("*"))
    saved = saved_model_pb2.SavedModel.FromString((exported / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    ops = {node.op for nodes in [graph.node, *(f.node_def for f in graph.library.function)] for node in nodes}
    assert {"SentencepieceOp", "StringSplitV2", "FastWordpieceTokenizeWithOffsets"} <= ops
    assert not [op for op in ops if re.search("Table|PyFunc|Xla|VarHandle|Trim|Detokenize", op)]


@pytest.mark.slow
@pytest.mark.process
def test_another_process_with_a_turkish_locale_does_the_same(exported, tokenizers, sentences, tmp_path):
    """In Turkish the capital of "i" is another letter."""
    texts = [*sentences, "a<mask>  \x00 ΣΑΣ", "[MASK]ing \x00 ΣΑΣ", "", *UPPER, *TRICKY[:9]]
    environment = os.environ | {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}
    command = [sys.executable, "-c", PROCESS, str(exported), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, ours in tokenizers.items():
        rows = np.asarray(ours(texts)["token_ids"])
        assert found.pop(kind.replace(" ", "_")) == [rows.tolist(), ours.decode(rows)], kind
    assert not found
    with_accents = tokenizers["bert with accents"]
    assert with_accents.tokenize(UPPER).to_list() == with_accents.tokenize(LOWER).to_list()
    words = tokenizers["words"]
    assert words.tokenize(UPPER) == words.tokenize(LOWER) and words.unknown_id not in sum(words.tokenize(UPPER), [])
