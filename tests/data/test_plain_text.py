"""`load_text`: files as they are, cut where nanoGPT cuts; and the embedded scenes, in which what was said matters."""

import gzip
import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from keras_tx.data import load_text, sample_scenes
from keras_tx.data.sample_scenes import PEOPLE, PLACES
from tests.data.processes import same_in_every_process


@pytest.mark.parametrize("name", ["f.txt", "f.gz", "noname"])
def test_the_text_of_a_file_is_cut_in_two(tmp_path, name):
    text = "à\u2028b\n\n" * 10
    content = ("\ufeff" + text).replace("\n", "\r\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert load_text(tmp_path / name) == (text[:45], text[45:])
    assert load_text(str(tmp_path / name), validation_fraction=0.5) == (text[:25], text[25:])
    assert load_text(tmp_path / name, validation_fraction=np.float32(0.5)) == (text[:25], text[25:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\n\xff\n", r"must be UTF-8 text. Received: .*f.txt', line 3: .* can't decode byte 0xff"),
        (b"a", r"must have characters for both parts. Received: .*f.txt' of 1 characters, validation_fraction=0.1"),
        (b"", r"Received: .*f.txt' of 0 characters"),
    ],
)
def test_a_file_that_is_no_text(tmp_path, content, message):
    (tmp_path / "f.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path / "f.txt")


def test_a_damaged_file(tmp_path):
    path = tmp_path / "f.gz"
    for content in (b"not gzip", gzip.compress(b"text" * 99)[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"must be a whole gzip file. Received: .*f.gz'"):
            load_text(path)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name_or_path": "no.txt"}, FileNotFoundError, r"must name files that exist. Received: 'no.txt'"),
        ({"name_or_path": 3}, TypeError, r"`name_or_path` must be a string or a path, or a list of .* name_or_path=3"),
        ({"text_column": "q"}, ValueError, r"`text_column` must be 'text', .* \.jsonl, .*text_column='q', .*='sample'"),
        ({"validation_fraction": 0}, ValueError, r"`validation_fraction` must be .* Received: validation_fraction=0$"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        load_text(**arguments)


def test_a_text_of_tinyshakespeare_s_length_is_cut_as_nanogpt_cuts_it(tmp_path):
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(b"a" * 1_115_394))
    train, validation = load_text(tmp_path / "input.txt.gz")
    assert (len(train), len(validation)) == (1003854, 111540)  # as printed by its prepare.py


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes.scenes().strip().split("\n\n\n")


def test_there_are_150_000_characters_and_no_scene_twice(scenes):
    text = "".join(load_text())
    assert text == sample_scenes.scenes()
    assert 150_000 <= len(text) < 152_000
    assert len(set(scenes)) == len(scenes) > 150
    train, validation = load_text()
    assert set(validation) <= set(train) and len(set(train)) < 60


def test_the_lost_thing_and_the_people_stay_the_same_through_a_scene(scenes):
    for scene in scenes:
        title, opening, *spoken, tale, end = scene.split("\n\n")
        name, thing = re.fullmatch(r"THE (\w+)'S (\w+ \w+)", title).groups()
        name, thing = name.lower(), thing.lower()
        they, their = PEOPLE[name][0]
        hour = re.fullmatch(rf"One \w+ (\w+) the {name} could not find {their} {thing}.", opening)[1]
        speakers = [line.split(":")[0].lower() for line in spoken]
        assert set(speakers[::2]) == {name}
        others = speakers[1::2]
        assert len(set(others)) == len(others) >= 2
        for question, other, answer in zip(spoken[::2], others, spoken[1::2], strict=False):
            assert other in question.lower() and f"good {hour}" in question.lower() and thing in question
            assert name in answer
        for answer, other, following in zip(spoken[1::2], others, others[1:], strict=False):
            assert PEOPLE[other][1] in answer
            assert f"the {following}" in answer
            assert re.search(rf"\b({'|'.join(PEOPLE[following][0])})\b", answer)
        place = re.fullmatch(rf"So {they} found it (.*),\n.*", end)[1]
        assert end.split("\n")[1] in PLACES[place]
        assert f"{thing} {place}" in spoken[-2] or f"{thing} is {place}" in spoken[-2]
        lines = tale.split("\n")
        assert lines[0] == f"This is the {thing} that hid {place}."
        for line, before in zip(lines[1:], lines, strict=False):
            assert line.endswith(before.removeprefix("This is "))


def nats(train, validation, order):
    """Of each character of `validation`, given up to `order` before it; n-grams interpolated (Witten and Bell 1991)."""
    counts = [defaultdict(Counter) for _ in range(order + 1)]
    for i, character in enumerate(train):
        for n in range(min(order, i) + 1):
            counts[n][train[i - n : i]][character] += 1
    total, alphabet = 0.0, len(set(train))
    for i in range(order, len(validation)):
        p = 1 / alphabet
        for n in range(order + 1):
            seen = counts[n].get(validation[i - n : i])
            if seen:
                p = (seen[validation[i]] + len(seen) * p) / (seen.total() + len(seen))
        total -= math.log(p)
    return total / (len(validation) - order)


def test_more_context_predicts_the_scenes_far_better_than_the_letter_before():
    train, validation = load_text()
    assert nats(train, validation, 1) > 1.9
    assert nats(train, validation, 5) < 0.5


def test_two_processes_write_the_same_scenes():
    assert same_in_every_process(sample_scenes, "scenes")


def test_empty_files_add_no_line(tmp_path):
    names = [tmp_path / name for name in ("empty.txt", "one.txt", "two.txt")]
    for path, content in zip(names, ("", "a\nb", "c\n"), strict=True):
        path.write_text(content)
    empty, one, two = map(str, names)
    assert "".join(load_text([empty, two, empty, one, empty], validation_fraction=0.4)) == "c\na\nb"
