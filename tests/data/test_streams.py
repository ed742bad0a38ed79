"""Loaders on many files: a stream has what the loader in memory gives, and bad files are refused in one sentence."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf

from keras_tx.data import files, load_dataset, load_text, load_translation, streams, workers

TEXTS = ["one", "", "drei été", "a\u2028b\x0cc", "fünf", "6", "seven of them", "8"]


def zst(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


def table(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def jsonl(**columns):
    rows = zip(*columns.values(), strict=True)
    return "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows).encode()


PLAIN = ("\ufeff" + "\r\n".join(TEXTS)).encode()
OF_TEXTS = {
    "f.txt": PLAIN,
    "f.gz": gzip.compress(PLAIN),
    "f.txt.zst": zst(PLAIN),
    "f.jsonl": jsonl(text=TEXTS),
    "f.jsonl.ZST": zst(jsonl(text=TEXTS)),
    "f.parquet": table({"n": range(len(TEXTS)), "text": TEXTS}),
    "f.parquet.gz": gzip.compress(table({"text": TEXTS})),
    "f.parquet.zst": zst(table({"text": TEXTS})),
}


def strings(dataset):
    return [text.decode() for text in dataset.as_numpy_iterator()]


def pairs(dataset):
    return [tuple(x.decode() if isinstance(x, bytes) else int(x) for x in row) for row in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", OF_TEXTS)
def test_a_stream_of_text_has_the_lines_of_the_text_in_memory(tmp_path, name, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 5)  # bytes: a line, a letter and a line break lie across chunks
    monkeypatch.setattr(files, "ROWS", 3)
    (tmp_path / name).write_bytes(OF_TEXTS[name])
    stream = load_text(tmp_path / name, validation_fraction=0.25, in_memory=False)
    assert stream.train.element_spec == tf.TensorSpec([], "string")
    assert strings(stream.train) == [TEXTS[i] for i in (0, 1, 2, 4, 5, 6)]
    assert strings(stream.validation) == [TEXTS[3], TEXTS[7]]
    assert strings(stream.train) == strings(stream.train)
    assert "".join(load_text(tmp_path / name)) == "\n".join(TEXTS)


def test_many_files_by_patterns_and_lists(tmp_path):
    for i in range(3):
        (tmp_path / f"{2 - i}.txt").write_text(f"x{i}\ny{i}\n")
    whole = "x2\ny2\nx1\ny1\nx0\ny0\n"
    assert "".join(load_text(f"{tmp_path}/*.txt")) == whole == "".join(load_text(tmp_path / "[0-9].txt"))
    listed = [f"{tmp_path}/[01].txt", tmp_path / "2.txt"]
    assert "".join(load_text(listed)) == whole
    stream = load_text(listed, validation_fraction=0.01, in_memory=False)
    assert strings(stream.train) == whole.split() and strings(stream.validation) == []
    (tmp_path / "a[1].txt").write_text("its name is no pattern")
    assert "".join(load_text(tmp_path / "a[1].txt")) == "its name is no pattern"


def test_workers_share_the_rows(tmp_path):
    (tmp_path / "f.txt").write_text("\n".join(map(str, range(20))))
    options = {"validation_fraction": 0.2, "in_memory": False}
    whole = load_text(tmp_path / "f.txt", **options)
    parts = [load_text(tmp_path / "f.txt", num_shards=3, shard_index=i, **options) for i in range(3)]
    for which in (0, 1):
        found = [strings(part[which]) for part in parts]
        assert sorted(sum(found, [])) == sorted(strings(whole[which]))
        assert max(map(len, found)) - min(map(len, found)) <= 1
    policy = tf.data.experimental.AutoShardPolicy
    assert parts[0].train.options().experimental_distribute.auto_shard_policy == policy.OFF
    assert whole.train.options().experimental_distribute.auto_shard_policy == policy.DATA


LABELS = ["no", "yes", "no", "no", "yes", "no", "yes", "yes"]


@pytest.mark.parametrize("kind", ["f.jsonl", "f.csv", "f.jsonl.zst", "f.parquet"])
def test_a_stream_of_labelled_texts_has_those_in_memory(tmp_path, kind):
    texts = [f"t{i}" for i in range(8)]
    content = {"f.jsonl": jsonl(text=texts, label=LABELS), "f.parquet": table({"text": texts, "label": LABELS})}
    content["f.jsonl.zst"] = zst(content["f.jsonl"])
    content["f.csv"] = "\n".join(["text,label", *map(",".join, zip(texts, LABELS, strict=True))]).encode()
    path = tmp_path / kind
    path.write_bytes(content[kind])
    expected = [(text, int(label == "yes")) for text, label in zip(texts, LABELS, strict=True)]
    train, test, names = load_dataset(path, test=[path], in_memory=False)
    assert names == ("no", "yes") and pairs(train) == pairs(test) == expected
    assert sorted(pairs(load_dataset(path, test=path).train)) == expected
    train, test, _ = load_dataset(path, test_fraction=0.25, in_memory=False)
    assert sorted(pairs(train) + pairs(test)) == expected and [label for _, label in pairs(test)] == [0, 1]
    given = load_dataset([path, path], labels=("yes", "no"), test=path, in_memory=False)
    assert pairs(given.train) == [(text, 1 - label) for text, label in expected] * 2
    assert pairs(load_dataset(path, labels=("yes", "no"), test=path).test) == pairs(given.test)


def test_a_stream_of_pairs_has_those_in_memory(tmp_path):
    sources, targets = [f"s{i}" for i in range(9)], [f"t{i}" for i in range(9)]
    for language, lines in (("en", sources), ("de", targets)):
        (tmp_path / f"train.{language}.zst").write_bytes(zst("\n".join(lines).encode()))
        (tmp_path / f"a.{language}").write_text("\n".join(lines[:4]))
        (tmp_path / f"b.{language}").write_text("\n".join(lines[4:]))
    (tmp_path / "t.parquet").write_bytes(table({"en": sources, "de": targets}))
    expected = list(zip(sources, targets, strict=True))
    languages = {"source": "en", "target": "de"}
    patterns = (f"{tmp_path}/[ab].en", [tmp_path / "a.de", tmp_path / "b.de"])
    for given, options in ((tmp_path, languages), (patterns, {}), (tmp_path / "t.parquet", languages)):
        whole = load_translation(given, **options)
        stream = load_translation(given, test_fraction=0.25, in_memory=False, **options)
        assert whole.languages == stream.languages == ("en", "de")
        for dataset in (whole, stream):
            assert sorted(sum(map(pairs, dataset[:3]), [])) == expected
        assert pairs(stream.test) == [expected[3], expected[7]] and pairs(stream.validation) == [expected[4]]
    again = load_translation(patterns, validation=patterns, test=patterns, in_memory=False)
    assert pairs(again.train) == pairs(again.validation) == pairs(again.test) == expected


def read(load, path, **options):
    """All of a stream, whose errors come when it is read."""
    dataset = load(path, in_memory=False, **options)
    return [list(part.as_numpy_iterator()) for part in dataset if isinstance(part, tf.data.Dataset)]


LONG = os.urandom(3000).hex().encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.gz", gzip.compress(LONG)[:-9], r"must be a whole gzip file. Received: .*f.gz'"),
        ("f.zst", zst(LONG)[:-9], r"must be a whole zstd file. Received: .*f.zst'"),
        ("f.zst", b"not zstd", r"must be a whole zstd file. Received: .*f.zst'"),
        ("f.txt", b"a\nb\n\xff\n", r"must be UTF-8 text. Received: .*f.txt', line 3: .* can't decode byte 0xff"),
        (
            "f.parquet",
            table({"text": ["a"]})[:-9],
            r"must be a whole Parquet file. Received: .*f.parquet', after row 0",
        ),
        ("f.parquet.gz", gzip.compress(table({"text": ["a"]}))[:-9], r"must be a whole Parquet file. .*f.parquet.gz'"),
        ("f.parquet", table({"body": ["a"]}), r"`text_column` must name a column, one of \['body'\]. .*f.parquet'"),
        ("f.csv", b"body\n", r"`text_column` must name a column, one of \['body'\]. .*f.csv', line 1"),
        ("f.tsv", b"body\tx\na\tb\n", r"`text_column` must name a column, one of \['body', 'x'\]. .*f.tsv', line 1"),
        ("f.jsonl", b'{"body": "a"}', r"`text_column` must name a column, one of \['body'\]. .*f.jsonl', line 1"),
        (
            "f.parquet",
            table({"text": [1]}),
            r"text of an example must be a string. Received: 1 in .*f.parquet', line 1",
        ),
        (
            "f.parquet",
            table({"text": pyarrow.array([b"a"] * 1030 + [b"\xff", b"b"]).view(pyarrow.string())}),
            r"must hold UTF-8 text. Received: .*f.parquet', line 1031: .* can't decode byte 0xff",
        ),
        ("f.jsonl", b'{"text": "a"}\n{', r"must be well-formed. Received: .*f.jsonl', line 2"),
        (
            "f.jsonl.zst",
            zst(jsonl(text=[LONG.decode()]))[:-9],
            r"must be readable UTF-8 text. Received: .*after line 0",
        ),
        ("f.csv", b"text\n\xff\n", r"must be readable UTF-8 text. Received: .*f.csv', line 2"),
    ],
)
def test_bad_files_are_refused_in_memory_and_in_streams(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path / name)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        read(load_text, tmp_path / name)


@pytest.mark.parametrize("name", ["f.parquet", "f"])
def test_a_folder_of_parquet_files_is_read_as_a_list_of_them(tmp_path, name):
    """Spark writes such folders, with hidden checksums and an empty file beside the parts."""
    folder = tmp_path / name
    folder.mkdir()
    parts = [folder / f"part-0000{i}.snappy.parquet" for i in (1, 0)]
    for part, (first, end) in zip(parts, ((0, 5), (5, 8)), strict=True):
        texts = [f"t{place}" for place in range(first, end)]
        part.write_bytes(table({"text": texts, "label": LABELS[first:end], "target": texts}))
    for name in ("_SUCCESS", ".part-00000.snappy.parquet.crc", "_metadata.parquet", ".hidden.parquet"):
        (folder / name).write_bytes(b"")
    parts.sort()
    assert load_text(folder) == load_text(parts)
    for given, path in ((folder, parts), (str(folder), parts), ([folder, parts[0]], [*parts, parts[0]])):
        assert pairs(load_dataset(given, test=folder, in_memory=False).train) == pairs(
            load_dataset(path, test=parts, in_memory=False).train
        )
    languages = {"source": "text", "target": "target"}
    found, as_text, expected = (load_translation(given, **languages) for given in (folder, str(folder), parts))
    assert pairs(found.train) == pairs(as_text.train) == pairs(expected.train)


@pytest.mark.parametrize("load", [load_text, load_dataset])
def test_names_that_name_nothing(load, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`name_or_path` must match at least one file. Received: .*no-\*.csv'"):
        load(tmp_path / "no-*.csv")
    with pytest.raises(FileNotFoundError, match=r"must name files that exist. Received: '.*no.csv'"):
        load([tmp_path / "no.csv"], in_memory=False)
    with pytest.raises(FileNotFoundError, match=f"a folder of Parquet files. Received: '{tmp_path}', a folder without"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"`name_or_path` must name at least one file. Received: name_or_path=\[\]"):
        load([])
    (tmp_path / "f.csv.xz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must be text, plain or compressed as .gz or .zst.* Received: .*f.csv.xz'"):
        load(tmp_path / "f.csv.xz")


def test_parallel_files_that_do_not_fit(tmp_path):
    for name, lines in (("a.en", "1\n2\n3\n4"), ("a.de", "1\n2"), ("b.en", "1")):
        (tmp_path / name).write_text(lines)
    both = tmp_path / "a.en", tmp_path / "a.de"
    message = r"the same number of lines. Received: '.*a.en' with 4 and '.*a.de' with 2"
    with pytest.raises(ValueError, match=message):
        load_translation(both)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        read(load_translation, both)
    with pytest.raises(ValueError, match=r"`name_or_path` must name as many files of sources .* with 2 and 1"):
        load_translation((f"{tmp_path}/*.en", tmp_path / "a.de"))
    with pytest.raises(ValueError, match=r"`source` and `target` must be given for tables.*target=None, name_or_path"):
        load_translation("x.jsonl", source="en")


@pytest.mark.parametrize(
    ("load", "arguments", "error", "message"),
    [
        (load_text, {"num_shards": 2, "shard_index": 0}, ValueError, r"None unless `in_memory` is False.*num_shards=2"),
        (load_text, {"in_memory": 0}, TypeError, r"`in_memory` must be True or False. Received: in_memory=0"),
        (load_dataset, {"in_memory": False, "seed": 3}, ValueError, r"`seed` must be 0 if .* Received: seed=3"),
        (
            load_dataset,
            {"in_memory": False},
            ValueError,
            r"`in_memory` must be True unless .* names files. Received: in_memory=False, .*'sample'",
        ),
        (load_dataset, {"labels": "ab"}, ValueError, r"`labels` must be None unless .* labels='ab', .*'sample'"),
        (load_dataset, {"name_or_path": "f.csv", "labels": "ab"}, ValueError, r"at least two different .* labels='ab'"),
        (
            load_translation,
            {"in_memory": False},
            ValueError,
            r"`in_memory` must be True unless .* in_memory=False, .*='sample'",
        ),
    ],
)
def test_arguments_that_would_do_nothing(load, arguments, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("f.csv").write_text("text,label\na,x\nb,y\n")
    with pytest.raises(error, match=message):
        load(**arguments)


def config(kind, index, **cluster):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (1, 0)),
        ("{}", (1, 0)),
        (config("worker", 1, worker=["a:1", "b:1"]), (2, 1)),
        (config("worker", "1", chief=["c:1"], worker=["a:1", "b:1"]), (3, 2)),
        (config("chief", 0, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"]), (3, 0)),
        (config("evaluator", 0, chief=["c:1"], worker=["a:1", "b:1"]), (1, 0)),
        (config("worker", 0, worker=["a:1"]), (1, 0)),
    ],
)
def test_the_environment_says_which_part_a_worker_reads(text, expected, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert workers.share(None, None) == expected
    assert workers.share(np.int64(4), 3) == (4, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no attribute 'get'"),
        (config("worker", 2, worker=["a:1", "b:1"]), "there is no worker 2"),
        (config("worker", 0, worker="a:1"), "'chief' and 'worker' must be lists of addresses"),
        (config("worker", 0, chief="c:1", worker=["a:1", "b:1"]), "'chief' and 'worker' must be lists of addresses"),
        (config("worker", None, worker=["a:1", "b:1"]), "'task' must have an integer 'index'"),
        (config("worker", True, worker=["a:1", "b:1"]), "'task' must have an integer 'index'"),
        (config("worker", 0.5, worker=["a:1", "b:1"]), "'task' must have an integer 'index'"),
        (config("worker", "x", worker=["a:1", "b:1"]), "invalid literal"),
        (json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}), "must have an integer"),
    ],
)
def test_a_malformed_environment(text, reason, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    rule = "TF_CONFIG must be JSON with 'cluster' and 'task'"
    with pytest.raises(ValueError, match=rf"{rule}.* Received: .*\(.*{reason}.*\)$"):
        workers.share(None, None)


@pytest.mark.parametrize("given", [(2, 2), (2, -1), (0, 0), (2.0, 1), (True, 0)])
def test_parts_that_do_not_exist(given):
    with pytest.raises(ValueError, match=r"`shard_index` must be an integer of at least 0 and less than `num_shards`."):
        workers.share(*given)
    with pytest.raises(
        ValueError, match=r"must be given together, or neither. Received: num_shards=.*, shard_index=None"
    ):
        workers.share(given[0], None)


@pytest.mark.parametrize(("fraction", "expected"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.1, 10), (0.5, 50)])
def test_a_part_has_its_fraction_of_the_rows(fraction, expected):
    """100 * 0.29 is just below 29."""
    held_out, others = (list(streams.part(range(100), fraction, held_out=one)) for one in (True, False))
    assert len(held_out) == expected and sorted(held_out + others) == list(range(100))
