"""Which texts `write_tokens` divides among files, how many it reads before, and folders of earlier versions."""

import json

import numpy as np
import pytest

from keras_tx import data, text
from keras_tx.data import token_files, token_rows, token_writer

LATER = ("parts", "index_sha256")  # keys of the JSON files that earlier versions did not write
TEXTS = [" ".join(np.random.default_rng(n).choice(["a", "hot", "dog", "dogs"], 7)) for n in range(13)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of 3 texts."""
    monkeypatch.setattr(token_rows, "BLOCK_ROWS", 3)
    monkeypatch.setattr(token_writer, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return text.BytePairTokenizer.train(TEXTS, 300)


def test_a_bounded_number_of_blocks_waits_for_the_end_of_few_texts(tokenizer, tmp_path, monkeypatch):
    """Or nothing would be tokenized until as many blocks as files have been read."""
    monkeypatch.setattr(token_rows, "HELD", 2)
    read = []
    first = next(token_rows.blocks(((b"%d" % i, read.append(i))[:1] for i in range(101)), 1000))
    assert first.rows == [(b"0",), (b"1",), (b"2",)] and read == list(range(3 * 3))
    for count, files in ((5, 5), (6, 6), (7, 3), (101, 23)):  # 2 blocks are divided, 3 and more are not
        index = data.write_tokens(["hot"] * count, tokenizer, tmp_path / str(count), num_shards=23, verbose=0)
        assert sum(size > 0 for size in index["sizes"]) == files


class Stopped(Exception):
    """Raised in the middle of a write."""


def old_write(texts, tokenizer, folder):
    """What versions wrote that did not divide few texts, and did not say so."""
    blocks_of = token_writer.blocks_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_writer, "blocks_of", lambda rows, parts: blocks_of(rows, 1))
        try:
            data.write_tokens(texts, tokenizer, folder, num_shards=11, num_threads=1, verbose=0)
        except Stopped:
            pass
    (path,) = folder.glob("*.json")
    state = {name: value for name, value in json.loads(path.read_text()).items() if name not in LATER}
    path.write_text(json.dumps(state, indent=1))
    return state


@pytest.mark.parametrize("finished", [True, False])
def test_folders_of_earlier_versions_are_checked_and_go_on(tokenizer, tmp_path, finished):
    def cut_off():
        yield from TEXTS
        if not finished:
            raise Stopped

    whole = old_write(TEXTS, tokenizer, tmp_path / "whole")
    assert whole["count"] == 5  # blocks, in 11 files
    state = old_write(cut_off(), tokenizer, tmp_path / "old")
    assert state["rows"] == (13 if finished else 6)
    if not finished:  # the index is then of this version
        whole["index_sha256"] = token_files.checksum(whole)
        (tmp_path / "whole" / "index.json").write_text(json.dumps(whole, indent=1))
    for _ in range(2):
        assert data.write_tokens(TEXTS, tokenizer, tmp_path / "old", num_shards=11, verbose=0) == whole
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "old" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="`dataset` must give the texts of the earlier call.* than the 13 that"):
        data.write_tokens([*TEXTS, "more"], tokenizer, tmp_path / "old", num_shards=11, verbose=0)
