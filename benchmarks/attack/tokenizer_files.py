"""Changed files of tokenizers, and strange texts through the tokenizers of all kinds."""

import atexit
import functools
import shutil
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from benchmarks import fuzzed
from benchmarks.attack.checkpoints import copied
from benchmarks.attack.configs import change_json
from benchmarks.attack.outcome import Case, Outcome
from keras_tx import text
from tests.pretrained import tiny

OF_CHECKPOINTS = ["bart", "bert", "distilbert", "gpt2", "llama", "marian", "roberta", "t5"]
TRAINED = {  # on the probes; no checkpoint has such a tokenizer
    "words": lambda: text.WordLevelTokenizer.train(PROBES, 50),
    "characters": lambda: text.CharacterTokenizer.train(PROBES, split_special_tokens=False),
    "byte pairs": lambda: text.BytePairTokenizer.train(PROBES, 300),
    "pieces": lambda: text.SentencePieceTokenizer.train(PROBES, 350),
}
WITH_TOKENIZER = [*OF_CHECKPOINTS, *TRAINED]
OLD_FILES = {"gpt2": "tokenizer.json", "roberta": "tokenizer.json", "bert": "tokenizer.json", "t5": "tokenizer.json"}
PROBES = ["the quick brown fox", "", " a  b\n", "don't é 東京 </s> [SEP] <mask> x", "attention is all you need!"]


