"""`load_translation`: every source gives pairs in their order, no test line is lost, and errors name the files."""

import gzip

import numpy as np
import pytest
import tensorflow as tf

from keras_tx.data import load_translation
from tests.data.tfds_folder import prepared
from tests.tools import SHARED

TRAIN = [
    ("one dog", "ein Hund"),
    ("two cats", "zwei Katzen"),
    ("été 電影", "sommer"),
    ("a\u2028b\x0cc\rd", "e"),
    ("f", "g"),
]
TEST = [("x", "y"), ("", "leer"), ("z ", " ")]


def write(path, lines, end="\n"):
    content = end.join(lines) + end
    opened = gzip.open if path.suffix == ".gz" else open
    path.parent.mkdir(exist_ok=True)
    with opened(path, "wb") as file:
        file.write(content.encode())
    return path


def write_pairs(folder, names, pairs, **options):
    return tuple(
        write(folder / name, lines, **options) for name, lines in zip(names, zip(*pairs, strict=True), strict=True)
    )


def listed(dataset):
    return [tuple(side.decode() for side in pair) for pair in dataset.as_numpy_iterator()]


@pytest.fixture
def folder(tmp_path):
    """Named as in the wild: a tokenized part, gzipped or not, another part of the data and of the world beside it."""
    write_pairs(tmp_path, ("train.lc.tok.en.gz", "train.lc.tok.de.gz"), TRAIN)
    write_pairs(tmp_path, ("valid.en", "valid.de"), TEST[::-1], end="\r\n")
    write_pairs(tmp_path, ("test_2016.en", "test_2016.de"), TEST)
    (tmp_path / "README.md").write_text("About.")
    (tmp_path / "train").mkdir()
    return tmp_path


def test_a_folder_gives_its_parts(folder):
    train, validation, test, languages = load_translation(folder, source="en", target="de")
    assert sorted(listed(train)) == sorted(TRAIN)
    assert (listed(validation), listed(test)) == (TEST[::-1], TEST)
    assert [int(part.cardinality()) for part in (train, validation, test)] == [5, 3, 3]
    assert {part.element_spec for part in (train, validation, test)} == {(tf.TensorSpec([], "string"),) * 2}
    assert languages == ("en", "de")


def test_the_other_of_two_languages_need_not_be_said(folder):
    assert load_translation(str(folder), target="de").languages == ("en", "de")
    assert load_translation(str(folder), source="de").languages == ("de", "en")
    assert listed(load_translation(folder, source="de").test) == [pair[::-1] for pair in TEST]


def test_names_may_begin_with_the_name_of_the_corpus(tmp_path):
    for part, pairs in (("train", TRAIN), ("dev", TEST), ("test", TEST)):
        write_pairs(tmp_path, (f"news-{part}.en", f"news-{part}.de"), pairs)
        write_pairs(tmp_path, (f"books.{part}.en", f"books.{part}.de"), [("no", "nein")])
    assert sorted(listed(load_translation(tmp_path / "news", source="en").train)) == sorted(TRAIN)
    assert listed(load_translation(f"{tmp_path}/books", source="en", target="de").train) == [("no", "nein")]


def test_one_of_several_test_sets_is_chosen(folder):
    write_pairs(folder, ("test_2017.en", "test_2017.de"), TEST[:1])
    write_pairs(folder, ("test_2017_hard.en", "test_2017_hard.de"), TEST[:2])
    with pytest.raises(ValueError, match=r"two files for 'test'; .* \['test_2016', 'test_2017', 'test_2017_hard'\]"):
        load_translation(folder, source="en")
    assert listed(load_translation(folder, source="en", test="test_2017").test) == TEST[:1]
    assert listed(load_translation(folder, source="en", test="test_2017_").test) == TEST[:2]
    other = (folder / "valid.en", folder / "valid.de")
    assert listed(load_translation(folder, source="en", test=other).test) == TEST[::-1]


