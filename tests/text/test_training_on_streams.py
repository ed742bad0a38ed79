"""Training a vocabulary on a stream: parts of texts are counted, not kept, and that changes no vocabulary."""

import io
import re
from collections import Counter

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from keras_tx import text
from keras_tx.text import trainers, vocabulary
from tests.text.made import TRICKY

odd = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("  \t\n\r\x00\x1c\x85\u3000aAİßΣς東한é\u0301\u0323.!-'_\u200b\ufeff"),
)


def bert(**options):
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece())
    made.normalizer = tokenizers.normalizers.BertNormalizer(clean_text=True, **options)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


@given(
    st.lists(st.lists(odd, max_size=20).map("".join), max_size=8), st.booleans(), st.sampled_from([None, True, False])
)
def test_words_are_counted_as_in_whole_texts(texts, lowercase, strip):
    made = bert(lowercase=lowercase, strip_accents=strip)
    expected = Counter()
    for one in texts:
        normal = made.normalizer.normalize_str(one)
        expected.update(word for word, _ in made.pre_tokenizer.pre_tokenize_str(normal))
    assert vocabulary.count_words(iter(texts), made) == expected


def test_words_are_repeated_as_often_as_they_occur():
    words = Counter({"a": 2500, "b": 1, "c": 1000, "d": 1001})
    assert Counter(word for line in vocabulary._repeated(words) for word in line.split(" ")) == words


def test_of_parts_that_are_equally_rare_half_remain():
    """As with texts of a language without spaces: each is one part, and occurs once."""
    few = vocabulary.frequent_parts([[f"rare-{i}"] for i in range(21)], most=20)
    assert few == Counter(f"rare-{i}" for i in range(10))


def test_of_too_many_different_parts_the_rarest_are_forgotten():
    texts = [["the", "a", "the", f"rare-{i}"] for i in range(1000)]
    whole = vocabulary.frequent_parts(texts)
    assert len(whole) == 1002
    few = vocabulary.frequent_parts(texts, most=20)
    assert len(few) <= 20 and (few["the"], few["a"]) == (2000, 1000)
    sizes = []

    def watched():
        for i, parts in enumerate(texts):
            yield parts
            sizes.append(i)

    assert vocabulary.frequent_parts(watched(), most=20) == few and len(sizes) == 1000


def test_a_stream_of_ever_new_words_trains_the_same_frequent_pieces(monkeypatch):
    monkeypatch.setattr(vocabulary.frequent_parts, "__defaults__", (100,))
    texts = (f"hot dogs and hotdogs x{i:x}" for i in range(2000))
    learned = text.BertTokenizer.train(texts, 60)
    assert {"hot", "dogs", "and"} <= set(learned.vocabulary)


@pytest.mark.parametrize(
    "texts", [TRICKY, ["a  b   c ", " hot dogs", "hot dog hot", "   "] * 3], ids=["tricky", "spaces"]
)
def test_sentencepiece_learns_from_words_what_it_learns_from_lines(texts):
    lines = [part for one in texts for part in re.split(trainers.CUTS, one) if part]
    words = vocabulary.frequent_parts(map(trainers._words_with_spaces, lines))
    found = trainers._train_sentencepiece(words, 400)
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=file, model_type="bpe", vocab_size=657, hard_vocab_limit=False,
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, num_threads=1, minloglevel=2,
    )  # fmt: skip
    expected = trainers.read_model(file.getvalue(), "texts").pieces[1:]
    assert found == [piece.piece.replace(trainers.SPACE, " ") for piece in expected]


def test_a_dataset_is_read_in_batches_or_as_it_is(sentences):
    tf = pytest.importorskip("tensorflow")
    expected = text.BertTokenizer.train(sentences, 150).vocabulary
    for dataset in (
        tf.data.Dataset.from_tensor_slices(sentences),
        tf.data.Dataset.from_tensor_slices(sentences).batch(3),
    ):
        assert text.BertTokenizer.train(dataset, 150).vocabulary == expected


@pytest.mark.parametrize("cls", [text.BytePairTokenizer, text.SentencePieceTokenizer, text.WordLevelTokenizer])
def test_progress_is_shown_on_request(cls, capsys):
    quiet = cls.train(["hot dogs"] * 3, 300)
    assert capsys.readouterr().out == ""
    assert cls.train(["hot dogs"] * 3, 300, verbose=1).vocabulary == quiet.vocabulary
    assert "3/Unknown" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"`verbose` must be 0, 1, False or True. Received: verbose='auto'"):
        cls.train(["hot dogs"], 300, verbose="auto")
