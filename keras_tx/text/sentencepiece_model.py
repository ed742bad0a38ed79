"""SentencePiece models: bytes -> a checked ModelProto; the content of a tokenizer.json -> the bytes of a model.

The C++ library trusts the table of a model's normalizer and reads beyond its memory where that is malformed, so it is
checked here. Kudo and Richardson 2018, arXiv:1808.06226; double arrays: Aoe 1989, IEEE TSE 15(9).
"""

import base64
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import STAND_IN, unsupported

pb2 = Lazy("sentencepiece.sentencepiece_model_pb2", extra="text")

SPACE = "▁"
NORMAL, UNKNOWN, BYTE = 1, 2, 6
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def read_model(model: bytes, place: Any) -> Any:
    """The bytes of a SentencePiece model -> its ModelProto.

    Raises:
        ValueError: they are no such model, it has no pieces, a score that is not finite, a piece twice, or a malformed
            normalizer; names the place.
    """
    try:
        proto = pb2.ModelProto.FromString(model)
    except ImportError:
        raise
    except Exception as error:  # protobuf has several
        raise ValueError(f"`{place}` must be a SentencePiece model. Received: {place}: {error}") from error
    pieces = [piece.piece for piece in proto.pieces]
    if not pieces:
        raise ValueError(f"`{place}` must be a SentencePiece model with pieces. Received: none in {len(model)} bytes")
    if len(set(pieces)) != len(pieces) or "" in pieces:
        wrong = next(piece for i, piece in enumerate(pieces) if not piece or piece in pieces[:i])
        raise ValueError(f"`{place}` must hold every piece once, and none empty. Received: {wrong!r}")
    if not np.isfinite([piece.score for piece in proto.pieces]).all():
        raise ValueError(
            f"`{place}` must hold finite scores. Received: {[piece.score for piece in proto.pieces][:5]}..."
        )
    for spec in (proto.normalizer_spec, proto.denormalizer_spec):
        check_charsmap(spec.precompiled_charsmap, place)
    return proto


def unsupported_parts(parts: dict[str, Any], normalizer: Any) -> str | None:
    """Why a definition cannot run in a graph, or None; `normalizer` is its normalizer of the `tokenizers` library."""
    model = parts["model"]
    steps = spacing(parts)
    if steps is None:
        return f"its normalizer and pre-tokenizer are {_short(parts['normalizer'])}, {parts['pre_tokenizer']}"
    if model["type"] == "Unigram" and (model.get("unk_id") is None or model.get("byte_fallback")):
        return "its Unigram model has no unknown token, or bytes for what it lacks"
    if model["type"] == "Unigram" and normalizer.normalize_str(f"a{SPACE}b") != "a b":
        return f"its normalizer leaves {SPACE!r} in a text"
    if model["type"] == "BPE" and parts["normalizer"] and any(token["normalized"] for token in parts["added_tokens"]):
        return "its added tokens are normalized"
    if model["type"] == "BPE" and (reason := _bpe_reason(model)):
        return reason
    return unsupported(parts["added_tokens"])


def spacing(parts: dict[str, Any]) -> tuple[str, bytes] | None:
    """How spaces are marked, and the table of the normalizer; None for a form that the op does not have."""
    normal, before = _listed(parts["normalizer"], "normalizers"), _listed(parts["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in normal] + [step["type"] for step in before]
    scheme = before[-1].get("prepend_scheme", "always") if before and before[-1]["type"] == "Metaspace" else "always"
    if parts["model"]["type"] == "BPE":
        if kinds == ["Metaspace"] and before[0].get("split") is False:
            return f"metaspace {scheme}", b""
        replaced = bool(normal) and normal[-1] == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        if replaced and kinds in (["Replace"], ["Prepend", "Replace"]) and normal[0].get("prepend", SPACE) == SPACE:
            return ("prepend always" if len(kinds) == 2 else "never"), b""
        return None
    tails = [["WhitespaceSplit", "Metaspace"], ["Replace", "WhitespaceSplit", "Metaspace"]]
    tails += [["Strip", "Replace", "Metaspace"]]
    collapses = all(step.get("pattern") == {"Regex": " {2,}"} for step in normal if step["type"] == "Replace")
    good = kinds[:1] == ["Precompiled"] and kinds[1:] in tails and before[-1].get("split", True)
    if not (good and collapses and scheme == "always"):
        return None
    return scheme, base64.b64decode(normal[0]["precompiled_charsmap"] or "")


def _listed(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    return [] if step is None else step.get(key, [step])


def _short(normalizer: Any) -> str:
    text = str(normalizer)
    return text if len(text) < 200 else text[:200] + "..."


def unigram_model(parts: dict[str, Any], charsmap: bytes) -> bytes:
    """The bytes of a SentencePiece model with the pieces and scores of a Unigram definition."""
    proto = pb2.ModelProto()
    unknown = parts["model"]["unk_id"]
    for i, (piece, score) in enumerate(parts["model"]["vocab"]):
        proto.pieces.add(piece=piece, score=score, type=UNKNOWN if i == unknown else NORMAL)
    proto.trainer_spec.model_type = 1
    proto.normalizer_spec.precompiled_charsmap = charsmap
    return proto.SerializeToString()


def bpe_model(parts: dict[str, Any]) -> bytes:
    """The bytes of a SentencePiece model with the pieces of a BPE definition, scored in the order of their ids."""
    proto, vocabulary = pb2.ModelProto(), parts["model"]["vocab"]
    for piece, i in sorted(vocabulary.items(), key=lambda item: item[1]):
        proto.pieces.add(piece=piece, score=-i, type=BYTE if piece in BYTE_PIECES else NORMAL)
    proto.pieces.add(piece=STAND_IN, score=-len(vocabulary), type=UNKNOWN)  # never met, for there are the bytes
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, True
    spec = proto.normalizer_spec
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = spec.escape_whitespaces = False
    return proto.SerializeToString()


def _bpe_reason(model: dict[str, Any]) -> str | None:
    """The op merges two tokens wherever the vocabulary has the outcome, the one with the smallest id first."""
    vocabulary = model["vocab"]
    if not model.get("byte_fallback") or not set(BYTE_PIECES) <= set(vocabulary) or model.get("dropout"):
        return "its BPE model has a dropout, or no bytes for what it lacks"
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        return "its BPE model does not number its tokens without gaps"
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = [vocabulary[left + right] for left, right in merges]
    splits = {
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    }
    if made != sorted(made) or set(merges) != splits:
        return "its merges are not all that its vocabulary allows, in the order of their ids"
    return None


def check_normalizer(normalizer: dict[str, Any] | None, place: Any) -> None:
    """Checks the tables of a definition's normalizer as `check_charsmap` does."""
    for step in _listed(normalizer, "normalizers"):
        if step["type"] == "Precompiled":
            check_charsmap(base64.b64decode(step["precompiled_charsmap"] or ""), place)


def check_charsmap(table: bytes, place: Any) -> None:
    """Raises a ValueError, naming the place, unless a normalizer's table keeps within itself.

    Every step from every node of the double array, and every text that it points to, must lie within the table.

    A unit of 32 bits: 0-7 the label, 8 whether a text ends here, 9 whether the offset is shifted, 10-30 the offset;
    or, with bit 31, the place of a text among those that follow the array, each ended by a zero.
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