def test_two_files_are_split_by_seed(tmp_path):
    pairs = [(f"s{i}", f"t{i}") for i in range(60)]
    paths = write_pairs(tmp_path, ("books.en", "books.it"), pairs)
    data = load_translation(paths, test_fraction=0.1)
    train, validation, test = map(listed, data[:3])
    assert (len(train), len(validation), len(test), data.languages) == (48, 6, 6, ("en", "it"))
    assert sorted(train + validation + test) == sorted(pairs)
    assert train != sorted(train, key=pairs.index)
    for part in (validation, test):
        assert part == sorted(part, key=pairs.index)
    assert listed(load_translation(paths, test_fraction=0.1).train) == train
    assert set(listed(load_translation(paths, test_fraction=0.1, seed=1).test)) != set(test)
    again = load_translation(paths, test_fraction=np.float64(0.1), seed=np.int64(0))
    assert [listed(part) for part in again[:3]] == [train, validation, test]
    data = load_translation(paths, validation=paths, test=[str(path) for path in paths], source="English")
    assert listed(data.validation) == listed(data.test) == pairs
    assert (int(data.train.cardinality()), data.languages) == (60, ("English", "it"))


def test_pairs_with_an_empty_side_are_left_out_of_train_alone(tmp_path):
    pairs = [("a", "b"), ("", "c"), ("d", " \t"), ("e", "f")]
    paths = write_pairs(tmp_path, ("f.en", "f.de"), pairs)
    with pytest.warns(UserWarning, match="2 of 4 pairs have an empty side .* the first in line 2"):
        data = load_translation(paths, validation=paths, test=paths)
    assert sorted(listed(data.train)) == [("a", "b"), ("e", "f")]
    assert listed(data.validation) == listed(data.test) == pairs


def test_the_last_line_need_not_end_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "f.en").write_text("\ufeffa\nb")
    (tmp_path / "f.de").write_text("c\nd\n")
    paths = (tmp_path / "f.en", tmp_path / "f.de")
    assert listed(load_translation(paths, validation=paths, test=paths).test) == [("a", "c"), ("b", "d")]


