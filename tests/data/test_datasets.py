"""`load_dataset`: every source gives one shape, every example arrives with its label, and errors name the place."""

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.data import from_tfds, load_dataset
from keras_tx.data.splits import hold_out
from tests.data.tfds_folder import prepared
from tests.tools import SHARED


def listed(dataset):
    return [(text.decode(), int(label)) for text, label in dataset.as_numpy_iterator()]


def write(path, content):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        file.write(content)
    return path


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


TEXTS = ['plain, "quoted"', "two\nlines", "tab\there", "été 電影", "", "six"]
LABELS = ["no", "yes", "maybe", "yes", "no", "maybe"]
ROWS = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]


@pytest.fixture(params=["f.jsonl", "f.csv", "f.tsv", "f.jsonl.gz", "f.csv.gz", "f.TSV.GZ"])
def same_rows(request, tmp_path):
    path = tmp_path / request.param
    if "jsonl" in request.param:
        return write(path, jsonl(ROWS))
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], delimiter="," if "csv" in request.param else "\t")
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def test_all_kinds_of_files_give_their_rows(same_rows):
    train, test, labels = load_dataset(same_rows, test=same_rows)
    assert labels == ("maybe", "no", "yes")
    expected = [(text, labels.index(label)) for text, label in zip(TEXTS, LABELS, strict=True)]
    assert listed(test) == expected
    assert sorted(listed(train)) == sorted(expected)
    assert train.element_spec == (tf.TensorSpec([], "string"), tf.TensorSpec([], "int32"))
    assert (int(train.cardinality()), int(test.cardinality())) == (6, 6)


def test_one_file_is_split_by_class_and_by_seed(tmp_path):
    path = write(tmp_path / "f.jsonl", jsonl([{"text": f"t{i}", "label": int(i >= 60)} for i in range(80)]))
    train, test, _ = load_dataset(path, test_fraction=0.2)
    assert sorted(listed(train) + listed(test)) == sorted((f"t{i}", int(i >= 60)) for i in range(80))
    assert [label for _, label in listed(test)] == [0] * 12 + [1] * 4
    assert listed(load_dataset(path, test_fraction=0.2).train) == listed(train) == listed(train)
    assert listed(load_dataset(path, test_fraction=0.2, seed=1).test) != listed(test)


def test_numpy_numbers_are_numbers(tmp_path):
    path = write(tmp_path / "f.jsonl", jsonl([{"text": f"t{i}", "label": i % 2} for i in range(20)]))
    found = load_dataset(path, test_fraction=np.float32(0.25), seed=np.int64(3))
    expected = load_dataset(path, test_fraction=0.25, seed=3)
    assert [listed(part) for part in found[:2]] == [listed(part) for part in expected[:2]]
    for arguments, message in (({"seed": np.float64(3)}, "integer of at least 0"), ({"test_fraction": True}, "number")):
        with pytest.raises(ValueError, match=message):
            load_dataset(path, **arguments)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 99))
def test_what_is_held_out_leaves_every_class_in_train(labels, fraction, seed):
    labels = np.array(labels)
    train, test = hold_out(labels, fraction, np.random.default_rng(seed))
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert set(labels[train]) == set(labels)
    assert set(labels[test]) == {label for label in set(labels) if np.sum(labels == label) > 1}


