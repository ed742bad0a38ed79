"""The embedded sample: enough reviews, all different, and not to be had by counting words."""

import re
from collections import Counter

import numpy as np
import pytest

from keras_tx.data import load_dataset, sample
from tests.data.processes import same_in_every_process


@pytest.fixture(scope="module")
def parts():
    return sample.reviews()


def words(text):
    return re.findall(r"\w+", text.lower())


def test_there_are_8800_reviews_and_no_two_are_alike(parts):
    train, test = parts
    texts = [text for part in parts for text, _ in part]
    assert (len(train), len(test), len(set(texts))) == (8000, 800, 8800)
    assert 5 <= min(len(text.split()) for text in texts)
    assert max(len(text.split()) for text in texts) <= 40


def test_half_of_each_part_is_positive(parts):
    assert [Counter(label for _, label in part) for part in parts] == [{0: 4000, 1: 4000}, {0: 400, 1: 400}]


def test_every_template_is_in_both_parts(parts):
    """Each template, with its open places as wildcards, is found in the train and in the test split."""
    for template, _ in sample.TEMPLATES + sample.PLAIN:
        pattern = re.compile(re.sub(r"\\{\w+\\}", r"[\\w ]+", re.escape(template)))
        assert all(any(pattern.search(text) for text, _ in part) for part in parts), template


def test_both_readings_of_the_same_words_are_in_the_same_part(parts):
    """Two reviews in three have a twin with the same words and the opposite label."""
    for part in parts:
        twins = Counter()
        for text, label in part:
            twins[" ".join(sorted(words(text)))] += 2 * label - 1
        balanced = {bag for bag, total in twins.items() if total == 0}
        share = np.mean([" ".join(sorted(words(text))) in balanced for text, _ in part])
        assert 0.6 < share < 0.7


def test_counting_words_is_not_enough(parts):
    """Logistic regression on word counts, by Newton's method until nothing changes, stays under 75 %."""
    vocabulary = sorted({word for text, _ in parts[0] for word in words(text)})
    columns = {word: index for index, word in enumerate(vocabulary)}

    def counts(part):
        x = np.ones((len(part), len(vocabulary) + 1))
        x[:, 1:] = 0
        for row, (text, _) in enumerate(part):
            for word in words(text):
                x[row, columns[word] + 1] += 1
        return x, np.array([label for _, label in part])

    (x, y), (x_test, y_test) = map(counts, parts)
    weights, ridge = np.zeros(x.shape[1]), 0.1 * np.eye(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ weights))
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x + ridge, x.T @ (y - p) - ridge @ weights)
        weights += step
        if np.abs(step).max() < 1e-8:
            break
    assert np.abs(step).max() < 1e-8
    assert 0.5 < np.mean((x @ weights > 0) == y) < 0.75
    assert np.mean((x_test @ weights > 0) == y_test) < 0.75


def test_two_processes_make_the_same_reviews():
    assert same_in_every_process(sample, "reviews")


def test_another_seed_makes_other_reviews(parts):
    assert len({text for text, _ in parts[0]} & {text for text, _ in sample.reviews(seed=1)[0]}) < 800


def test_load_dataset_gives_the_sample_in_an_order_of_its_own(parts):
    train, test, labels = load_dataset("sample", seed=3)

    def listed(part):
        texts, labels = part.batch(len(part)).get_single_element()
        return [(text.decode(), label) for text, label in zip(texts.numpy(), labels.numpy().tolist(), strict=True)]

    found = listed(train)
    assert sorted(found) == sorted(parts[0])
    assert found != parts[0]
    assert listed(test) == parts[1]
    assert labels == ("negative", "positive")
