"""Sends unusual texts (control characters, broken UTF-8, a mebibyte) to exported models and checks the answers."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from benchmarks.loaded import MEBIBYTE, Request, Servable, answer, inputs_for


def _drawn(random: np.random.Generator, alphabet: Sequence[str], most: int = 60) -> bytes:
    picked = random.integers(len(alphabet), size=random.integers(1, most))  # an array of str would lose zeros
    return "".join(alphabet[index] for index in picked).encode()


def _code_points(random: np.random.Generator) -> bytes:
    points = random.integers(0, 0x110000, random.integers(1, 60))
    return "".join(chr(point) for point in points).encode(
        "utf-8", "surrogatepass"
    )  # lone surrogates are not valid UTF-8


def _one_mebibyte(random: np.random.Generator) -> bytes:
    units = [
        "a",
        "a ",
        "wonderful ",
        " ",
        "\n",
        "é",
        "e\u0301",
        "電",
        "🎬",
        "שלום ",
        "[SEP]",
        "!",
        "\x00",
        "\u202e",
        "ß",
    ]
    unit = units[random.integers(len(units))].encode()
    return random.bytes(MEBIBYTE) if random.random() < 0.2 else (unit * (MEBIBYTE // len(unit) + 1))[:MEBIBYTE]


CONTROLS = [chr(point) for point in (*range(32), *range(127, 160), 0x200B, 0x200E, 0x2028, 0xFEFF, 0xFFF9, 0xFFFD)]
RIGHT_TO_LEFT = [*"אבגדהוזחטיםןץ ابتثجحخدذرزسشصضطظعغ ", "\u202e", "\u202b", "\u2067", "\u200f", "\u0651", "ﷺ", "abc "]
EMOJI = [
    "🎬",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "🇨",
    "👍🏽",
    "❤️",
    "\u200d",
    "\ufe0f",
    "🏴\U000e0067\U000e0062\U000e007f",
    "1️⃣",
    "a",
    " ",
]
SPECIAL = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", "[unused1]", "##ing", "[", "]", " ", "film"]
KINDS: dict[str, Callable[[np.random.Generator], bytes]] = {
    "random bytes": lambda random: random.bytes(random.integers(1, 200)),
    "random code points": _code_points,
    "control characters": lambda random: _drawn(random, [*CONTROLS, "a", " "]),
    "right to left": lambda random: _drawn(random, RIGHT_TO_LEFT),
    "emoji": lambda random: _drawn(random, EMOJI),
    "special tokens": lambda random: _drawn(random, SPECIAL),
    "marks on marks": lambda random: b"a" + "".join(map(chr, random.integers(0x300, 0x370, 200))).encode(),
    "one long word": lambda random: _drawn(random, "abcxyzß", most=3000),
    "empty": lambda random: random.choice(["", " ", "\t\n", "\u3000", "\u200b", "\u00ad"]).encode(),
    "1 MB": _one_mebibyte,
}


def fuzzed(count: int, seed: int = 7) -> list[bytes]:
    """Generates texts, each kind in its turn."""
    random = np.random.default_rng(seed)
    return [make(random) for make in itertools.islice(itertools.cycle(KINDS.values()), count)]


def problem(servable: Servable, signature: str, rows: int, outputs: Mapping[str, np.ndarray]) -> str | None:
    """Says what is wrong with an answer to `rows` texts; None if nothing is."""
    function = servable.signatures[signature]
    for name, spec in function.structured_outputs.items():
        value = outputs[name]
        if not spec.shape.is_compatible_with(value.shape) or value.shape[0] != rows:
            return f"{name} of shape {value.shape}, not {spec.shape} for {rows} rows"
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return f"{name} with numbers that are not finite"
        if value.dtype == object:
            for one in value.ravel():
                try:
                    one.decode()
                except UnicodeDecodeError:
                    return f"{name} with bytes that are no UTF-8: {one[:50]!r}"
    probabilities = outputs.get("probabilities")
    if probabilities is not None and not np.allclose(probabilities.sum(-1), 1, atol=1e-5):
        return f"probabilities that sum to {probabilities.sum(-1)}"
    if "label" in outputs and not {one.decode() for one in outputs["label"]} <= set(servable.labels):
        return f"label {outputs['label']}, not of {servable.labels}"
    if "scores" in outputs and "tokens" in outputs and outputs["scores"].shape[-1] != outputs["tokens"].shape[1]:
        return f"scores of shape {outputs['scores'].shape} for tokens of shape {outputs['tokens'].shape}"
    return None


def fuzz(loaded: Mapping[str, Servable], texts: Sequence[bytes], seed: int = 7) -> list[str]:
    """Sends 1 to 8 texts at a time to every signature that takes texts; returns the problems."""
    random, start, wrong = np.random.default_rng(seed), 0, []
    bar = keras.utils.Progbar(len(texts))
    while start < len(texts):
        part = texts[start : start + int(random.integers(1, 9))]
        start += len(part)
        for name, servable in loaded.items():
            for signature in servable.signatures:
                if signature == "tokens":
                    continue
                try:
                    request = Request(name, signature, inputs_for(servable, signature, part, random))
                    found = problem(servable, signature, len(part), answer(loaded, request))
                except Exception as error:  # an operation may raise anything
                    found = f"an error: {error}"
                if found:
                    wrong.append(f"{name}, {signature}: {found[:300]}; for {[text[:40] for text in part]}")
        bar.update(start)
    return wrong
