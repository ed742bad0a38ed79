"""What holds for every tokenizer: the face that they share."""

import json

import keras
import numpy as np
import pytest

from keras_tx import text

KINDS = {
    "bert": text.BertTokenizer,
    "gpt2": text.BytePairTokenizer,
    "roberta": text.BytePairTokenizer,
    "llama3": text.BytePairTokenizer,
    "qwen2": text.BytePairTokenizer,
    "t5": text.SentencePieceTokenizer,
    "xlmr": text.SentencePieceTokenizer,
    "camembert": text.SentencePieceTokenizer,
    "llama2": text.SentencePieceTokenizer,
    "marian": text.MarianTokenizer,
    "words": text.WordLevelTokenizer,
    "characters": text.CharacterTokenizer,
    "pairs": text.BytePairTokenizer,
    "pieces": text.SentencePieceTokenizer,
}
IDS = {"unknown_token": "unknown_id", "pad_token": "pad_id", "cls_token": "cls_id", "sep_token": "sep_id"}
IDS |= {"mask_token": "mask_id"}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, made, uncased):
    return uncased if request.param == "bert" else text.load_tokenizer(made / request.param)


def lists(rows):
    return [np.asarray(row).tolist() for row in (rows.to_list() if hasattr(rows, "to_list") else rows)]


def test_every_public_tokenizer_is_in_the_contract():
    public = [getattr(text, name) for name in text.__all__]
    classes = {thing for thing in public if isinstance(thing, type)} - {text.Tokenizer}
    assert classes == set(KINDS.values())
    assert all(issubclass(one, text.Tokenizer) for one in classes)


def test_the_class_is_that_of_its_kind(tokenizer, request):
    kind = request.node.callspec.params["tokenizer"]
    assert type(tokenizer) is KINDS[kind] and isinstance(tokenizer, text.Tokenizer)
    assert tokenizer.in_graph is True and tokenizer.not_in_graph is None


def test_tokens_and_ids(tokenizer):
    size = tokenizer.vocabulary_size
    assert isinstance(tokenizer.vocabulary, list) and len(tokenizer.vocabulary) == size
    assert [tokenizer.token_to_id(token) for token in tokenizer.vocabulary] == list(range(size))
    assert [tokenizer.id_to_token(id) for id in np.arange(size)] == tokenizer.vocabulary
    assert {tokenizer.id_to_token(id) for id in (np.array(1), keras.ops.convert_to_tensor(1))} == {
        tokenizer.vocabulary[1]
    }
    for name, attribute in IDS.items():
        token = tokenizer.special_tokens.get(name)
        assert getattr(tokenizer, attribute) == (None if token is None else tokenizer.token_to_id(token))
    assert set(tokenizer.special_tokens) <= set(IDS)
    with pytest.raises(
        ValueError, match=rf"`id` must be an integer in \[0, {size}\), the vocabulary. Received: id={size}"
    ):
        tokenizer.id_to_token(size)
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(ValueError, match=rf"`id` must be an integer in .* Received: id={wrong!r}"):
            tokenizer.id_to_token(wrong)
    with pytest.raises(ValueError, match="`token` must be in the vocabulary. Received: token='no such token'"):
        tokenizer.token_to_id("no such token")


def test_rows_are_padded_on_the_right_and_cut(tokenizer, sentences):
    texts = sentences[:2] + ["a"]
    plain = lists(tokenizer.tokenize(texts))
    rows = [np.asarray(tokenizer(one)["token_ids"]).tolist() for one in texts]
    for ids, row in zip(plain, rows, strict=True):
        start = row.index(ids[0])
        assert row[start : start + len(ids)] == ids
        assert start == (tokenizer.cls_id is not None and row[0] == tokenizer.cls_id)
    longest = max(map(len, rows))
    if tokenizer.pad_id is None:
        with pytest.raises(ValueError, match="`pad_token` must be given to pad rows"):
            tokenizer(texts)
        tokenizer = type(tokenizer)(**(tokenizer.get_config() | {"pad_token": tokenizer.vocabulary[3]}))
    padded = np.asarray(tokenizer(texts)["token_ids"])
    assert padded.dtype == np.int32
    assert padded.tolist() == [row + [tokenizer.pad_id] * (longest - len(row)) for row in rows]
    wide = tokenizer(texts, max_length=np.int64(longest + 3), padding="max_length")["token_ids"]
    assert np.asarray(wide)[:, :longest].tolist() == padded.tolist() and wide.shape == (3, longest + 3)
    assert tokenizer(texts, max_length=np.int32(5))["token_ids"].shape == (3, 5)
    with pytest.raises(ValueError, match=r"`padding` must be one of \['longest', 'max_length'\]"):
        tokenizer(texts, padding="left")
    with pytest.raises(ValueError, match="`max_length` must be a positive integer. Received: max_length=5.0"):
        tokenizer(texts, max_length=5.0)


