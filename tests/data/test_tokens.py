"""Token files: what is read is what the tokenizer gives; a write or epoch that is cut off goes on as if it was not."""

import gc
import json
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tx import data, models, text
from keras_tx.data import token_files, token_rows, token_source, token_writer
from keras_tx.data.token_encoder import Encoder, encode_block
from keras_tx.training import PaddedCrossentropy, Resume
from tests import forked

RANDOM = np.random.default_rng(7)
WORDS = ["a", "hot", "dog", "dogs", "été", "!", "sun", "x" * 30]
TEXTS = [" ".join(RANDOM.choice(WORDS, n)) for n in RANDOM.integers(0, 13, 97)]
KEPT = [one for one in TEXTS if one]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many blocks and windows from little text."""
    monkeypatch.setattr(token_rows, "BLOCK_BYTES", 150)
    monkeypatch.setattr(token_source, "WINDOW", 3)
    monkeypatch.setattr(token_writer, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def tokenizer():
    return text.BytePairTokenizer.train(WORDS * 2, 300)


@pytest.fixture(scope="module")
def written(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "BLOCK_BYTES", 150)
        index = data.write_tokens(TEXTS, tokenizer, folder, num_shards=6, verbose=0)
    assert index["documents"] == len(KEPT) and index["left_out"] == len(TEXTS) - len(KEPT) > 0
    assert index == token_files.read_index(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [row[row != tokenizer.pad_id].tolist() for row in tokenizer(KEPT)["token_ids"]]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def listed(dataset):
    return [tf.nest.map_structure(lambda x: x.tolist(), element) for element in dataset.as_numpy_iterator()]


def documents(batches):
    """The documents of packed rows, of which the pieces that were cut are put together again; and their labels."""
    found, labels = [], []
    left = False
    for features, targets in batches:
        for ids, numbers, positions, row in zip(*(features[n] for n in features), targets, strict=True):
            for number in range(1, max(numbers) + 1):
                here = [i for i, one in enumerate(numbers) if one == number]
                assert [positions[i] for i in here] == list(range(len(here)))
                if not left:
                    found.append([])
                    labels.append([])
                found[-1] += [ids[i] for i in here]
                labels[-1] += [row[i] for i in here]
                left = labels[-1][-1] != 0  # the next token is in the next row
            assert {row[i] for i, one in enumerate(numbers) if one == 0} <= {0}
            assert {ids[i] for i, one in enumerate(numbers) if one == 0} <= {0}
    return found, labels


def named(features):
    return {name: features[name] for name in ("token_ids", "document_ids", "positions")}


def packed(folder, batch_size=2, **options):
    batches = listed(data.read_tokens(folder, batch_size, length=16, **options))
    return [(named(features), labels) for features, labels in batches]


def test_texts_come_back_in_their_order(written, rows):
    found = listed(data.read_tokens(written, shuffle=False, next_tokens=False))
    assert [features["token_ids"] for features in found] == rows
    for (features, labels), row in zip(listed(data.read_tokens(written, shuffle=False)), rows, strict=True):
        assert features["token_ids"] == row and labels == [*row[1:], 0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_rows_hold_every_token_once_and_padding_only_at_the_end(written, rows, shuffle):
    batches = packed(written, shuffle=shuffle)
    found, labels = documents(batches)
    assert (sorted(found) == sorted(rows)) and (found == rows) == (not shuffle)
    assert labels == [[*row[1:], 0] for row in found]
    numbers = np.concatenate([np.ravel(features["document_ids"]) for features, _ in batches])
    count = sum(map(len, rows))
    assert numbers[:count].all() and not numbers[count:].any() and len(numbers) == -(-count // 32) * 32
    dataset = data.read_tokens(written, 2, length=16)
    assert len(dataset) == len(batches)
    assert {x.shape for x in tf.nest.flatten(dataset.element_spec)} == {tf.TensorShape([2, 16])}


def test_packed_rows_are_those_of_pack_sequences_where_no_text_is_cut(tokenizer, tmp_path):
    """First fit fills rows without gaps too if two equal texts fill a row."""
    data.write_tokens(["hot", "dog"] * 6, tokenizer, tmp_path / "t", num_shards=1, verbose=0)
    ids = tokenizer(["hot", "dog"] * 6)["token_ids"]
    theirs = data.pack_sequences(ids, 2 * ids.shape[1]).batch(2)
    ours = data.read_tokens(tmp_path / "t", 2, length=2 * ids.shape[1], shuffle=False)
    for (a, x), (b, y) in zip(listed(ours), listed(theirs), strict=True):
        assert named(a) == named(b) and x == y


def test_orders_differ_by_epoch_and_seed_and_repeat(written):
    orders = [packed(written, epoch=epoch, seed=seed) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    tf.random.set_seed(99)
    assert packed(written, epoch=tf.constant(1)) == orders[1]


def each(numbers, make):
    """What `make(number)` gives for each number; it is traced once, with the number as a tensor."""
    counted = tf.data.Dataset.from_tensor_slices(np.array(numbers, "int64"))
    found = listed(counted.flat_map(lambda i: make(i).map(lambda *element: (i, element))))
    return [[element if len(element) > 1 else element[0] for i, element in found if i == number] for number in numbers]


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"length": 16}, None), ({"length": 16}, 40), ({"max_tokens": 64}, 40), ({}, None)],
    ids=str,
)
def test_an_epoch_from_any_batch_on(written, options, steps):
    def read(start):
        batch_size = 2 if "length" in options else None
        return data.read_tokens(written, batch_size, epoch=1, steps=steps, start=start, next_tokens=False, **options)

    whole = listed(read(0))
    assert len(whole) == steps if steps else len(whole) > 10
    starts = [0, 1, 2, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 3]
    assert each(starts, read) == [whole[start:] for start in starts]


def test_epochs_of_steps_go_through_all_packed_rows(written):
    whole = sum(each([0, 1], lambda epoch: data.read_tokens(written, 2, length=16, epoch=epoch)), [])
    epochs = each(range(len(whole) // 4), lambda epoch: data.read_tokens(written, 2, length=16, epoch=epoch, steps=4))
    assert sum(epochs, []) == whole[: len(whole) // 4 * 4]


def test_batches_of_similar_length_are_those_of_bucket_by_length(written):
    texts = data.read_tokens(written, seed=3)
    for options in ({"max_tokens": 64}, {"batch_size": [5, 4, 3]}):
        options["boundaries"] = (8, 16)
        expected = data.bucket_by_length(texts, **options)
        assert listed(data.read_tokens(written, seed=3, **options)) == listed(expected)
    assert len(data.read_tokens(written, max_tokens=64, steps=50)) == 50


def graphs():
    gc.collect()
    return sum(issubclass(type(one), tf.Graph) for one in gc.get_objects())


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": 3, "length": 5}, {}], ids=str)
def test_a_dataset_that_is_no_longer_used_leaves_no_graph(written, options):
    before = graphs()
    for epoch in range(2):
        data.read_tokens(written, epoch=epoch, **options)
    assert graphs() <= before


def test_workers_read_everything_once_in_the_same_number_of_batches(written, rows):
    whole = [packed(written, num_shards=3, shard_index=i) for i in range(3)]
    assert len({len(batches) for batches in whole}) == 1
    assert sorted(sum([documents(batches)[0] for batches in whole], [])) == sorted(rows)
    parts = [listed(data.read_tokens(written, next_tokens=False, num_shards=2, shard_index=i)) for i in range(2)]
    assert sorted(x["token_ids"] for x in sum(parts, [])) == sorted(rows)
    for i in range(3):
        rest = packed(written, num_shards=3, shard_index=i, start=len(whole[i]) - 2)
        assert rest == whole[i][-2:]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (2, [1, 1]),
        (3, [1, 1, 1]),
        (7, [2, 2, 3]),
        (11, [3, 4, 4]),
        (15, [5, 5, 5]),
        (16, [6, 5, 5]),
        (31, [11, 10, 10]),
    ],
)
def test_few_texts_are_divided_among_all_files(tokenizer, tmp_path, monkeypatch, count, sizes):
    """Up to a block of 5 texts for each of 3 files they are divided equally; then a file gets every third block."""
    monkeypatch.setattr(token_rows, "BLOCK_ROWS", 5)
    texts = [WORDS[i % 5] for i in range(count)]
    data.write_tokens(texts, tokenizer, tmp_path, num_shards=3, verbose=0)
    options = {"shuffle": False, "next_tokens": False}
    parts = [listed(data.read_tokens(tmp_path, num_shards=3, shard_index=i, **options)) for i in range(3)]
    assert [len(part) for part in parts if part] == sizes
    in_order = listed(data.read_tokens(tmp_path, num_shards=1, shard_index=0, **options))
    ids = tokenizer(texts)["token_ids"]
    assert [x["token_ids"] for x in in_order] == [row[row != tokenizer.pad_id].tolist() for row in ids]
    if len(sizes) == 3:  # with `steps`, each worker reads its own texts again and again
        for i, part in enumerate(parts):
            again = listed(data.read_tokens(tmp_path, num_shards=3, shard_index=i, steps=2 * len(part), **options))
            assert again == 2 * part


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 2}, {"max_tokens": 64}, {"batch_size": 2, "length": 8}], ids=str
)
def test_steps_need_texts_for_every_worker(tokenizer, tmp_path, options):
    """Such a worker would look for its first batch forever, or train on padding alone."""
    data.write_tokens(["hot dog", "sun"], tokenizer, tmp_path, num_shards=3, verbose=0)
    message = (
        r"^Each worker must have texts if `steps` is given. Write at least as many .* or give `num_shards=1, .*"
        r"Received: steps=5, 3 workers, no texts for worker 2: '.*' has 2 blocks of texts in 3 files$"
    )
    for i in range(3):
        with pytest.raises(ValueError, match=message):
            data.read_tokens(tmp_path, num_shards=3, shard_index=i, steps=5, **options)
    assert len(listed(data.read_tokens(tmp_path, num_shards=1, shard_index=0, steps=5, **options))) == 5


def test_the_environment_says_what_a_worker_reads(written, monkeypatch):
    expected = packed(written, num_shards=2, shard_index=1)
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert packed(written) == expected
    assert len(packed(written, num_shards=1, shard_index=0)) > len(expected)
    with pytest.raises(ValueError, match=r"`steps` must be given for .* Received: steps=None, 2 workers"):
        data.read_tokens(written, max_tokens=64)


def test_resume_reads_each_epoch_in_its_order(written, tmp_path):
    resume = Resume(tmp_path)
    dataset = resume.dataset(lambda epoch: data.read_tokens(written, 2, length=16, epoch=epoch, seed=5))
    found = []
    for epoch in (1, 2):
        resume._data.begin(epoch)
        found.append([(named(features), labels) for features, labels in listed(dataset)])
    assert found[1] == packed(written, epoch=2, seed=5) != found[0]
    assert len(dataset) == len(found[0]) == len(found[1])


def test_a_training_cut_off_within_an_epoch_ends_with_the_weights_of_one_that_was_not(written, tokenizer, tmp_path):
    class CutOff(Exception):
        pass

    def train(folder, cut=None):
        def on_batch_end(batch, logs=None):
            if batch == cut:
                raise CutOff

        keras.utils.set_random_seed(3)
        ids = keras.Input((None,), dtype="int32", name="token_ids")
        hidden = keras.layers.Dropout(0.3)(keras.layers.Embedding(tokenizer.vocabulary_size, 8)(ids))
        model = keras.Model({"token_ids": ids}, keras.layers.Dense(tokenizer.vocabulary_size)(hidden))
        model.compile("adam", PaddedCrossentropy(), run_eagerly=True)  # a graph takes longer than the training
        resume = Resume(folder, save_freq=2)
        dataset = resume.dataset(lambda epoch: data.read_tokens(written, max_tokens=128, epoch=epoch, seed=5))
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end), resume]
        history = model.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return history.history["loss"], model.get_weights()

    (losses, weights), batches = train(tmp_path / "whole"), len(listed(data.read_tokens(written, max_tokens=128)))
    assert batches > 9
    for cut in (5, batches - 2):
        with pytest.raises(CutOff):
            train(tmp_path / "cut", cut)
    found_losses, found = train(tmp_path / "cut")
    assert found_losses == losses
    for one, two in zip(found, weights, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_language_model_trains_on_the_batches(written, tokenizer):
    model = models.CausalLM(tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, num_heads=2)
    model.compile("adam", PaddedCrossentropy(), run_eagerly=True)
    history = model.fit(data.read_tokens(written, max_tokens=128, steps=2), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_labels_and_pairs(tokenizer, tmp_path):
    labelled = [(one, i % 3) for i, one in enumerate(TEXTS)]
    index = data.write_tokens(labelled, tokenizer, tmp_path / "l", num_shards=2, max_length=5, verbose=0)
    assert (index["documents"], index["left_out"], index["longest"]) == (len(TEXTS), 0, {"token_ids": 5})
    found = listed(data.read_tokens(tmp_path / "l", shuffle=False))
    expected = tokenizer(TEXTS, max_length=5)["token_ids"]
    assert [x["token_ids"] for x, _ in found] == [row[row != 0].tolist() for row in expected]
    assert [label for _, label in found] == [label for _, label in labelled]
    batches = listed(data.read_tokens(tmp_path / "l", 7))
    assert sorted(sum([labels for _, labels in batches], [])) == sorted(label for _, label in labelled)
    pairs = tf.data.Dataset.from_tensor_slices((TEXTS, TEXTS[::-1]))
    data.write_tokens(pairs, (tokenizer, tokenizer), tmp_path / "p", num_shards=2, special_tokens=False, verbose=0)
    features = listed(data.read_tokens(tmp_path / "p", shuffle=False, next_tokens=False))
    assert [x["source_ids"] for x in features] == tokenizer.tokenize(TEXTS)
    assert [x["target_ids"] for x in features] == tokenizer.tokenize(TEXTS[::-1])
    for (shifted, labels), whole in zip(listed(data.read_tokens(tmp_path / "p", shuffle=False)), features, strict=True):
        assert shifted == {"source_ids": whole["source_ids"], "target_ids": whole["target_ids"][:-1]}
        assert labels == whole["target_ids"][1:]
    batch = next(iter(data.read_tokens(tmp_path / "p", max_tokens=64)))
    assert set(batch[0]) == {"source_ids", "target_ids"} and batch[0]["target_ids"].shape == batch[1].shape


def test_every_kind_of_tokenizer_and_dataset(tmp_path):
    for i, cls in enumerate((text.BertTokenizer, text.CharacterTokenizer, text.SentencePieceTokenizer)):
        ours = cls.train(WORDS * 2, 300)
        dataset = [iter(KEPT), tf.data.Dataset.from_tensor_slices(KEPT), [one.encode() for one in KEPT]][i]
        data.write_tokens(dataset, ours, tmp_path / str(i), num_shards=1, num_threads=1, verbose=0)
        found = listed(data.read_tokens(tmp_path / str(i), shuffle=False, next_tokens=False, tokenizer=ours))
        expected = np.asarray(ours(KEPT)["token_ids"])
        assert [x["token_ids"] for x in found] == [row[row != ours.pad_id].tolist() for row in expected]


def test_a_text_longer_than_a_block_and_a_large_vocabulary(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(70_000))]
    ours = text.BertTokenizer(vocabulary, max_length=8)
    texts = ["w69999 " * 5000, "w5", "w69999"]
    index = data.write_tokens(texts, ours, tmp_path, num_shards=1, verbose=0)
    assert index["features"] == {"token_ids": "int32"} and index["longest"] == {"token_ids": 5002}
    found = listed(data.read_tokens(tmp_path, shuffle=False, next_tokens=False))
    assert [len(x["token_ids"]) for x in found] == [5002, 3, 3] and found[2]["token_ids"] == [2, 70_003, 3]
    assert documents(packed(tmp_path, shuffle=False))[0] == [x["token_ids"] for x in found]


class Stopped(Exception):
    """Raised in the middle of a write."""


@pytest.mark.parametrize("stop", [1, 20, 60, len(TEXTS)])
def test_a_write_that_was_cut_off_goes_on_and_ends_with_the_same_bytes(written, tokenizer, tmp_path, stop):
    def cut_off():
        yield from TEXTS[:stop]
        raise Stopped

    with pytest.raises(Stopped):
        data.write_tokens(cut_off(), tokenizer, tmp_path, num_shards=6, num_threads=1, verbose=0)
    rows = json.loads((tmp_path / "unfinished.json").read_text())["rows"]
    assert (rows > 0) == (stop >= 60)  # the first blocks come together
    message = r"`directory` must hold a finished write. Call `write_tokens` .* has unfinished.json"
    with pytest.raises(ValueError, match=message):
        data.read_tokens(tmp_path)
    for name in ("shard-00001-of-00006.tfrecord", "blocks.bin", "record-1.part"):
        with open(tmp_path / name, "ab") as file:
            file.write(b"what a killed process wrote last")
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_writer, "encode_block", lambda *a: calls.append(a) or encode_block(*a))
        data.write_tokens(TEXTS, tokenizer, tmp_path, num_shards=6, num_threads=1, verbose=0)
    assert contents(tmp_path) == contents(written)
    tokenized = [one.decode() for block, *_ in calls for (one,) in block]
    assert tokenized == TEXTS[rows:]  # what was written is not tokenized again


def test_a_finished_folder_is_checked_and_kept(written, tokenizer):
    before = contents(written)
    data.write_tokens(TEXTS, tokenizer, written, num_shards=6, verbose=0)
    assert contents(written) == before
    for other in (TEXTS[:-1], [*TEXTS, "more"], [TEXTS[0] + "x", *TEXTS[1:]]):
        with pytest.raises(ValueError, match=r"`dataset` must give the texts of the earlier call.* than the 97 that"):
            data.write_tokens(other, tokenizer, written, num_shards=6, verbose=0)
    for options in ({"num_shards": 3}, {"max_length": 9}, {"special_tokens": False}):
        name = next(iter(options)).removesuffix("s")
        with pytest.raises(ValueError, match=rf"same arguments has written. Received: .*written with another {name}: "):
            data.write_tokens(TEXTS, tokenizer, written, **{"num_shards": 6, "verbose": 0} | options)
    assert contents(written) == before


@pytest.mark.process
def test_a_killed_process_goes_on(written, tokenizer, tmp_path):
    """SIGKILL while it writes, again and again, until it is through."""
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    code = (
        "import json, sys, time; from keras_tx import data, text; from keras_tx.data import token_rows, token_writer\n"
        "token_rows.BLOCK_BYTES, token_writer.SECONDS = 150, 0.0\n"
        "def slow(texts):\n"
        "    for one in texts: time.sleep(0.02); yield one\n"
        "texts = json.load(open('texts.json')); tokenizer = text.load_tokenizer('tokenizer')\n"
        "print('begins', flush=True)\n"
        "data.write_tokens(slow(texts), tokenizer, 'out', num_shards=6, verbose=0)"
    )
    run = forked.start("-c", code, cwd=tmp_path, stdout=subprocess.PIPE)
    run.stdout.readline()
    deadline = time.time() + 60
    state = tmp_path / "out" / "unfinished.json"
    while time.time() < deadline and not (state.exists() and json.loads(state.read_text())["rows"] > 20):
        time.sleep(0.01)
    with pytest.raises(BlockingIOError, match=r"`directory` must not be written by anyone else. Received: directory="):
        data.write_tokens(TEXTS, tokenizer, tmp_path / "out", num_shards=6, verbose=0)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.stdout.close()
    data.write_tokens(TEXTS, tokenizer, tmp_path / "out", num_shards=6, verbose=0)
    assert contents(tmp_path / "out") == contents(written)


def test_two_writers_at_once(tokenizer, tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        yield TEXTS[0]
        begun.set()
        go_on.wait(60)
        yield from TEXTS[1:]

    first = threading.Thread(target=data.write_tokens, args=(slow(), tokenizer, tmp_path), kwargs={"verbose": 0})
    first.start()
    begun.wait(60)
    try:
        with pytest.raises(BlockingIOError, match="must not be written by anyone else"):
            data.write_tokens(TEXTS, tokenizer, tmp_path, verbose=0)
    finally:
        go_on.set()
        first.join()
    assert len(listed(data.read_tokens(tmp_path))) == len(KEPT)


def damaged(written, tmp_path, name, change):
    folder = tmp_path / "damaged"
    shutil.copytree(written, folder)
    path = folder / name
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    return folder


SHARD = "shard-00002-of-00006.tfrecord"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            SHARD,
            lambda content: content[:-1],
            rf"must be whole; .*Received: .*{SHARD} with [\d,]+ bytes instead of [\d,]+",
        ),
        (
            SHARD,
            lambda content: None,
            rf"the 6 shards of its index .* with 5 shards; missing or too many: \['{SHARD}'\]",
        ),
        ("blocks.bin", lambda content: content[:-8], r"must be whole; .*Received: .*blocks.bin with"),
        ("blocks.bin", lambda content: None, r"must be whole; .*Received: .*blocks.bin with 0 bytes"),
        ("blocks.bin", lambda content: b"x" + content[1:], r"as it was written; .*Received: blocks.bin in .* checksum"),
        (
            "index.json",
            lambda content: None,
            r"must contain index.json, as `write_tokens` writes it. .* with \['blocks.bin",
        ),
        (
            "index.json",
            lambda content: content[:50],
            r"must be one that `write_tokens` wrote. Received: .*index.json' \(",
        ),
        (
            "index.json",
            lambda content: b"{}",
            r"Received: .*index.json' \(`format` is not 'keras_tx.data.write_tokens 1'",
        ),
        *[
            (
                "index.json",
                lambda content, name=name: content.replace(f'"{name}"'.encode(), b'"nothing"'),
                rf"that `write_tokens` wrote. Received: .*index.json' \(`{name}` is missing or of another type",
            )
            for name in ("sizes", "blocks_sha256", "padding_ids", "num_shards")
        ],
        (
            "index.json",
            lambda content: content.replace(b'"sizes": [', b'"sizes": 1, "more": ['),
            r"must be one that `write_tokens` wrote. Received: .*index.json' \(`sizes` is missing or of another type",
        ),
        (
            "index.json",
            lambda content: content.replace(
                b'"padding_ids": {\n  "token_ids": 0', b'"padding_ids": {\n  "token_ids": 7'
            ),
            r"must be one that `write_tokens` wrote. Received: .*index.json' \(its checksum differs",
        ),
    ],
)
def test_damaged_folders_are_refused(written, tmp_path, name, change, message):
    with pytest.raises(ValueError, match=message):
        data.read_tokens(damaged(written, tmp_path, name, change))


def test_a_folder_with_shards_of_another_write(written, tmp_path):
    folder = damaged(written, tmp_path, SHARD, lambda content: content)
    (folder / "shard-00000-of-00002.tfrecord").write_bytes(b"")
    with pytest.raises(ValueError, match=r"with 7 shards; missing or too many: \['shard-00000-of-00002"):
        data.read_tokens(folder)


def test_changed_blocks_are_found_when_they_are_read(written, tmp_path):
    folder = damaged(written, tmp_path, SHARD, lambda content: content[:40] + b"?" + content[41:])
    with pytest.raises(tf.errors.DataLossError, match="corrupted record"):
        listed(data.read_tokens(folder))
    records = list(tf.data.TFRecordDataset(str(written / SHARD)).as_numpy_iterator())
    with tf.io.TFRecordWriter(str(folder / SHARD)) as file:  # whole, but not what was written
        for record in records:
            file.write(record[:-1] + b"?")
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"as it was written; .*a damaged block in.*{SHARD}"):
        listed(data.read_tokens(folder))


def test_an_unfinished_write_whose_files_are_gone(tokenizer, tmp_path):
    def cut_off():
        yield from TEXTS[:60]
        raise Stopped

    with pytest.raises(Stopped):
        data.write_tokens(cut_off(), tokenizer, tmp_path, num_shards=1, verbose=0)
    (tmp_path / "shard-00000-of-00001.tfrecord").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"unfinished write must be whole; delete the folder. Received: .*shorter than"
    ):
        data.write_tokens(TEXTS, tokenizer, tmp_path, num_shards=1, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"directory": "nowhere"}, FileNotFoundError, r"must be a folder that `write_tokens` wrote. .*'nowhere'"),
        (
            {"batch_size": 0, "length": 4},
            ValueError,
            r"`batch_size` must be a positive integer. Received: batch_size=0",
        ),
        ({"batch_size": 2, "length": 0}, ValueError, r"`length` must be a positive integer or None"),
        ({"length": 4}, ValueError, r"`batch_size` must be given with `length`, .* batch_size=None, max_tokens=None"),
        ({"batch_size": 2, "length": 4, "max_tokens": 8}, ValueError, r"Received: batch_size=2, max_tokens=8"),
        ({"batch_size": 2, "max_tokens": 8}, ValueError, r"Exactly one of `batch_size` and `max_tokens`"),
        (
            {"epoch": -1},
            ValueError,
            r"`epoch` must be an integer from 0 to 9223372036854775807, or a scalar tensor. Received: epoch=-1",
        ),
        *[
            (
                {"epoch": tf.constant(value)},
                ValueError,
                r"`epoch` must be an integer from 0 to .*: epoch=<tf.Tensor",
            )
            for value in (1.7, -1, [1, 2])
        ],
        ({"epoch": 2**63}, ValueError, r"`epoch` must be an integer from 0 to 9223372036854775807, .* epoch=92.*808"),
        (
            {"start": True},
            ValueError,
            r"`start` must be an integer from 0 to 9223372036854775807, or a scalar tensor. .* start=True",
        ),
        ({"seed": -1}, ValueError, r"`seed` must be an integer from 0 to 9223372036854775807. Received: seed=-1"),
        ({"seed": 2**63}, ValueError, r"`seed` must be an integer from 0 to .* Received: seed=9223372036854775808"),
        ({"steps": 0}, ValueError, r"`steps` must be a positive integer or None"),
        ({"shuffle": 1}, TypeError, r"`shuffle` must be"),
        (
            {"num_shards": 4, "shard_index": 0},
            ValueError,
            r"must be a multiple of the number of workers.*4 workers, 6 files in",
        ),
        ({"tokenizer": "a"}, TypeError, r"`tokenizer` must be a keras_tx.text.Tokenizer, or two of them"),
    ],
)
def test_wrong_arguments_of_read_tokens(written, arguments, error, message):
    with pytest.raises(error, match=message):
        data.read_tokens(**{"directory": written} | arguments)


def test_another_tokenizer(written, tokenizer, tmp_path):
    assert data.read_tokens(written, tokenizer=tokenizer) is not None
    other = text.BytePairTokenizer.from_config(tokenizer.get_config() | {"max_length": 9})
    with pytest.raises(
        ValueError, match=r"`tokenizer` must be the one .* another BytePairTokenizer than for the 'token_ids'"
    ):
        data.read_tokens(written, tokenizer=other)
    with pytest.raises(ValueError, match=r"`tokenizer` must be one tokenizer unless the texts are pairs. Received: 2"):
        data.read_tokens(written, tokenizer=(tokenizer, tokenizer))
    data.write_tokens([("a", 1)], tokenizer, tmp_path, num_shards=1, verbose=0)
    with pytest.raises(
        ValueError, match=r"`length` must be None for texts with labels and for pairs.* tokens of labels"
    ):
        data.read_tokens(tmp_path, 2, length=4)
    with pytest.raises(ValueError, match=r"`next_tokens` must not be True for texts with labels"):
        data.read_tokens(tmp_path, next_tokens=True)


class Odd(text.CharacterTokenizer):
    """Its rows do not contain what `tokenize` returns."""

    def tokenize(self, texts):
        return [0, 0] if isinstance(texts, str) else super().tokenize(texts)


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ("one text", {}, TypeError, r"`dataset` must be a tf.data.Dataset or an iterable of texts.*dataset='one text'"),
        (3, {}, TypeError, r"Received: dataset=3"),
        ([], {}, ValueError, r"at least one text with a token. Received: an empty dataset"),
        (["", ""], {}, ValueError, r"at least one text with a token. Received: none of 2"),
        ([None, "a"], {}, TypeError, r"elements of one kind: texts, .* Received: None"),
        ([3], {}, TypeError, r"elements of one kind: texts, \(text, label\) or \(source, target\). Received: 3"),
        (["a", ("a", 1)], {}, TypeError, r"elements of one kind.* Received: \('a', 1\)"),
        ([("a", 1), ("a", 0.5)], {}, TypeError, r"A label must be an integer. Received: 0.5"),
        (["\ud800"], {}, TypeError, r"texts that UTF-8 can encode. Received: '\\ud800'"),
        (["a"], {"num_shards": 0}, ValueError, r"`num_shards` must be a positive integer"),
        (["a"], {"num_threads": 0}, ValueError, r"`num_threads` must be a positive integer or None"),
        (
            ["a"],
            {"max_length": 2},
            ValueError,
            r"`max_length` must be larger than .* special tokens, 2. .*max_length=2",
        ),
        (["a"], {"verbose": 3}, ValueError, r"`verbose` must be 0, 1, False or True. Received: verbose=3"),
        (["a"], {"tokenizer": None}, TypeError, r"`tokenizer` must be a keras_tx.text.Tokenizer"),
        (
            ["a"],
            {"tokenizer": Odd.train(["ab"])},
            ValueError,
            r"`special_tokens` must be False .* Odd with .* for \[0, 0\]",
        ),
    ],
)
def test_wrong_arguments_of_write_tokens(tokenizer, tmp_path, dataset, options, error, message):
    with pytest.raises(error, match=message):
        data.write_tokens(dataset, **{"tokenizer": tokenizer, "directory": tmp_path / "new", "verbose": 0} | options)


def test_other_folders_and_batched_datasets(tokenizer, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`directory` must be empty or not exist. Received: .* with \['notes.txt'\]"):
        data.write_tokens(TEXTS, tokenizer, tmp_path, verbose=0)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"`dataset` must have scalars as elements, unbatched. Received: TensorSpec"):
        data.write_tokens(tf.data.Dataset.from_tensors(["a", "b"]), tokenizer, tmp_path / "x", verbose=0)


def test_a_progress_bar(tokenizer, tmp_path, capsys):
    data.write_tokens(TEXTS, tokenizer, tmp_path, num_shards=1)
    assert "97/Unknown" in capsys.readouterr().out
    text.CharacterTokenizer.train(TEXTS, verbose=1)
    assert "97/Unknown" in capsys.readouterr().out


def test_special_tokens_stand_where_the_tokenizer_puts_them(tmp_path):
    """Also if it deletes "a", or if unknown tokens are its first special token."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "[SOS]": 2, "[EOS]": 3, "1": 4, "22": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("[^0-9 ]"), "")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[SOS] $A [EOS]", pair="[SOS] $A [EOS] $B [EOS]", special_tokens=[("[SOS]", 2), ("[EOS]", 3)]
    )
    digits = text.WordLevelTokenizer(made.to_str(), pad_token="[PAD]")
    for name, tokenizer in {"digits": digits, "xyz": text.CharacterTokenizer.train(["xyz"], cls_token="[UNK]")}.items():
        data.write_tokens(["a 1 22 z"], tokenizer, tmp_path / name, num_shards=1, max_length=np.int64(9), verbose=0)
        (row,) = data.read_tokens(tmp_path / name, next_tokens=False)
        assert row["token_ids"].numpy().tolist() == tokenizer("a 1 22 z", max_length=9)["token_ids"].tolist()


def test_a_tokenizer_without_a_padding_token_is_refused(tmp_path):
    tokenizer = text.BytePairTokenizer.train(["hot dogs"] * 3, 300, pad_token=None)
    with pytest.raises(ValueError, match="`tokenizer` must have a padding token, .* Received: special tokens {"):
        data.write_tokens(["hot"], tokenizer, tmp_path / "new", num_shards=1, verbose=0)
    assert not (tmp_path / "new").exists()


def test_an_encoder_truncates_and_surrounds_as_the_tokenizer_does(tokenizer):
    for most in (None, 3, 4, 9):
        values, lengths, kept = Encoder(tokenizer, True, most)([one.encode() for one in TEXTS])
        expected = [tokenizer(one, max_length=most or 10**6)["token_ids"].tolist() for one in TEXTS]
        assert np.split(values, np.cumsum(lengths)[:-1])[5].tolist() == expected[5]
        assert values.tolist() == sum(expected, []) and lengths.tolist() == [len(row) for row in expected]
        assert (kept == lengths - 2).all()
