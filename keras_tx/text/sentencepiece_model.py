"""Parses and checks SentencePiece models, and builds them from the content of a tokenizer.json.

The C++ library does not check the table of a model's normalizer and reads outside its memory if the table is
malformed. So the table is checked here. Kudo and Richardson 2018, arXiv:1808.06226; double arrays: Aoe 1989, IEEE TSE
15(9).
"""

import base64
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import unsupported_added_tokens

pb2 = Lazy("sentencepiece.sentencepiece_model_pb2", extra="text")

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
NEVER = "\ufffe\uffff"  # the name of a piece that no text has: it is neither a character nor a result of merges
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def read_model(model: bytes, place: Any) -> Any:
    """Parses and checks the bytes of a SentencePiece model.

    Args:
        model: the bytes.
        place: the name of the file or argument, for errors.

    Returns:
        The ModelProto.

    Raises:
        ValueError: the bytes are not a SentencePiece model, or it has no pieces, a score that is not finite, an empty
            or repeated piece, or a malformed normalizer.
    """
    try:
        proto = pb2.ModelProto.FromString(model)
    except ImportError:
        raise
    except Exception as error:  # protobuf raises several types
        raise ValueError(f"`{place}` must be a SentencePiece model. Received: {place}: {error}") from error
    pieces = [piece.piece for piece in proto.pieces]
    if not pieces:
        raise ValueError(f"`{place}` must be a SentencePiece model with pieces. Received: none in {len(model)} bytes")
    if len(set(pieces)) != len(pieces) or "" in pieces:
        repeated = (piece for piece, count in Counter(pieces).items() if count > 1 or not piece)
        wrong = next(repeated)
        raise ValueError(f"`{place}` must hold every piece once, and none empty. Received: {wrong!r:.200}")
    if not np.isfinite([piece.score for piece in proto.pieces]).all():
        raise ValueError(
            f"`{place}` must hold finite scores. Received: {[piece.score for piece in proto.pieces][:5]}..."
        )
    for spec in (proto.normalizer_spec, proto.denormalizer_spec):
        check_charsmap(spec.precompiled_charsmap, place)
    return proto


def unsupported_parts(parts: dict[str, Any], added: list[dict[str, Any]], normalizer: Any) -> str | None:
    """The reason why a definition cannot run in a graph, or None.

    Args:
        parts: the content of a tokenizer.json.
        added: those of its added tokens that are found in texts.
        normalizer: its normalizer, as the `tokenizers` library built it.
    """
    model = parts["model"]
    if space_rule(parts) is None:
        return f"its normalizer and pre-tokenizer are {_short(parts['normalizer'])}, {parts['pre_tokenizer']}"
    if model["type"] == "Unigram" and (model.get("unk_id") is None or model.get("byte_fallback")):
        return "its Unigram model has no unknown token, or bytes for what it lacks"
    if model["type"] == "Unigram" and normalizer.normalize_str(f"a{SPACE}b") != "a b":
        return f"its normalizer leaves {SPACE!r} in a text"
    if model["type"] == "BPE" and parts["normalizer"] and any(token["normalized"] for token in added):
        return "its added tokens are normalized"
    if model["type"] == "Unigram" and any(
        token["normalized"] and normalizer.normalize_str(token["content"]) != token["content"] for token in added
    ):
        return "its normalizer changes its added tokens"
    if model["type"] == "BPE" and (reason := _bpe_reason(model, _special(parts), added)):
        return reason
    return unsupported_added_tokens(added)