def test_files_that_do_not_go_together(folder):
    write(folder / "test_2016.de", ["y"])
    with pytest.raises(ValueError, match=r"the same number of lines. .*2016.en' with 3 and .*2016.de' with 1"):
        load_translation(folder, source="en")
    (folder / "test_2016.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"'test' must exist in 'en' and 'de'. .* with \['test_2016.en'\]"):
        load_translation(folder, source="en")
    (folder / "train.lc.tok.de.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"'train' must exist .* with \['train.lc.tok.en.gz'\]"):
        load_translation(folder, source="en", target="de")


def test_files_that_are_not_there(folder):
    with pytest.raises(FileNotFoundError, match=r"'train' must exist .*nowhere' with \[\]"):
        load_translation(folder / "nowhere", source="en", target="de")
    with pytest.raises(FileNotFoundError, match=r"'train' must exist .*/train' with \[\]"):
        load_translation(f"{folder}/train", source="en", target="de")  # an empty folder
    with pytest.raises(FileNotFoundError, match=r"'test' must exist in 'en' and 'de'. .* with \[\]"):
        load_translation(folder, source="en", test="flickr")
    with pytest.raises(FileNotFoundError, match=r"must name files that exist. Received: 'no.en'"):
        load_translation(("no.en", "no.de"))


def test_bytes_that_are_not_text(tmp_path):
    paths = write_pairs(tmp_path, ("f.en", "f.de.gz"), TRAIN)
    paths[0].write_bytes(b"fine\nalso fine\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"must be UTF-8 text. Received: .*f.en', line 3: .* can't decode byte 0xe9"):
        load_translation(paths)
    for content in (b"not gzip", paths[1].read_bytes()[:-9]):
        paths[1].write_bytes(content)
        with pytest.raises(ValueError, match=r"must be a whole gzip file. Received: .*f.de.gz'"):
            load_translation((paths[1], paths[1]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"test_fraction": 1}, ValueError, r"`test_fraction` must be .* below 1. Received: test_fraction=1$"),
        ({"seed": True}, ValueError, r"`seed` must be an integer of at least 0. Received: seed=True"),
        ({"name_or_path": 3}, TypeError, r"`name_or_path` must be a string, a path, or two .*: name_or_path=3"),
        ({"source": "en"}, ValueError, r"`source` must be one of \['english', 'tavic'\]. Received: source='en'"),
        ({"target": "de"}, ValueError, r"`target` must be one of .* Received: target='de'"),
        ({"source": "tavic", "target": "tavic"}, ValueError, r"must differ. Received: source='tavic', target='tavic'"),
        (
            {"name_or_path": ("a.de", "b.de"), "source": "de", "target": "de"},
            ValueError,
            r"must differ. .* source='de'",
        ),
        ({"test": "t"}, ValueError, r"`test` must be None unless .* names files. Received: test='t', .*'sample'"),
        ({"data_dir": "d"}, ValueError, r"`data_dir` must be None unless .* data_dir='d', name_or_path='sample'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        load_translation(**arguments)


def test_wrong_arguments_for_files(folder):
    with pytest.raises(ValueError, match=r"must be given, .* source=None, target=None for .* with \['de', 'en'\]"):
        load_translation(folder)
    with pytest.raises(ValueError, match=r"must be given, .* source='cs', target=None for .* with \['de', 'en'\]"):
        load_translation(folder, source="cs")
    pair = (folder / "valid.en", folder / "valid.de")
    with pytest.raises(ValueError, match=r"`test` must be two files, source and target, .* Received: test='flickr'"):
        load_translation(pair, test="flickr")
    with pytest.raises(ValueError, match=r"`data_dir` must be None unless .* data_dir='d', name_or_path=\(.*valid.en'"):
        load_translation(pair, data_dir="d")
    one = write_pairs(folder, ("one.en", "one.de"), TRAIN[:1])
    with pytest.raises(
        ValueError, match=r"must hold pairs to train on. Received: .*one.en.* with 1, test_fraction=0.05"
    ):
        load_translation(one)


TED = "ted_hrlr_translate/pt_to_en"


def ted(count, start=0):
    return [{"pt": f"p{i}", "en": f"e{i}"} for i in range(start, start + count)]


def test_a_prepared_tfds_dataset_loads(tmp_path):
    prepared(TED, tmp_path, {"train": ted(5), "validation": ted(2, 7), "test": [*ted(1, 9), {"pt": "", "en": "x"}]})
    data = load_translation(TED, data_dir=tmp_path)
    assert sorted(listed(data.train)) == [(f"p{i}", f"e{i}") for i in range(5)]
    assert listed(data.validation) == [("p7", "e7"), ("p8", "e8")]
    assert listed(data.test) == [("p9", "e9"), ("", "x")]
    assert data.languages == ("pt", "en")
    data = load_translation(TED, data_dir=tmp_path, source="en")
    assert (listed(data.validation)[0], data.languages) == (("e7", "p7"), ("en", "pt"))


def test_parts_that_a_tfds_dataset_lacks_are_taken_out_of_train(tmp_path):
    prepared(TED, tmp_path, {"train": ted(20), "test": ted(3)})
    data = load_translation(TED, data_dir=tmp_path, test_fraction=0.2)
    assert [len(listed(part)) for part in data[:3]] == [16, 4, 3]
    assert set(listed(data.train)).isdisjoint(listed(data.validation))


def test_a_tfds_dataset_without_train(tmp_path):
    prepared(TED, tmp_path, {"test": ted(3)})
    with pytest.raises(ValueError, match=r"must have a split 'train'. Received: '.*pt_to_en' with \['test'\]"):
        load_translation(TED, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ted_hrlr_translat",
            r"parallel files, .*a folder of parallel or Parquet files or the name of .*names: ted_hrlr_translate",
        ),
        ("imdb_reviews", r"must be a dataset of translations. Received: 'imdb_reviews' with Feat.*\n.*'label'"),
    ],
)
def test_names_that_tfds_cannot_serve(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        load_translation(name, data_dir=tmp_path)


@pytest.mark.parametrize("name", ["multi30k", "multi30k_tok"])
def test_multi30k(name):
    folder = SHARED / "data" / name
    if not folder.exists():
        pytest.skip(f"needs {name} in ../shared/data: the repository has no right to hold its sentences")
    data = load_translation(folder, source="en")
    assert [int(part.cardinality()) for part in data[:3]] == [29000, 1014, 1000]
    assert data.languages == ("en", "de")
    with gzip.open(next(folder.glob("test*de.gz")), "rt", encoding="utf-8") as file:
        assert [target for _, target in listed(data.test)] == file.read().split("\n")[:-1]


def test_a_text_that_is_there_twice_is_refused(tmp_path):
    for name in ("train.en.gz", "train.de.gz", "train.fr", "train.fr.gz", "notes.en", "notes.en.gz"):
        write(tmp_path / name, ["a"] * 100)
    assert len(listed(load_translation(tmp_path, source="en", target="de").train)) > 80  # the others are not read
    write(tmp_path / "train.en", ["b"] * 100)
    message = r"one file for 'train' in 'en', compressed or not. Received: .* with \['train.en', 'train.en.gz'\]"
    with pytest.raises(ValueError, match=message):
        load_translation(tmp_path, source="en", target="de")
