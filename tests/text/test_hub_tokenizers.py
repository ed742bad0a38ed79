"""Byte-pair and SentencePiece tokenizers: ids and texts are those of transformers, whatever the files."""

import gzip
import json

import keras
import numpy as np
import pytest
import transformers
from transformers import AutoTokenizer

from keras_tx import text
from tests.pretrained.tiny import checkpoint
from tests.text.made import TRICKY
from tests.tools import SHARED

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
BYTE_PAIRS = ["gpt2", "gpt2_prefix", "roberta", "roberta_old", "llama3", "qwen2", "qwen2_old"]
PIECES = ["t5", "xlmr", "camembert", "llama2", "llama2_old"]
KINDS = [*BYTE_PAIRS, *PIECES, "marian"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world! It's 42 degrees, isn't it?",
    "attention is all you need",
    "Ünïcödé naïve café — 東京 \U0001f600",
    "  leading and   repeated spaces ",
    "",
]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, made):
    """Ours and transformers', from the same directory."""
    directory = made / request.param
    return text.load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def texts(sentences):
    return TRICKY + sentences


def test_the_class_is_that_of_the_files(pair, made):
    ours, theirs = pair
    assert len(TRICKY) > 100
    kind = text.MarianTokenizer if "Marian" in type(theirs).__name__ else None
    kind = kind or (text.BytePairTokenizer if "Ġ" in "".join(ours.vocabulary) else text.SentencePieceTokenizer)
    assert type(ours) is kind
    assert ours.vocabulary == theirs.convert_ids_to_tokens(range(len(theirs)))
    assert ours.vocabulary_size == len(theirs)


def test_rows_and_texts(pair, texts):
    ours, theirs = pair
    assert ours.tokenize(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    rows = theirs(texts)["input_ids"]
    assert [ours(one)["token_ids"].tolist() for one in texts] == rows
    rows = rows + np.random.default_rng(7).integers(0, ours.vocabulary_size, (50, 13)).tolist()
    assert ours.decode(rows) == theirs.batch_decode(rows, skip_special_tokens=True)
    assert ours.decode(rows, skip_special_tokens=False) == theirs.batch_decode(rows)


def test_special_tokens(pair):
    ours, theirs = pair
    assert (ours.pad_id, ours.unknown_id) == (theirs.pad_token_id, theirs.unk_token_id)
    assert (ours.sep_id, ours.mask_id) == (theirs.eos_token_id, theirs.mask_token_id)
    begins = theirs("a")["input_ids"][0]
    assert ours.cls_id == (begins if begins in (theirs.bos_token_id, theirs.cls_token_id) else None)
    assert set(ours.special_tokens.values()) <= set(ours.vocabulary)


def test_rows_cut_at_every_length(pair, sentences):
    ours, theirs = pair
    single = len(theirs("")["input_ids"])
    for side in ("right", "left"):
        arguments = ours.get_config() | {"truncation_side": side, "max_length": None}
        own = type(ours)(**arguments)
        theirs.truncation_side = side
        for length in range(max(1, single), 17):
            expected = theirs(sentences, truncation=True, max_length=length)["input_ids"]
            assert [own(one, max_length=length)["token_ids"].tolist() for one in sentences] == expected
    theirs.truncation_side = "right"


@pytest.mark.parametrize("kind", ["gpt2", "roberta", "llama3", "t5", "xlmr"])
def test_pairs_cut_at_every_length(made, kind):
    ours = text.load_tokenizer(made / kind, **({} if kind in ("roberta", "t5", "xlmr") else {"pad_token": "a"}))
    theirs = AutoTokenizer.from_pretrained(made / kind)
    first = ["a " * a for a in range(7) for _ in range(7)]
    second = ["b " * b for _ in range(7) for b in range(7)]
    for length in (None, 5, 6, 7, 8, 11, 12):
        expected = theirs(first, second, truncation=length is not None, max_length=length)["input_ids"]
        rows = ours(first, second, max_length=length)["token_ids"].tolist()
        assert [row[: len(own)] for row, own in zip(rows, expected, strict=True)] == expected
        assert all(set(row[len(own) :]) <= {ours.pad_id} for row, own in zip(rows, expected, strict=True))


def test_saved_and_read_back(pair, texts, tmp_path):
    ours, theirs = pair
    ours.save(tmp_path / "ours")
    again = text.load_tokenizer(tmp_path / "ours")
    assert type(again) is type(ours) and again.get_config() == ours.get_config()
    assert again.vocabulary == ours.vocabulary and again._templates == ours._templates
    name = "MarianTokenizer" if isinstance(ours, text.MarianTokenizer) else "PreTrainedTokenizerFast"
    read = getattr(transformers, name).from_pretrained(tmp_path / "ours")
    assert read(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert type(ours).from_transformers(theirs).tokenize(texts) == ours.tokenize(texts)


def test_keras_configuration_round_trip(pair):
    ours, _ = pair
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(keras.saving.serialize_keras_object(ours))))
    assert type(again) is type(ours) and again.get_config() == ours.get_config()


def test_marian_s_target_side(made, texts):
    ours = text.load_tokenizer(made / "marian")
    theirs = AutoTokenizer.from_pretrained(made / "marian")
    expected = theirs(text_target=texts)["input_ids"]
    assert [ours.target(one)["token_ids"].tolist() for one in texts] == expected
    assert expected != theirs(texts)["input_ids"]


def test_spaces_are_tidied_on_request(made):
    for kind in ("t5", "gpt2"):
        tokenizer = text.load_tokenizer(made / kind)
        ids = tokenizer.tokenize("a ' m , a .")
        tidy = tokenizer.decode(ids, clean_up_tokenization_spaces=True)
        assert (tokenizer.decode(ids), tidy) == ("a ' m , a .", "a'm, a.")
        own = type(tokenizer)(**(tokenizer.get_config() | {"clean_up_tokenization_spaces": True}))
        assert own.decode(ids) == tidy and own.decode(ids, clean_up_tokenization_spaces=False) == "a ' m , a ."


@pytest.mark.parametrize("name", ["bart", "bert", "distilbert", "electra", "gpt2", "llama", "marian", "roberta", "t5"])
def test_tokenizers_beside_checkpoints(name):
    """As transformers saves them with a model."""
    ours, theirs = text.load_tokenizer(checkpoint(name)), AutoTokenizer.from_pretrained(checkpoint(name))
    rows = theirs(TEXTS)["input_ids"]
    assert [np.asarray(ours(one)["token_ids"]).tolist() for one in TEXTS] == rows
    assert [ours.decode(row) for row in rows] == theirs.batch_decode(rows, skip_special_tokens=True)
    if name != "marian":  # which has no pairs
        pair = np.asarray(ours(TEXTS[2], TEXTS[0])["token_ids"]).tolist()
        assert pair == theirs(TEXTS[2], TEXTS[0])["input_ids"]


@pytest.mark.skipif(
    not (SHARED / "data" / "multi30k").is_dir(),
    reason="needs the captions of Multi30k, which are not part of the repository",
)
def test_real_sentences(made):
    files = sorted((SHARED / "data" / "multi30k").glob("val.*.gz"))
    lines = [line for file in files for line in gzip.open(file, "rt", encoding="utf-8").read().splitlines()[:300]]
    for kind in KINDS:
        expected = AutoTokenizer.from_pretrained(made / kind)(lines, add_special_tokens=False)["input_ids"]
        assert text.load_tokenizer(made / kind).tokenize(lines) == expected
