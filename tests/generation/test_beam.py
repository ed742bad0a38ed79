"""`Beam` and `Greedy` against transformers, against an exhaustive search, and against each other."""

import itertools
from functools import cache

import numpy as np
import pytest

from keras_tx.generation.beam import Beam
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.greedy import Greedy
from tests.generation.driver import drive, markov, speller, text
from tests.tools import assert_close

SIZE, NEW = 19, 9
STOP, PAD = 2, 1


@pytest.fixture(scope="module")
def one_thread():
    """On several threads the tiny models of PyTorch would be slower."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def gpt2():
    """A random GPT-2 and, for `drive`, the same without a cache."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(3)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = {"vocab_size": SIZE, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "initializer_range": 0.7}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **special)).eval()

    def logits(ids, real):
        mask, positions = torch.tensor(real).long(), torch.tensor(np.maximum(real.cumsum(1) - 1, 0))
        with torch.no_grad():
            return model(torch.tensor(ids).long(), attention_mask=mask, position_ids=positions).logits[:, -1].numpy()

    return model, logits


@cache
def bart():
    """A random BART, and what `drive` takes for these sources and this many beams."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(7)
    special = {"bos_token_id": 0, "eos_token_id": STOP, "pad_token_id": PAD, "decoder_start_token_id": STOP}
    none = {"forced_bos_token_id": None, "forced_eos_token_id": None}
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 8))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    config = transformers.BartConfig(vocab_size=SIZE, d_model=8, init_std=0.7, **sizes, **heads, **special, **none)
    model = transformers.BartForConditionalGeneration(config).eval()

    def logits_of(sources, width):
        sources = torch.tensor(sources).repeat_interleave(width, 0)
        options = {"attention_mask": (sources != PAD).long(), "use_cache": False}
        with torch.no_grad():
            encoded = model.get_encoder()(sources, attention_mask=options["attention_mask"])

        def logits(ids, real):
            with torch.no_grad():
                ids = torch.tensor(ids).long()
                return model(encoder_outputs=encoded, decoder_input_ids=ids, **options).logits[:, -1].numpy()

        return logits

    return model, logits_of


def until(row, stop):
    """How many ids of `row` there are up to the first stop token, at most `NEW`."""
    return next((i + 1 for i, token in enumerate(row[:NEW]) if token in stop), min(NEW, len(row)))


def compare(kind, strategy, stop=(STOP,), **rules):
    """Runs `strategy` and transformers; asserts that ids and scores are the same."""
    model, logits = gpt2() if kind == "decoder" else bart()
    import torch

    names = {"forbidden_tokens": "bad_words_ids"}
    theirs = {names.get(name, name): value for name, value in rules.items() if name != "forced_tokens"}
    forced = rules.get("forced_tokens", {})
    theirs |= {"forced_bos_token_id": forced.get(0), "forced_eos_token_id": forced.get(-1)}
    theirs |= {"eos_token_id": list(stop) or None, "pad_token_id": PAD, "max_new_tokens": NEW, "do_sample": False}
    if isinstance(strategy, Beam):
        options = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
        theirs |= {name: getattr(strategy, name) for name in options}
    tokens = np.random.default_rng(5).integers(3, SIZE, size=(3, 7))
    kept = np.arange(7) >= np.array([[4], [0], [2]])  # lengths 3, 7, 5
    if kind == "decoder":
        ids, real = np.where(kept, tokens, PAD), kept
        theirs["input_ids"], theirs["attention_mask"] = torch.tensor(ids), torch.tensor(real).long()
    else:
        sources = np.where(kept[:, ::-1], tokens, PAD)
        ids, real, logits = np.full((3, 1), STOP), None, logits(sources, strategy.rows_per_prompt)
        theirs["input_ids"], theirs["attention_mask"] = torch.tensor(sources), torch.tensor(sources != PAD).long()
    found = model.generate(**theirs, return_dict_in_generate=True, output_scores=True)
    expected = found.sequences[:, ids.shape[1] :].numpy().reshape(3, -1, found.sequences.shape[1] - ids.shape[1])

    constraints = Constraints(**rules)
    constraints.check(NEW, SIZE, stop)
    results, scores, state = drive(
        strategy, logits, ids, real, new=NEW + 2, limit=NEW, size=SIZE, stop=stop, padding=PAD, constraints=constraints
    )
    assert not state["broken"]
    for row, theirs_row in zip(results.reshape(-1, NEW + 2), expected.reshape(-1, expected.shape[2]), strict=True):
        assert list(row[: until(row, stop)]) == list(theirs_row[: until(theirs_row, stop)])
        assert (row[until(row, stop) :] == PAD).all()
    if isinstance(strategy, Beam):
        assert_close(scores.ravel(), found.sequences_scores.numpy(), atol=1e-4)
    return results


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "beams", "length_penalty", "early_stopping"),
    [
        ("decoder", 2, 0.0, False),
        ("decoder", 3, 0.6, True),
        ("decoder", 5, 1.0, "never"),
        ("decoder", 2, 2.0, "never"),
        ("decoder", 3, -1.0, False),
        ("encoder-decoder", 5, 0.0, "never"),
        ("encoder-decoder", 3, 0.6, "never"),
        ("encoder-decoder", 2, 1.0, False),
        ("encoder-decoder", 5, 2.0, True),
        ("encoder-decoder", 3, 2.0, False),
    ],
)
def test_beams_are_those_of_transformers(kind, beams, length_penalty, early_stopping):
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "num_return_sequences": beams}
    compare(kind, Beam(beams, **options))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("strategy", [Greedy(), Beam(3, num_return_sequences=2)], ids=["greedy", "beam"])
@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("decoder", {"no_repeat_ngram_size": 2, "min_new_tokens": 6}),
        ("decoder", {"repetition_penalty": 1.7, "forbidden_tokens": [[5], [11, 7], [3, 4, 6], [8]]}),
        ("encoder-decoder", {"forced_tokens": {0: 13, -1: STOP}, "min_new_tokens": NEW, "no_repeat_ngram_size": 3}),
    ],
)
def test_constraints_are_those_of_transformers(kind, strategy, rules):
    compare(kind, strategy, **rules)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "stop"), [("decoder", ()), ("encoder-decoder", (STOP, 3, 7, 11, 13))])
def test_several_stop_tokens_or_none_are_as_in_transformers(kind, stop):
    compare(kind, Greedy(), stop)
    compare(kind, Beam(5, early_stopping="never", num_return_sequences=5), stop)


def scores_of_all(model, prompt, new, size, stop, length_penalty):
    """Every sequence of up to `new` tokens, with its score by the definition, the best first."""
    found = []
    for sequence in itertools.product(range(size), repeat=new):
        length = next((i + 1 for i, token in enumerate(sequence) if token == stop), new)
        ids, total = list(prompt), 0.0
        for token in sequence[:length]:
            logits = model(np.array([ids]), None)[0].astype("float64")
            total += logits[token] - np.log(np.exp(logits).sum())
            ids.append(token)
        found.append((total / length**length_penalty, (*sequence[:length], *[0] * (new - length))))
    return sorted(set(found), reverse=True)


@pytest.mark.parametrize("length_penalty", [-40.0, -0.5, 0.0, 1.0, 3.0])
def test_as_many_beams_as_tokens_find_the_best_two_of_all_pairs(length_penalty):
    prompt, model = (3, 4), markov(5, seed=11)
    options = {"length_penalty": length_penalty, "num_return_sequences": 2, "early_stopping": "never"}
    ids, scores, _ = drive(Beam(5, **options), model, [prompt], new=2, size=5, stop=(1,))
    (first, best), (second, next_best) = scores_of_all(model, prompt, 2, 5, 1, length_penalty)[:2]
    assert [tuple(row) for row in ids[0]] == [best, next_best]
    assert_close(scores[0], [first, second], atol=1e-5)


# With -60 scores reach the limit of float32 and are equal, and PyTorch returns equal ones in any order.
@pytest.mark.parametrize("length_penalty", [-12.0, pytest.param(-60.0, marks=pytest.mark.tensorflow)])
def test_continuations_of_one_length_have_the_order_that_they_have_without_a_length_penalty(length_penalty):
    run = {"model": markov(SIZE, seed=3), "ids": [[3, 4], [7, 2]], "new": 13, "size": SIZE}
    expected, totals, _ = drive(Beam(3, num_return_sequences=3, length_penalty=0.0), **run)
    ids, scores, _ = drive(Beam(3, num_return_sequences=3, length_penalty=length_penalty), **run)
    np.testing.assert_array_equal(ids, expected)
    lowest = np.finfo("float32").min
    np.testing.assert_allclose(scores, np.maximum(totals.astype("float64") * 13.0**-length_penalty, lowest), rtol=1e-5)


DOG = {"": {"c": 0.6, "d": 0.4}, "c": {"a": 0.5, "o": 0.5}, "d": {"o": 1.0}, "do": {"g": 1.0}}


def test_two_beams_see_that_the_less_likely_letter_begins_the_likelier_word():
    model, letters = speller(DOG)
    prompt = {"ids": [[0]], "real": [[False]], "new": 5, "size": len(letters), "stop": (0,)}
    ids, scores, _ = drive(Greedy(), model, **prompt)
    assert text(letters, ids[0, 0]) == "ca..." and scores[0, 0] == pytest.approx(np.log(0.3), abs=1e-5)
    ids, scores, _ = drive(Beam(2, length_penalty=0), model, **prompt)
    assert text(letters, ids[0, 0]) == "dog.." and scores[0, 0] == pytest.approx(np.log(0.4), abs=1e-5)
    ids, scores, _ = drive(Beam(2, length_penalty=2), model, **prompt)
    assert text(letters, ids[0, 0]) == "dog.." and scores[0, 0] == pytest.approx(np.log(0.4) / 4**2, abs=1e-5)


def test_early_stopping_decides_how_long_a_prompt_waits_for_better():
    def best(words, **options):
        model, letters = speller(words)
        ids, _, state = drive(Beam(2, **options), model, [[0]], [[False]], new=7, size=len(letters), stop=(0,))
        return text(letters, ids[0, 0]).rstrip("."), int(state["step"])

    # After three steps "a." (0.3) and "ax." (0.2) are two results, and "bcd" is at 0.5.
    words = {"": {"a": 0.5, "b": 0.5}, "a": {".": 0.6, "x": 0.4}, "b": {"c": 1.0}, "bc": {"d": 1.0}}
    assert best(words, early_stopping=True) == ("ax", 3)  # log(0.2) / 3 is above log(0.3) / 2
    assert best(words, early_stopping=False) == best(words, early_stopping="never") == ("bcd", 4)
    # After two steps "a." (0.4) and "b." (0.36) are two results, and "bc" is at 0.14: worse now, better in the end.
    words = {"": {"a": 0.5, "b": 0.5}, "a": {".": 0.8, "x": 0.2}, "b": {".": 0.72, "c": 0.28}, "bc": {"d": 1.0}}
    assert best(words, length_penalty=2) == best(words, length_penalty=2, early_stopping=True) == ("a", 2)
    assert best(words, length_penalty=2, early_stopping="never")[0] == "bcd"  # log(0.14) / 16 is above log(0.4) / 4


def test_one_beam_is_greedy():
    run = {"ids": np.random.default_rng(1).integers(3, SIZE, size=(17, 3)), "new": 9, "size": SIZE, "stop": (STOP, 6)}
    expected, totals, _ = drive(Greedy(), markov(SIZE), **run)
    found, scores, _ = drive(Beam(1, early_stopping="never", length_penalty=0.5), markov(SIZE), **run)
    np.testing.assert_array_equal(found, expected)
    lengths = [until(row, run["stop"]) for row in expected[:, 0]]
    assert_close(scores[:, 0] * np.sqrt(lengths), totals[:, 0], atol=1e-4)


@pytest.mark.parametrize("strategy", [Greedy(), Beam(3, num_return_sequences=2)], ids=["greedy", "beam"])
def test_a_prompt_gives_in_a_batch_and_padded_what_it_gives_alone(strategy):
    """The driver also asserts that rows of a finished prompt hold padding and no longer change places."""
    model, lengths = markov(SIZE, 2), (2, 5, 3)
    rows = [np.random.default_rng(n).integers(3, SIZE, size=n) for n in lengths]
    padded = np.stack([np.concatenate([np.full(5 - len(row), PAD), row]) for row in rows])
    rules = Constraints(no_repeat_ngram_size=2, repetition_penalty=1.2, forbidden_tokens=[(PAD, 7), 5])
    run = {"new": 7, "size": SIZE, "stop": (STOP, 4, 9), "padding": PAD, "constraints": rules}
    together, scores, _ = drive(strategy, model, padded, padded != PAD, **run)
    for place, row in enumerate(rows):
        alone, score, state = drive(strategy, model, [row], **run)
        np.testing.assert_array_equal(together[place], alone[0])
        assert_close(scores[place], score[0], atol=1e-5)
        assert state["real"][0].sum() == len(row) + state["step"]


@pytest.mark.parametrize("strategy", [Greedy(), Beam(3)], ids=["greedy", "beam"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_distribution_end_the_loop(strategy, bad):
    def model(ids, real):
        logits = markov(SIZE)(ids, real)
        if ids.shape[1] == 5 and bad == -np.inf:
            logits[-1] = bad
        elif ids.shape[1] == 5:
            logits[-1, 7] = bad
        return logits

    _, _, state = drive(strategy, model, [[3, 4], [5, 6]], new=7, size=SIZE)
    assert state["broken"] and state["step"] == 4


@pytest.mark.parametrize("strategy", [Greedy(), Beam(2)], ids=["greedy", "beam"])
def test_logits_of_finished_prompts_do_not_matter(strategy):
    def model(ids, real):
        logits = np.zeros((len(ids), SIZE), "float32")
        logits[: len(ids) // 2, STOP] = 50.0  # the first prompt ends at once
        if ids.shape[1] > 3:
            logits[: len(ids) // 2] = np.nan
        return logits

    ids, scores, state = drive(strategy, model, [[3, 4], [5, 6]], new=5, size=SIZE, stop=(STOP,), padding=PAD)
    assert not state["broken"] and state["step"] == 5
    assert list(ids[0, 0]) == [STOP, PAD, PAD, PAD, PAD] and np.isfinite(scores).all()


@pytest.mark.parametrize("strategy", [Greedy(), Beam(2)], ids=["greedy", "beam"])
def test_constraints_that_leave_no_token_end_the_loop(strategy):
    rules = Constraints(no_repeat_ngram_size=1)
    _, _, state = drive(strategy, markov(5, order=1), [[0, 3]], new=7, size=5, constraints=rules)
    assert state["broken"] and state["step"] == 4  # three are left; the fourth step finds none


@pytest.mark.parametrize("beams", [3, 5])
def test_beams_without_an_allowed_token_leave_their_places_to_the_others(beams):
    """Nothing may follow 3, so no pair begins with 3; the rest is what remains of the distribution, normalized."""
    prompt, model = (0, 4), markov(5, seed=2)
    rules = Constraints(forbidden_tokens=[[3, token] for token in range(5)], renormalize_logits=True)
    strategy = Beam(beams, num_return_sequences=3, length_penalty=0.0)
    ids, scores, state = drive(strategy, model, [prompt], new=2, size=5, constraints=rules)
    first = model(np.array([prompt]), None)[0].astype("float64")
    found = []
    for token in {0, 1, 2, 4}.intersection(np.argsort(-first)[:beams]):
        logits = np.stack([first, model(np.array([[4, token]]), None)[0]])
        logarithms = logits - np.log(np.exp(logits.astype("float64")).sum(axis=-1, keepdims=True))
        found += [(logarithms[0, token] + logarithms[1, after], (token, after)) for after in range(5)]
    best = sorted(found, reverse=True)[:3]
    assert 3 in np.argsort(-first)[:beams] and not state["broken"]
    assert [tuple(row) for row in ids[0]] == [pair for _, pair in best]
    assert_close(scores[0], [score for score, _ in best], atol=1e-5)


def test_fewer_continuations_than_beams_leave_padding_and_a_score_of_minus_infinity():
    rules = Constraints(forced_tokens={0: 3, 1: STOP})
    options = {"new": 5, "size": SIZE, "stop": (STOP,), "padding": PAD, "constraints": rules}
    ids, scores, _ = drive(Beam(2, num_return_sequences=2), markov(SIZE), [[4, 5]], **options)
    assert ids.tolist() == [[[3, STOP, PAD, PAD, PAD], [PAD] * 5]] and scores[0, 1] == -np.inf


def test_half_precision_logits_are_computed_in_float32():
    rough = lambda ids, real: markov(SIZE)(ids, real).astype("float16")
    exact = lambda ids, real: rough(ids, real).astype("float32")
    for strategy in (Greedy(), Beam(3)):
        run = {"ids": [[3, 4]], "new": 3, "size": SIZE, "stop": (STOP,)}
        np.testing.assert_array_equal(drive(strategy, rough, **run)[1], drive(strategy, exact, **run)[1])


def test_equal_strategies_are_equal_keys():
    assert Beam(4, length_penalty=0.6) == Beam(4, length_penalty=0.6) != Beam(4)
    assert len({Beam(4), Beam(4), Greedy(), Greedy(), Beam(4, early_stopping=True)}) == 3
    assert repr(Beam(4)) == "Beam(num_beams=4, length_penalty=1.0, early_stopping=False, num_return_sequences=1)"
    assert (Beam(4).rows_per_prompt, Greedy().rows_per_prompt, Greedy().noise(2, 3)) == (4, 1, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "`num_beams` must be a positive integer. Received: num_beams=0"),
        (lambda: Beam(2, length_penalty=np.inf), "`length_penalty` must be a finite number. .*length_penalty=inf"),
        (lambda: Beam(2, length_penalty="1"), "`length_penalty` must be a finite number. .*length_penalty='1'"),
        (lambda: Beam(2, early_stopping="x"), "`early_stopping` must be True, False or 'never'. .*early_stopping='x'"),
        (lambda: Beam(2, early_stopping=1), "`early_stopping` must be True, False or 'never'. .*early_stopping=1"),
        (lambda: Beam(2, num_return_sequences=0), "`num_return_sequences` must be a positive .*num_return_sequences=0"),
        (lambda: Beam(2, num_return_sequences=3), "not be above `num_beams`. .*num_return_sequences=3, num_beams=2"),
        (
            lambda: drive(Beam(5), None, [[1]], new=2, size=4),
            "`num_beams` must not be above the size of the vocabulary. .*num_beams=5, vocabulary_size=4",
        ),
    ],
)
def test_beams_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