def files(case: Case) -> Outcome:
    """A changed tokenizer.json, vocab.txt, vocab.json, merges.txt, spiece.model, *.spm or tokenizer_config.json."""
    name = WITH_TOKENIZER[case.number % len(WITH_TOKENIZER)]
    folder = _copied(case, name)
    if case.random.random() < 0.5 and name in OLD_FILES:  # so that the older files are read
        (folder / OLD_FILES[name]).unlink()
    known = ("vocab.txt", "merges.txt", "vocab.json", "tokenizer.json", "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file() or case.random.random() < 0.15:
        wanted = [path for path in folder.iterdir() if path.name in known or path.suffix in (".model", ".spm")]
    else:
        wanted = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    path = case.choice(sorted(wanted))
    if path.suffix == ".json" and case.random.random() < 0.85:
        change_json(case, path, ["unk_token", "auto_map", "pad_token", "model_max_length", "unknown_key"], added=0.05)
    else:
        _change_lines(case, path)
    return _as_transformers(case, name, folder)


def _copied(case: Case, name: str) -> Path:
    if name in TRAINED:
        case.changed = name
        return shutil.copytree(source(name), case.folder / "tokenizer")
    folder = copied(case, name)
    (folder / "model.safetensors").unlink()
    return folder


@functools.cache
def source(name: str) -> Path:
    """The folder of a tokenizer."""
    if name not in TRAINED:
        return tiny.checkpoint(name)
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    TRAINED[name]().save(holder.name)
    return Path(holder.name)


def _as_transformers(case: Case, name: str, folder: Path) -> Outcome:
    def load():
        tokenizer = text.load_tokenizer(folder)
        return [_listed(tokenizer(one)["token_ids"]) for one in PROBES], tokenizer.vocabulary_size, _cut(tokenizer)

    found, outcome = case.attempt(load)
    if outcome is not None:
        return outcome
    ids, size, cut = found
    if any(not 0 <= i < size for row in ids for i in row):
        return Outcome("wrong", f"ids outside of the vocabulary of {size}: {ids}")
    before = original_ids(name)
    try:
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        expected = [peer(one, **cut)["input_ids"] for one in PROBES]
    except BaseException as error:  # `tokenizers` panics, too
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        same = "the ids of before" if ids == before else f"other ids, {ids}"
        return Outcome("right" if ids == before else "wrong", f"it loads, with {same}; transformers raises {told}")
    if ids == expected:
        return Outcome("right", "as transformers")
    which = "the ids of before" if ids == before else "other ids than before"
    different = next((one for one in zip(PROBES, ids, expected, strict=True) if one[1] != one[2]), None)
    return Outcome("wrong", f"it loads, with {which}; transformers differs: {different}")


@functools.cache
def original_ids(name: str) -> list[list[int]]:
    tokenizer = text.load_tokenizer(source(name))
    return [_listed(tokenizer(one)["token_ids"]) for one in PROBES]


def _listed(ids: Any) -> list[int]:
    return [int(i) for i in (ids.numpy() if hasattr(ids, "numpy") else ids)]


def _change_lines(case: Case, path: Path) -> None:
    data = path.read_bytes()
    middle = int(case.random.integers(len(data)))
    lines = data.split(b"\n")
    row = int(case.random.integers(len(lines)))
    changes = {
        "empty": lambda: b"",
        "short": lambda: data[:middle],
        "a byte": lambda: data[:middle] + bytes([int(case.random.integers(256))]) + data[middle + 1 :],
        "a bit": lambda: data[:middle] + bytes([data[middle] ^ 1 << int(case.random.integers(8))]) + data[middle + 1 :],
        "a line less": lambda: b"\n".join(lines[:row] + lines[row + 1 :]),
        "a line twice": lambda: b"\n".join(lines[:row] + lines[row : row + 1] + lines[row:]),
        "an empty line": lambda: b"\n".join([*lines[:row], b"", *lines[row:]]),
        "a long line": lambda: b"\n".join([*lines[:row], b"x" * 1_000_000, *lines[row:]]),
        "CRLF": lambda: b"\r\n".join(lines),
        "BOM": lambda: b"\xef\xbb\xbf" + data,
        "no UTF-8": lambda: data[:middle] + b"\xff\xfe" + data[middle:],
        "zeros": lambda: data[:middle] + bytes(100) + data[middle:],
        "many lines": lambda: data + b"".join(b"x%d\n" % i for i in range(100_000)),
        "LFS": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "three words": lambda: b"\n".join([*lines[:row], b"a b c", *lines[row:]]),
        "deep": lambda: b'{"a":' * 100_000,
    }
    what = case.choice(changes)
    path.write_bytes(changes[what]())
    case.changed += f", {path.name}: {what} at byte {middle}, line {row}"


# Texts


def texts(case: Case) -> Outcome:
    """100 strange texts through one tokenizer: its ids in Python and in the graph, and its texts, as transformers."""
    name = WITH_TOKENIZER[case.number % len(WITH_TOKENIZER)]
    case.changed = name
    ours, theirs = pair(name)
    given = strings(100, int(case.random.integers(2**31)))
    if "bert" in name:
        given = [_known(one) for one in given]

    def encode():
        rows = ours.tokenize(given)
        rows = rows.to_list() if hasattr(rows, "to_list") else rows
        return rows, [_listed(ours(one)["token_ids"]) for one in given[:10]], ours.decode(rows)

    found, outcome = case.attempt(encode)
    if outcome is not None:
        return Outcome("wrong", f"texts must not be refused: {outcome.told}")
    rows, whole, decoded = found
    expected = theirs(list(given), add_special_tokens=False)["input_ids"]
    pairs = [
        ("ids", rows, expected),
        ("ids with special tokens", whole, [theirs(one, **_cut(ours))["input_ids"] for one in given[:10]]),
        ("texts", decoded, theirs.batch_decode(expected, skip_special_tokens=True, **_cleaned(theirs))),
    ]
    for what, one, other in pairs:
        for value, a, b in zip(given, one, other, strict=False):
            if a != b:
                return Outcome("wrong", f"{what}: {_first_difference(a, b)} in {value!r}"[:600])
    return Outcome("right", f"{len(given)} texts")


def _cut(tokenizer: Any) -> dict[str, Any]:
    """The options with which transformers truncates as this tokenizer does by itself."""
    return {"truncation": True, "max_length": tokenizer.max_length} if tokenizer.max_length else {}


def _first_difference(found: Any, expected: Any) -> str:
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), "the end")
    end = place if isinstance(place, int) else min(len(found), len(expected))
    return f"at {place} {found[end : end + 9]!r}, transformers {expected[end : end + 9]!r}"


def _cleaned(tokenizer: Any) -> dict[str, bool]:
    return {"clean_up_tokenization_spaces": False} if "Bert" in type(tokenizer).__name__ else {}


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """The tokenizer of a checkpoint, and that of transformers."""
    folder = source(name)
    return text.load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def _known(value: str) -> str:
    """Without the marks, punctuation and controls that Unicode has added since 8.0, whose tables BERT's graph has.

    Python knows the categories of today, and those of Unicode 3.2: what had none then and is no letter may be newer.
    """
    return "".join(c for c in value if unicodedata.ucd_3_2_0.category(c) != "Cn" or unicodedata.category(c)[0] in "LN")


def strings(count: int, seed: int) -> Sequence[str]:
    """Texts of all kinds of the benchmark `serving_load` that are valid Unicode, at most 2,000 characters long."""
    found: list[str] = []
    for data in fuzzed.fuzzed(3 * count, seed):
        value = data[:8000].decode("utf-8", "ignore")[:2000]
        if len(found) < count:
            found.append(value)
    return found