def space_rule(parts: dict[str, Any]) -> tuple[str, bytes] | None:
    """How a definition marks spaces, and the table of its normalizer; None for a form that the op does not support."""
    normalizers = _as_list(parts["normalizer"], "normalizers")
    before = _as_list(parts["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in normalizers] + [step["type"] for step in before]
    scheme = before[-1].get("prepend_scheme", "always") if before and before[-1]["type"] == "Metaspace" else "always"
    if parts["model"]["type"] == "BPE":
        if not kinds:
            return "as they are", b""
        if kinds == ["Metaspace"] and before[0].get("split") is False:
            return f"metaspace {scheme}", b""
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        known = kinds in (["Replace"], ["Prepend", "Replace"]) and normalizers[-1:] == [replace]
        if known and normalizers[0].get("prepend", SPACE) == SPACE:
            return ("prepend always" if len(kinds) == 2 else "never"), b""
        return None
    tails = [["WhitespaceSplit", "Metaspace"], ["Replace", "WhitespaceSplit", "Metaspace"]]
    tails += [["Strip", "Replace", "Metaspace"]]
    collapses = all(step.get("pattern") == {"Regex": " {2,}"} for step in normalizers if step["type"] == "Replace")
    good = kinds[:1] == ["Precompiled"] and kinds[1:] in tails and before[-1].get("split", True)
    if not (good and collapses and scheme == "always"):
        return None
    return scheme, base64.b64decode(normalizers[0]["precompiled_charsmap"] or "")


def _as_list(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    return [] if step is None else step.get(key, [step])


def _short(normalizer: Any) -> str:
    text = str(normalizer)
    return text if len(text) < 200 else text[:200] + "..."


# A normalizer's table that changes nothing: a tree without branches. With no table at all SentencePiece logs a line.
_NO_CHANGES = (1024).to_bytes(4, "little") + bytes(1024) + b"\0"


def build_unigram_model(parts: dict[str, Any], charsmap: bytes) -> bytes:
    """Builds the bytes of a SentencePiece model with the pieces and scores of a Unigram definition."""
    proto = pb2.ModelProto()
    unknown = parts["model"]["unk_id"]
    for i, (piece, score) in enumerate(parts["model"]["vocab"]):
        proto.pieces.add(piece=piece, score=score, type=UNKNOWN if i == unknown else NORMAL)
    proto.trainer_spec.model_type = 1
    proto.normalizer_spec.precompiled_charsmap = charsmap or _NO_CHANGES
    return bytes(proto.SerializeToString())


def build_bpe_model(parts: dict[str, Any]) -> bytes:
    """Builds the bytes of a SentencePiece model with the pieces of a BPE definition; smaller ids score higher."""
    proto, vocabulary, special = pb2.ModelProto(), parts["model"]["vocab"], _special(parts)
    for piece, i in sorted(vocabulary.items(), key=lambda item: item[1]):
        kind = BYTE if piece in BYTE_PIECES else CONTROL if piece in special else NORMAL
        proto.pieces.add(piece=piece, score=-i, type=kind)
    proto.pieces.add(piece=NEVER, score=-len(vocabulary), type=UNKNOWN)  # the op needs one; every byte is a piece
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    spec = proto.normalizer_spec
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = spec.escape_whitespaces = False
    spec.precompiled_charsmap = _NO_CHANGES
    return bytes(proto.SerializeToString())


def merges_of(vocabulary: dict[str, int], never: Collection[str] = ()) -> list[tuple[str, str]]:
    """All merges of two tokens of a vocabulary that give a third, not one of `never`, in the order of its id."""
    longest, second = sorted(map(len, vocabulary), reverse=True)[:2] if len(vocabulary) > 1 else (0, 0)

    def cuts(piece: str) -> range:
        most = second if len(piece) == longest else longest  # characters of another piece
        return range(max(1, len(piece) - most), min(len(piece) - 1, most) + 1)

    found = [
        (i, cut, piece[:cut], piece[cut:])
        for piece, i in vocabulary.items()
        if piece not in never
        for cut in cuts(piece)
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _special(parts: dict[str, Any]) -> set[str]:
    return {token["content"] for token in parts["added_tokens"] if token["special"]}


def _bpe_reason(model: dict[str, Any], special: set[str], added: list[dict[str, Any]]) -> str | None:
    """The reason why the op does not support a BPE model, or None.

    The op merges two tokens wherever the vocabulary has the result, the result with the smallest id first. It never
    merges to a byte or a special token.
    """
    vocabulary = model["vocab"]
    if not model.get("byte_fallback") or not set(BYTE_PIECES) <= set(vocabulary) or model.get("dropout"):
        return "its BPE model has a dropout, or no bytes for what it lacks"
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        return "its BPE model does not number its tokens without gaps"
    found_first = {token["content"] for token in added}  # never merged, as texts are split at them
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    merges = [merge for merge in merges if "".join(merge) not in found_first & special]
    made = [vocabulary[left + right] for left, right in merges]
    if made != sorted(made) or set(merges) != set(merges_of(vocabulary, special.union(BYTE_PIECES))):
        return "its merges are not all that its vocabulary allows, in the order of their ids"
    return None


def check_normalizer(normalizer: dict[str, Any] | None, place: Any) -> None:
    """Checks the tables of a definition's normalizer by `check_charsmap`."""
    for step in _as_list(normalizer, "normalizers"):
        if step["type"] == "Precompiled":
            check_charsmap(base64.b64decode(step["precompiled_charsmap"] or ""), place)


def check_charsmap(table: bytes, place: Any) -> None:
    """Checks that a normalizer's table never points outside itself.

    The table is the size of a double array, the array, and texts that each end with a zero byte. Every step from every
    node of the array, and every text that a node points to, must lie within the table.

    The bits of a node: 0-7 the label, 8 whether a text ends here, 9 whether the offset is shifted, 10-30 the offset;
    or, if bit 31 is set, the position of a text.

    Raises:
        ValueError: the table is malformed; the error names `place`.
    """
    if not table:
        return
    size = int.from_bytes(table[:4], "little")
    texts = table[4 + size :]
    good = len(table) > 4 + size and size >= 1024 and size % 1024 == 0 and texts.endswith(b"\0")
    if good:
        units = np.frombuffer(table[4 : 4 + size], "<u4").astype("int64")
        nodes = np.flatnonzero(units < 2**31)
        unit = units[nodes]
        child = nodes ^ ((unit >> 10) << ((unit & 512) >> 6))
        good = units[0] < 2**31 and bool((child | 255).max() < len(units))
        if good:
            ends = units[child[(unit & 256) != 0]] & (2**31 - 1)
            good = bool((ends < len(texts)).all())
    if not good:
        raise ValueError(f"`{place}` must hold a well-formed normalizer. Received: a table of {len(table)} bytes")