def test_train_is_not_sorted_by_class(tmp_path):
    rows = [{"text": f"t{i}", "label": i // 500} for i in range(1000)]
    path = write(tmp_path / "f.jsonl", jsonl(rows))
    for train in (load_dataset(path).train, load_dataset(path, test=path).train):
        labels = np.array([label for _, label in listed(train)])
        assert all(0.3 < chunk.mean() < 0.7 for chunk in np.array_split(labels, 10))


def test_integer_labels_are_ordered_as_numbers_and_other_columns_can_be_named(tmp_path):
    path = write(tmp_path / "f.csv", "stars,review\n10,a\n-1,b\n2,c\n")
    dataset = load_dataset(str(path), test=str(path), text_column="review", label_column="stars")
    assert dataset.labels == ("-1", "2", "10")
    assert listed(dataset.test) == [("a", 2), ("b", 0), ("c", 1)]


def test_a_byte_order_mark_and_empty_lines_are_no_data(tmp_path):
    for name, content in (
        ("f.csv", "\ufefftext,label\r\na,x\r\n\r\nb,y\r\n"),
        ("f.jsonl", '\ufeff{"text": "a", "label": "x"}\n\n{"text": "b", "label": "y"}'),
    ):
        path = write(tmp_path / name, content)
        assert listed(load_dataset(path, test=path).test) == [("a", 0), ("b", 1)]


GOOD = '{"text": "a", "label": "x"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.jsonl", GOOD + "{'text'}\n", r"well-formed. Received: .*f.jsonl', line 2: Expecting property name"),
        ("f.jsonl", GOOD + "[" * 100_000 + "\n", r"f.jsonl', line 2: values nested more than 100 levels deep"),
        ("f.jsonl", GOOD + "[" * 500 + "]" * 500 + "\n", r"f.jsonl', line 2: values nested more than 100 levels deep"),
        ("f.jsonl", GOOD + "[1]\n", r"line 2: \[1\] is not a JSON object"),
        ("f.jsonl", GOOD + '{"label": "x"}\n', r"`text_column` .* one of \['label'\]. .*='text' for .*, line 2"),
        ("f.csv", "text,star\na,x\n", r"`label_column` .* one of \['text', 'star'\]. Received: label_column='label'"),
        ("f.jsonl", GOOD + '{"text": 5, "label": "x"}\n', r"text of an example must be .* Received: 5 in .*, line 2"),
        ("f.jsonl", GOOD + '{"text": "b", "label": null}', r"label of an example must .* Received: None in .*, line 2"),
        ("f.jsonl", GOOD + '{"text": "b", "label": true}', r"Received: True in .*, line 2"),
        ("f.jsonl", GOOD + '{"text": "b", "label": 0.5}', r"Received: 0.5 in .*, line 2"),
        ("f.csv", "text,label\na,x\nb, \n", r"Received: ' ' in .*f.csv', line 3"),
        ("f.csv", "text,label\na,x\nb\n", r"f.csv', line 3: 1 fields where the columns are \['text', 'label'\]"),
        ("f.csv", 'text,label\n"a"b,x\n', r"f.csv', line 2: ',' expected after '\"'"),
        ("f.csv", '"text"s,label\na,x\n', r"f.csv', line 1: ',' expected after"),
        ("f.tsv", "text\ttext\na\tx\n", r"f.tsv', line 1: the columns \['text', 'text'\] are not all different"),
        ("f.jsonl", GOOD + '{"text": "\\ud800", "label": "x"}', r"f.jsonl', line 2: .*surrogates not allowed"),
        ("f.jsonl", GOOD * 2, r"at least two classes. Received: .*f.jsonl' with \['x'\]"),
        ("f.csv", "text,label\n", r"at least one example. Received: .*f.csv', which holds none"),
        ("f.csv", "", r"at least one example"),
        ("f.txt", "a", r"must end in one of .jsonl, .csv, .tsv, .parquet, or in one of them and .gz or .zst. .*f.txt"),
        (
            "f.csv",
            "text,label\na,x\nb,y\n",
            r"two examples of some class, or `test` must be given. .* 2 examples of 2 cl",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(write(tmp_path / name, content))


def test_a_damaged_file_is_refused(tmp_path):
    path = write(tmp_path / "f.jsonl.gz", GOOD * 1000)
    for content in (b"not gzip", path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"must be readable UTF-8 text. Received: .*f.jsonl.gz', after line"):
            load_dataset(path)
    latin = tmp_path / "f.csv"
    for before in (0, 4000):  # lines that are read ahead
        latin.write_bytes(b"text,label\n" + b"a summer,y\n" * before + b"\xe9t\xe9,x\n")
        with pytest.raises(ValueError, match=rf"f.csv', line {before + 2}: .* can't decode byte 0xe9"):
            load_dataset(latin)


def test_a_label_that_only_the_test_file_has_is_refused(tmp_path):
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    test = write(tmp_path / "test.csv", "text,label\na,x\nb,z\n")
    with pytest.raises(
        ValueError, match=r"one of \['x', 'y'\], the labels of the training split. Received: 'z' in .*test.csv', line 3"
    ):
        load_dataset(train, test=test)


@pytest.mark.parametrize("name", ["nowhere.csv", Path("nowhere.jsonl")])
def test_a_file_that_is_not_there(name):
    with pytest.raises(FileNotFoundError, match=r"must name files that exist. Received: 'nowhere"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"test_fraction": 0},
            ValueError,
            r"`test_fraction` must be a number above 0 and below 1. Received: test_fraction=0$",
        ),
        ({"test_fraction": 1.0}, ValueError, r"Received: test_fraction=1.0"),
        ({"seed": -1}, ValueError, r"`seed` must be an integer of at least 0. Received: seed=-1"),
        ({"name_or_path": 3}, TypeError, r"`name_or_path` must be a string or a path, or a list of .* name_or_path=3"),
        (
            {"test": "t.csv"},
            ValueError,
            r"`test` must be None unless .* names files. Received: test='t.csv', .*'sample'",
        ),
        (
            {"text_column": "text"},
            ValueError,
            r"`text_column` must be None unless `name_or_path` names files or a TFDS dataset. .*='text', .*='sample'",
        ),
        ({"label_column": "a"}, ValueError, r"`label_column` must be None unless .* Received: label_column='a', .*"),
        (
            {"data_dir": "d"},
            ValueError,
            r"`data_dir` must be None unless `name_or_path` names a TFDS dataset. Received: data_dir='d', .*='sample'",
        ),
        ({"name_or_path": "f.csv", "data_dir": "d"}, ValueError, r"Received: data_dir='d', name_or_path='f.csv'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        load_dataset(**arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imdb_revews",
            r"a folder of Parquet files or the name of a .*: name_or_path='imdb_revews'. Similar names: imdb_reviews$",
        ),
        ("huggingface:imdb", r"Received: name_or_path='huggingface:imdb'"),
        ("qqqqqqqq.txt", r"Received: name_or_path='qqqqqqqq.txt'. No dataset of TFDS has a similar name"),
        ("glue/sst3", r"config and version that TFDS has. Received: 'glue/sst3'. .*BuilderConfig sst3 not found"),
        ("imdb_reviews:9.9.9", r"config and version that TFDS has. Received: 'imdb_reviews:9.9.9'. .*only: 1.0.0"),
        ("glue/mnli", r"`text_column` must be .* \['premise', 'hypothesis'\]. Received: text_column=None"),
        ("mnist", r"must be a dataset with a string feature. Received: 'mnist' with \['image', 'label'\]"),
        ("wmt14_translate/de-en", r"must be a dataset with a ClassLabel feature. .* with \['de', 'en'\]"),
    ],
)
def test_names_that_tfds_cannot_serve(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name, data_dir=tmp_path)