def test_decoding_is_the_way_back(tokenizer):
    ids = tokenizer.tokenize(["a man's dog", "a dog"])
    texts = tokenizer.decode(ids)
    assert texts == tokenizer.decode(ids, clean_up_tokenization_spaces=None)
    assert [one.replace(" ", "") for one in texts] == ["aman'sdog", "adog"]
    assert tokenizer.decode(lists(ids)[1]) == texts[1]
    row = np.asarray(tokenizer("a dog")["token_ids"])
    assert tokenizer.decode(row) == texts[1]
    written = [tokenizer.vocabulary[i] for i in row if tokenizer.vocabulary[i] in tokenizer.special_tokens.values()]
    assert all(token in tokenizer.decode(row, skip_special_tokens=False) for token in written)
    with pytest.raises(ValueError, match=rf"`ids` must be in .* Received: id {tokenizer.vocabulary_size}"):
        tokenizer.decode([tokenizer.vocabulary_size])


def test_configuration_and_files_give_the_same_tokenizer(tokenizer, tmp_path):
    config = json.loads(json.dumps(tokenizer.get_config()))
    keras_config = json.loads(json.dumps(keras.saving.serialize_keras_object(tokenizer)))
    tokenizer.save(tmp_path / "saved")
    for again in (
        type(tokenizer).from_config(config),
        keras.saving.deserialize_keras_object(keras_config),
        type(tokenizer).from_pretrained(tmp_path / "saved"),
        text.load_tokenizer(tmp_path / "saved"),
    ):
        assert type(again) is type(tokenizer) and again.get_config() == tokenizer.get_config()
    assert text.load_tokenizer(tmp_path / "saved", max_length=np.int64(9)).max_length == 9
    with pytest.raises(ValueError, match="`directory` must be a directory. Received: directory='.*none'"):
        type(tokenizer).from_pretrained(tmp_path / "none")
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers. Received: tokenizer=7"):
        type(tokenizer).from_transformers(7)


def test_numpy_numbers_are_numbers(tokenizer):
    again = type(tokenizer)(**(tokenizer.get_config() | {"max_length": np.int64(11)}))
    assert type(again.max_length) is int and json.loads(json.dumps(again.get_config()))["max_length"] == 11
    with pytest.raises(ValueError, match="`max_length` must be a positive integer"):
        type(tokenizer)(**(tokenizer.get_config() | {"max_length": np.float64(11)}))


def test_numpy_numbers_in_training_and_vocabularies(made):
    trained = text.BertTokenizer.train(["ab ab"], np.int64(9))
    assert trained.vocabulary == text.BertTokenizer.train(["ab ab"], 9).vocabulary
    rows = trained.tokenize(["ab"], dropout=np.float32(0.5), seed=np.array([1, 2])).to_list()
    assert rows == trained.tokenize(["ab"], dropout=0.5, seed=(1, 2)).to_list()
    marian = text.load_tokenizer(made / "marian")
    vocabulary = {token: np.int64(i) for i, token in enumerate(marian.vocabulary)}
    again = text.MarianTokenizer(marian.source_model, marian.target_model, vocabulary)
    assert json.dumps(again.get_config()) == json.dumps(marian.get_config())


class Letters(text.Tokenizer):
    """The smallest tokenizer that a user might write."""

    def __init__(self, letters, max_length=None):
        special = {"pad_token": letters[0], "mask_token": None, "cls_token": "absent"}
        super().__init__(letters, special, max_length)

    def __call__(self, texts, pairs=None, *, max_length=None, padding="longest"):
        return {"token_ids": np.array(self.tokenize(texts))}

    def tokenize(self, texts):
        return [self.token_to_id(letter) for letter in texts]

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=None):
        return "".join(map(self.id_to_token, ids))

    def save(self, directory):
        directory.mkdir()
        (directory / "letters.json").write_text(json.dumps(self.get_config()))

    def get_config(self):
        return {"letters": self.vocabulary, "max_length": self.max_length}

    @property
    def not_in_graph(self):
        return "it is only Python"

    @classmethod
    def from_pretrained(cls, directory, **overrides):
        return cls(**(json.loads((directory / "letters.json").read_text()) | overrides))


def test_a_user_s_tokenizer_has_the_shared_face(tmp_path):
    ours = Letters(["_", "a", "b"], max_length=np.int64(7))
    assert (ours.vocabulary_size, ours.pad_id, ours.mask_id, ours.cls_id, ours.max_length) == (3, 0, None, None, 7)
    assert ours.special_tokens == {"pad_token": "_", "cls_token": "absent"} and not ours.in_graph
    assert ours.decode(ours("abba")["token_ids"]) == "abba"
    ours.save(tmp_path / "saved")
    assert Letters.from_pretrained(tmp_path / "saved", max_length=3).max_length == 3
    assert Letters.from_config(ours.get_config()).get_config() == ours.get_config()
    with pytest.raises(ValueError, match="`max_length` must be a positive integer or None. Received: max_length=0"):
        Letters(["_"], max_length=0)
    with pytest.raises(TypeError, match="abstract"):
        text.Tokenizer(["a"], {})
