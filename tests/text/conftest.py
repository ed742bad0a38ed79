"""Tokenizers of this package and of transformers over vocabularies that are trained here, once for all tests."""

from functools import cache
from typing import Any, NamedTuple

import pytest
from transformers import BertTokenizer as HuggingFace

from keras_tx import text
from keras_tx.text import BertTokenizer, load_tokenizer
from tests.text.made import make

SENTENCES = [
    "Two young, White males are outside near many bushes.",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche!",
    "A man's dog isn't barking (it sleeps); don't wake it...",
    "Ein Mädchen läuft über die größte Straße, 12.5 km weit.",
    "Le garçon a mangé une pêche à l'ombre d'un chêne.",
    "Ο Οδυσσέας και η Θάλασσα. Быстрая бурая лиса прыгает. 東京 都",
    "The unbelievable readability of well-known, unread readers' rereading.",
    "e\u0301 cafe\u0301 naïve fi fl ff 1 2 ½ don't won't we've they're I'm he's do not",
]


@pytest.fixture(scope="session")
def sentences():
    return SENTENCES


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Our tokenizer and transformers', which reads what ours saved, with and without capital letters."""

    def pair(lowercase):
        ours = BertTokenizer.train(SENTENCES * 3, 400, lowercase=lowercase)
        directory = tmp_path_factory.mktemp("tokenizer")
        ours.save(directory)
        theirs = HuggingFace.from_pretrained(directory)
        assert theirs.get_vocab() == {token: i for i, token in enumerate(ours.vocabulary)}
        assert theirs.do_lower_case == lowercase
        return ours, theirs

    return {"uncased": pair(True), "cased": pair(False)}


@pytest.fixture(scope="session", params=["uncased", "cased"])
def pair(request, pairs):
    return pairs[request.param]


@pytest.fixture(scope="session")
def uncased(pairs):
    return pairs["uncased"][0]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Directories of tokenizers, one for each kind."""
    other = ["Zwei junge weiße Männer laufen über die Straße.", "Ein Mädchen schläft in der Nähe vieler Büsche."]
    root = make(tmp_path_factory.mktemp("made"), SENTENCES * 3, (SENTENCES + other) * 3)
    words = [*SENTENCES, "title i é éi ideal i\u0307 σασ"]
    text.WordLevelTokenizer.train(words, 300, normalizer=["NFC", "Lowercase"]).save(root / "words")
    text.CharacterTokenizer.train(SENTENCES).save(root / "characters")
    text.BytePairTokenizer.train(SENTENCES * 3, 400).save(root / "pairs")
    text.SentencePieceTokenizer.train(SENTENCES * 3, 400).save(root / "pieces")
    return root


class GraphFunctions(NamedTuple):
    """A tokenizer, and its methods as functions of a graph that never changes; each is traced at its first call."""

    tokenizer: Any
    encode: Any
    decode: Any
    decode_all: Any


@pytest.fixture(scope="session")
def graphs(made):
    """From the kind of a tokenizer to its `GraphFunctions`."""
    tf = pytest.importorskip("tensorflow")

    @cache
    def functions(kind):
        ours = load_tokenizer(made / kind)
        ids = [tf.RaggedTensorSpec([None, None], tf.int32)]
        encode = tf.function(ours.tokenize, input_signature=[tf.TensorSpec([None], tf.string)])
        decode_all = tf.function(lambda x: ours.decode(x, skip_special_tokens=False), input_signature=ids)
        return GraphFunctions(ours, encode, tf.function(ours.decode, input_signature=ids), decode_all)

    return functions