def test_the_text_feature_is_found():
    """By name, by what the dataset trains on, by the usual name, or because there is no other."""
    string, label = tfds.features.Tensor(shape=(), dtype=tf.string), tfds.features.ClassLabel(num_classes=2)

    def found(features, supervised=None, wanted=None):
        features = tfds.features.FeaturesDict({**features, "label": label, "image": tfds.features.Image()})
        info = SimpleNamespace(features=features, supervised_keys=supervised)
        return from_tfds._columns("n", info, wanted, None)

    text = tfds.features.Text()
    assert found({"id": string, "body": text, "text": text}, ("body", "label"), "id") == ["id", "label"]
    assert found({"id": string, "body": text, "text": text}, ("body", "label")) == ["body", "label"]
    assert found({"id": string, "body": text, "text": text}, ("image", "label")) == ["text", "label"]
    assert found({"body": string}) == ["body", "label"]


def test_a_column_that_the_tfds_dataset_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"features of imdb_reviews, \['text'\]. Received: text_column='body'"):
        load_dataset("imdb_reviews", data_dir=tmp_path, text_column="body")


def sst2(texts, label=None):
    return [{"sentence": text, "label": i % 2 if label is None else label, "idx": i} for i, text in enumerate(texts)]


def test_a_prepared_tfds_dataset_loads_without_its_unlabelled_examples(tmp_path):
    """GLUE's test split has no labels, so validation stands in for it; the text feature is called "sentence"."""
    train = sst2("abcdef") + sst2("xyz", label=-1)
    prepared("glue/sst2", tmp_path, {"train": train, "test": sst2("uvw", label=-1), "validation": sst2("ghi")})
    dataset = load_dataset("glue/sst2", data_dir=tmp_path)
    assert dataset.labels == ("negative", "positive")
    assert sorted(listed(dataset.train)) == [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", 0), ("f", 1)]
    assert listed(dataset.test) == [("g", 0), ("h", 1), ("i", 0)]
    assert dataset.train.element_spec == (tf.TensorSpec([], "string"), tf.TensorSpec([], "int32"))


def test_a_tfds_dataset_without_a_test_split_is_split(tmp_path):
    prepared("glue/sst2", tmp_path, {"train": sst2("abcdefgh")})
    train, test, _ = load_dataset("glue/sst2", data_dir=tmp_path, test_fraction=0.25)
    assert (len(listed(train)), len(listed(test))) == (6, 2)
    assert {text for text, _ in listed(train) + listed(test)} == set("abcdefgh")


def test_a_chosen_feature_is_the_text(tmp_path):
    examples = [{"title": f"t{i}", "description": f"d{i}", "label": i} for i in range(4)]
    prepared("ag_news_subset", tmp_path, {"train": examples, "test": examples})
    assert listed(load_dataset("ag_news_subset", data_dir=tmp_path).test)[1] == ("d1", 1)
    assert listed(load_dataset("ag_news_subset", data_dir=tmp_path, text_column="title").test)[1] == ("t1", 1)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"test": sst2("ab")}, r"must have a split 'train'. Received: 'glue/sst2' with \['test'\]"),
        ({"train": sst2("ab", label=-1)}, r"must have labelled examples in 'train'. Received: 'glue/sst2'"),
    ],
)
def test_a_tfds_dataset_with_nothing_to_train_on(tmp_path, splits, message):
    prepared("glue/sst2", tmp_path, splits)
    with pytest.raises(ValueError, match=message):
        load_dataset("glue/sst2", data_dir=tmp_path)


