"""`Bleu` logs the score of sacrebleu, and other callbacks of `fit` use it."""

import math

import keras
import numpy as np
import pytest

from keras_tx.training import Bleu

sacrebleu = pytest.importorskip("sacrebleu")

SOURCES = ["ein kleiner Hund läuft durch den Garten", "das ist gut", "er liest ein Buch über alte Schiffe"]
REFERENCES = ["A small dog runs through the garden.", "This is good.", "He is reading a book about old ships."]
FAIR = ["A small dog runs through a garden.", "this is good", "He reads a book about old ships."]


def table(*columns):
    """A function that looks its strings up."""
    answers = dict(zip(SOURCES, *columns, strict=True))
    return lambda texts: [answers[text] for text in texts]


class Talker(keras.Model):
    """A model that knows the translations and keeps the arguments of its calls."""

    def __init__(self):
        super().__init__(inputs := keras.Input((1,)), keras.layers.Dense(1)(inputs))
        self.asked = []

    def generate(self, texts, strategy="greedy", *, max_new_tokens, tokenizer=None):
        self.asked.append((len(texts), strategy, max_new_tokens, tokenizer))
        return table(FAIR)(texts)


def fit(*callbacks, model=None, epochs=1):
    model = model or Talker()
    model.compile("sgd", "mse", run_eagerly=True)
    return model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=epochs, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"lowercase": True}, {"lowercase": True}),
        ({"tokenize": "none"}, {"tokenize": "none"}),
        ({"tokenize": "char", "batch_size": 2}, {"tokenize": "char"}),
    ],
)
def test_the_score_is_that_of_sacrebleu_on_the_whole_corpus(arguments, options):
    bleu = Bleu(SOURCES, REFERENCES, translate=table(FAIR), verbose=0, **arguments)
    expected = sacrebleu.corpus_bleu(FAIR, [REFERENCES], **options).score
    assert fit(bleu)["val_bleu"] == [expected]
    assert 30 < expected < 100


def test_the_score_of_a_sum_by_hand():
    """5 of 6 words, 3 of 5 pairs, 2 of 4 triples and 1 of 3 quadruples are in the reference, which is as long."""
    bleu = Bleu(["x"], ["the cat sat on the mat"], translate=lambda texts: ["the cat sat on a mat"], verbose=0)
    assert fit(bleu)["val_bleu"] == [pytest.approx(100 * math.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** 0.25)]


def test_equal_translations_have_100_and_empty_ones_0():
    assert fit(Bleu(SOURCES, REFERENCES, translate=table(REFERENCES), verbose=0))["val_bleu"] == [pytest.approx(100)]
    assert fit(Bleu(SOURCES, REFERENCES, translate=lambda texts: [""] * len(texts), verbose=0))["val_bleu"] == [0]


def test_the_model_generates_with_what_it_is_given():
    model = Talker()
    options = {"tokenizer": "t", "max_new_tokens": 17, "generate_options": {"strategy": "beam"}}
    fit(Bleu(SOURCES, REFERENCES, batch_size=2, verbose=0, **options), model=model)
    assert model.asked == [(2, "beam", 17, "t"), (1, "beam", 17, "t")]


def test_callbacks_after_it_see_the_score_and_stop_at_the_best(tmp_path):
    answers = iter([FAIR, REFERENCES, FAIR, FAIR, FAIR])
    bleu = Bleu(SOURCES, REFERENCES, translate=lambda texts: next(answers), name="bleu", verbose=0)
    stop = keras.callbacks.EarlyStopping("bleu", mode="max", patience=2)
    best = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", "bleu", 0, True, True, mode="max")
    history = fit(bleu, stop, best, epochs=5)
    assert len(history["bleu"]) == 4 and stop.best_epoch == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.weights.h5", "2.weights.h5"]


def test_numbers_of_numpy_are_numbers():
    options = {name: np.int64(2) for name in ("max_new_tokens", "batch_size", "every", "samples", "verbose")}
    bleu = Bleu(SOURCES, REFERENCES, **options)
    assert {name: getattr(bleu, name) for name in options} == {**dict.fromkeys(options, 2), "verbose": 1}


def test_it_translates_at_the_end_of_every_so_many_epochs():
    calls = []
    bleu = Bleu(SOURCES, REFERENCES, translate=lambda texts: calls.append(1) or table(FAIR)(texts), every=2, verbose=0)
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append("val_bleu" in logs))
    assert len(fit(bleu, look, epochs=5)["val_bleu"]) == len(calls) == 2
    assert seen == [False, True, False, True, False]


def test_it_prints_the_score_its_signature_and_samples(capsys):
    fit(Bleu(SOURCES, REFERENCES, translate=table(FAIR), samples=2, lowercase=True))
    output = capsys.readouterr().out
    score = sacrebleu.corpus_bleu(FAIR, [REFERENCES], lowercase=True).score
    assert f"val_bleu: {score:.2f} (nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:" in output
    for text in (*SOURCES[:2], *FAIR[:2], *REFERENCES[:2], "3/3"):
        assert text in output
    assert SOURCES[2] not in output
    fit(Bleu(SOURCES, REFERENCES, translate=table(FAIR), verbose=0))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sources": SOURCES[:2]}, ValueError, "the same length, at least 1. Received: 2 sources, 3 references"),
        ({"sources": [], "references": []}, ValueError, "at least 1. Received: 0 sources, 0 references"),
        ({"sources": "ein Satz"}, TypeError, "`sources` must be a list of strings. Received: 'ein Satz'"),
        ({"references": [b"a", "b", "c"]}, TypeError, "`references` must be a list of strings. Received: b'a' among"),
        ({"references": 3}, TypeError, "`references` must be a list of strings. Received: 3"),
        ({"translate": 3}, TypeError, "`translate` must be a function or None. Received: translate=3"),
        ({"every": 0}, ValueError, "`every` must be a positive integer. Received: every=0"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be a positive integer. Received: batch_size=0"),
        ({"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be a positive .* Received: max_new_tokens=0"),
        ({"samples": -1}, ValueError, "`samples` must be an integer of at least 0. Received: samples=-1"),
        ({"name": 3}, TypeError, "`name` must be a string. Received: name=3"),
        ({"verbose": "no"}, ValueError, r"`verbose` must be one of \[0, 1, 2\]. Received: verbose='no'"),
        (
            {"generate_options": {"return_scores": True}},
            ValueError,
            "`generate_options` must not hold `return_scores`, .* Received: generate_options={'return_scores': True}",
        ),
        ({"tokenize": "words"}, ValueError, "`tokenize` must be one of .*'13a'.*Received: tokenize='words'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Bleu(**{"sources": SOURCES, "references": REFERENCES, **arguments})


def test_a_model_that_cannot_generate_is_refused_before_the_first_epoch():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(TypeError, match="`translate` must be given .*`generate`. Received: model=Sequential"):
        fit(Bleu(SOURCES, REFERENCES), model=model)


def test_invalid_translations_are_refused():
    with pytest.raises(ValueError, match="one translation for each source. Received: 2 for 3 sources"):
        fit(Bleu(SOURCES, REFERENCES, translate=lambda texts: texts[:2], verbose=0))
    with pytest.raises(TypeError, match="the translations.* must be a list of strings. Received: 1 among them"):
        fit(Bleu(SOURCES, REFERENCES, translate=lambda texts: [1, 2, 3], verbose=0))
