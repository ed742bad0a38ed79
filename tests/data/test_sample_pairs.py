"""The embedded language pair: one translation for each sentence, by the rules that it states, and not word by word."""

import re
from collections import Counter

import numpy as np
import pytest

from keras_tx.data import load_translation, sample_pairs
from tests.data.processes import same_in_every_process

GENDERS = {  # stem -> gender
    stem: gender for nouns in sample_pairs.NOUNS.values() for _, _, stem, gender in map(str.split, nouns.split(", "))
}
PLURALS = {stem + {"o": "ek", "a": "im", "e": "us"}[gender]: stem for stem, gender in GENDERS.items()}
ADJECTIVES = {words.split()[1] for words, _ in sample_pairs.ADJECTIVES}
VERBS = {words.split()[-1] for words, *_ in sample_pairs.VERBS}


@pytest.fixture(scope="module")
def parts():
    return sample_pairs.pairs()


@pytest.fixture(scope="module")
def every(parts):
    return [pair for pairs in parts.values() for pair in pairs]


def words(text):
    return re.findall(r"\w+|[.,?]", text)


def test_sizes(parts, every):
    assert {part: len(pairs) for part, pairs in parts.items()} == {"train": 6000, "validation": 300, "test": 300}
    assert len({english for english, _ in every}) == 6600
    for side, most in ((0, 180), (1, 240)):
        assert 150 < len({word for pair in every for word in words(pair[side])}) < most
    lengths = [len(words(english)) for english, _ in every]
    assert (min(lengths), max(lengths)) == (4, 14)


def test_every_word_can_be_learned(parts):
    seen = [Counter(word for pair in parts["train"] for word in words(pair[side])) for side in (0, 1)]
    for english, tavic in parts["test"] + parts["validation"]:
        assert min(seen[0][word] for word in words(english)) >= 10
        assert min(seen[1][word] for word in words(tavic)) >= 5


def test_a_sentence_has_one_translation(every):
    """Also where others were made by chance: 20,000 sentences, of which some come again."""
    known, again = dict(every), 0
    for seed in (1, 2):
        for pairs in sample_pairs.pairs(seed).values():
            for english, tavic in pairs:
                again += english in known
                assert known.setdefault(english, tavic) == tavic
    assert again > 100


def test_nothing_agrees_with_a_noun_but_by_its_gender_and_number(every):
    """What follows a determiner is its noun, and then its adjective; found by the words, not by how they were made."""
    found = Counter()
    for _, tavic in every:
        tokens = words(tavic)
        for token, noun, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
            determiner = re.fullmatch("(l|un|b|duv|pol)([oaei])([nr]?)", token)
            if determiner:
                plural = noun in PLURALS
                vowel = "i" if plural else GENDERS[noun]
                assert determiner[2] == vowel, tavic
                if after[:-1] in ADJECTIVES:
                    assert after[-1] == vowel, tavic
                found[vowel, determiner[3]] += 1
    assert set(found) == {(vowel, case) for vowel in "oaei" for case in ("", "n", "r")}
    assert min(found.values()) > 100


def test_the_verb_is_last_but_for_the_tense(every):
    for _, tavic in every:
        for clause in re.split(r", wen |[.?]$", tavic):
            tokens = words(clause)
            if tokens and not tokens[0][0] == "y":
                assert tokens[-1] in ("ha", "pe", "vu")
                assert tokens[-2][:-2] in VERBS and tokens[-2][-2:] in ("at", "en"), tavic


def test_a_word_with_two_translations_has_both_and_they_differ(every):
    """Where the English has the word, the Tavic has the one or the other, both often."""
    for english, one, other in (
        ("bats?", "fleru", "kolb"),
        ("cranes?", "gruk", "levag"),
        ("light", "levik", "lumik"),
        ("play(s|ed)?", "musk(at|en)", "ludr(at|en)"),
        ("ran|runs?", "korj(at|en)", "funk(at|en)"),
        ("old", "senk[oaei]", "vetul"),
    ):
        which = Counter()
        for source, target in every:
            if re.search(rf"\b({english})\b", source):
                which[bool(re.search(rf"\b{one}", target)), bool(re.search(rf"\b{other}", target))] += 1
        assert which[True, False] > 30 and which[False, True] > 30 and not which[False, False], (english, which)


def word_by_word(parts):
    """For each English word the likeliest in IBM's Model 1 (Brown et al. 1993), after ten rounds of EM."""
    pairs = [(words(english), words(tavic)) for english, tavic in parts["train"]]
    ids = [{word: i for i, word in enumerate(sorted({w for pair in pairs for w in pair[side]}))} for side in (0, 1)]
    links, at = [], []
    for n, (english, tavic) in enumerate(pairs):
        for position, word in enumerate(tavic):
            links += [(ids[0][other], ids[1][word]) for other in english]
            at += [(n, position)] * len(english)
    sources, targets = np.array(links).T
    at = np.unique(at, axis=0, return_inverse=True)[1].ravel()
    table = np.ones([len(vocabulary) for vocabulary in ids])
    for _ in range(10):
        share = table[sources, targets]
        share /= np.bincount(at, share)[at]
        table = np.zeros_like(table)
        np.add.at(table, (sources, targets), share)
        table /= table.sum(axis=1, keepdims=True)
    translations = np.array(list(ids[1]))[table.argmax(axis=1)]
    return [" ".join(translations[ids[0][word]] for word in words(english)) for english, _ in parts["test"]]


def test_word_by_word_is_no_translation(parts):
    """BLEU of 100 is a perfect translation; a small encoder-decoder comes to 99."""
    sacrebleu = pytest.importorskip("sacrebleu")
    references = [[tavic for _, tavic in parts["test"]]]
    assert sacrebleu.corpus_bleu(references[0], references).score == pytest.approx(100)
    assert 1 < sacrebleu.corpus_bleu(word_by_word(parts), references, force=True).score < 20


def test_two_processes_make_the_same_pairs():
    assert same_in_every_process(sample_pairs, "pairs")


def test_load_translation_gives_the_sample_in_both_directions(parts):
    def listed(part):
        sides = [side.numpy() for side in part.batch(len(part)).get_single_element()]
        return [tuple(side.decode() for side in pair) for pair in zip(*sides, strict=True)]

    data = load_translation(seed=3)
    assert data.languages == ("english", "tavic")
    found = [listed(part) for part in data[:3]]
    assert found[1:] == [parts["validation"], parts["test"]]
    assert sorted(found[0]) == sorted(parts["train"])
    assert found[0] != parts["train"]
    back = load_translation(target="english", seed=3)
    assert back.languages == ("tavic", "english")
    assert [pair[::-1] for pair in listed(back.test)] == parts["test"]