def test_an_unprepared_dataset_without_network_is_an_error_at_once(tmp_path, monkeypatch):
    def refuse(request, timeout):
        assert timeout <= 5
        raise OSError("no route")

    def download():
        raise AssertionError("asked before the network was tried")

    builder = SimpleNamespace(
        url_infos=["https://a.example/1", "http://b.example/2"], data_path="D", download_and_prepare=download
    )
    monkeypatch.setattr(from_tfds.urllib.request, "urlopen", refuse)
    with pytest.raises(
        FileNotFoundError, match=r"'n' is not prepared in D .*: b.example does not answer \(no route\). On"
    ):
        from_tfds._prepare("n", builder)


def test_a_known_name_that_is_not_prepared_says_where_and_nothing_else(tmp_path, monkeypatch, caplog):
    def refuse(request, timeout):
        raise OSError("no route")

    monkeypatch.setattr(from_tfds.urllib.request, "urlopen", refuse)
    with pytest.raises(
        FileNotFoundError, match=rf"'imdb_reviews' is not prepared in {tmp_path}/imdb_reviews/plain_text"
    ):
        load_dataset("imdb_reviews", data_dir=tmp_path)
    assert not caplog.records


def test_a_host_that_answers_with_an_error_is_reached(monkeypatch):
    def forbid(request, timeout):
        raise from_tfds.urllib.error.HTTPError(request.full_url, 403, "forbidden", None, None)

    def download():
        raise RuntimeError("checksum")

    builder = SimpleNamespace(url_infos=["https://a.example/1"], data_path="D", download_and_prepare=download)
    monkeypatch.setattr(from_tfds.urllib.request, "urlopen", forbid)
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded: checksum. .* `tfds build n`, .* `data_dir`"):
        from_tfds._prepare("n", builder)


@pytest.mark.skipif(
    not (SHARED / "tfds/imdb_reviews").exists(),
    reason="needs imdb_reviews as TFDS prepares it, in ../shared/tfds: the repository has no right to hold it",
)
def test_imdb_reviews():
    train, test, labels = load_dataset("imdb_reviews", data_dir=SHARED / "tfds")
    assert (int(train.cardinality()), int(test.cardinality()), labels) == (25000, 5000, ("neg", "pos"))
    first = [int(label) for _, label in train.take(1000)]
    assert 400 < sum(first) < 600


@pytest.mark.skipif(
    not (SHARED / "data/rt_polarity").exists(),
    reason="needs rt_polarity in ../shared/data: the repository has no right to hold it",
)
def test_rt_polarity():
    folder = SHARED / "data/rt_polarity"
    train, test, labels = load_dataset(folder / "train.jsonl.gz", test=folder / "test.jsonl.gz")
    assert (int(train.cardinality()), int(test.cardinality()), labels) == (9600, 1062, ("0", "1"))


def test_fields_may_be_longer_than_the_csv_module_takes_by_default(tmp_path):
    long = "word " * 30_000
    path = write(tmp_path / "f.csv", f"text,label\n{long},x\nb,y\n")
    train, _, _ = load_dataset(path, test=path)
    assert long in [text.decode() for text, _ in train.as_numpy_iterator()]
