"""Changed config.json and generation_config.json."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import transformers

from benchmarks.attack.checkpoints import copied, loads_as_transformers
from benchmarks.attack.outcome import Case, Outcome
from keras_tx.pretrained.config import ACTIVATIONS, CHANGING
from tests.pretrained import tiny

REMOVED: Any = object()
VALUES = [
    *("x", "", "4", "0.5", "true", "x" * 100_000, "\u0000", [], [1], [None], ["x"] * 3, {}, {"a": 1}, True, False),
    *(None, REMOVED, -1, 0, 1, 2, 3, 7, 64, 0.5, -0.5, 1.5, 1e-3, 1e308, float("nan"), float("inf"), float("-inf")),
    *(10**6, 10**9, 2**31, 2**63, 10**18, -(10**18), 10**400, functools.reduce(lambda x, _: [x], range(150), 1)),
]
# The keys of generation_config.json, and some of older versions of transformers.
GENERATION = {*vars(transformers.GenerationConfig()), "encoder_repetition_penalty", "forced_decoder_ids", "begin_index"}
# Keys whose value no output depends on, so that a value which transformers refuses may be ignored.
_TRAINING = "it matters when a model is trained or made, not for its outputs"
_TOLD = "it says how outputs are returned, not what they are"
_NOT_READ = "this architecture does not read it"
IGNORED = {
    r".*(dropout|drop|pdrop|drop_rate|layerdrop).*": _TRAINING,
    r"initializer_(range|factor|cutoff_factor)|init_std|.*_init|gradient_checkpointing": _TRAINING,
    r"problem_type|classifier_.*": _TRAINING,
    r"use_cache|output_.*|return_dict.*|return_.*|torchscript|chunk_size_feed_forward|use_return_dict": _TOLD,
    r"transformers_version|_from_model_config|_name_or_path|_commit_hash|_attn.*|tokenizer_class|prefix": "a note",
    r"(torch_)?dtype": "weights are computed in the dtype policy of the call",
    r"pretraining_tp|encoder_stride|pooler_.*|summary_.*|task_specific_params": _NOT_READ,
    r"label2id|finetuning_task|architectures": "names for people",
    r"reorder_and_upcast_attn": "it chooses between two orders of rounding",
    r"sinusoidal_pos_embds": "the table of positions is in the file",
    r"(bos|eos|sep|cls)_token_id": "for texts and for `generate`, not for outputs",
    r"max_window_layers": "it is read with `use_sliding_window` alone",
    r"pad_token_id": "outputs at real tokens do not depend on it",
    r"cache_.*|max_cache_len|compile_config|disable_compile|low_memory|prefill_chunk_size": "speed, not text",
    r"continuous_batching_config|.*assistant.*|.*_lookup_.*|.*_lookbehind|max_matching_.*|use_mtp|speculation_type": (
        "speed, not text"
    ),
}


def config(case: Case) -> Outcome:
    """A changed config.json."""
    name = tiny.NAMES[case.number % len(tiny.NAMES)]
    folder = copied(case, name)
    key = change_json(case, folder / "config.json", [*_all_config_keys(), *CHANGING])
    return loads_as_transformers(case, name, folder, ignored=_reason(key))


def generation_config(case: Case) -> Outcome:
    """A changed generation_config.json."""
    name = tiny.GENERATIVE[case.number % len(tiny.GENERATIVE)]
    folder = copied(case, name)
    path = folder / "generation_config.json"
    if not path.is_file():
        path.write_text("{}")
    key = change_json(case, path, sorted(GENERATION), added=0.6)
    return loads_as_transformers(case, name, folder, ignored=_reason(key), generates=True)


def change_json(case: Case, path: Path, more: list[str], added: float = 0.15) -> str:
    """Changes one value of a JSON file, or its text; returns the key, or "" for the text."""
    if case.random.random() < 0.08:
        path.write_bytes(_changed_text(case, path.read_bytes()))
        case.changed += f", {path.name} as text: {path.read_bytes()[:60]!r}"
        return ""
    values = json.loads(path.read_text())
    if case.random.random() < added:
        key = case.choice(more)
        place = values
    else:
        place, key = case.choice(list(_places(values)) or [(values, case.choice(more))])
    old = place.get(key) if isinstance(place, dict) else place[key]
    new = new_value(case, key, old)
    if new is REMOVED:
        if isinstance(place, list) or key in place:
            del place[key]
    else:
        place[key] = new
    path.write_text(json.dumps(values))
    case.changed += f", {path.name}: {key}={_short(new)} instead of {_short(old)}"
    return str(key)


def _places(value: Any):
    """All (dict or list, key) in nested JSON."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        yield value, key
        yield from _places(part)


def new_value(case: Case, key: Any, old: Any) -> Any:
    """Another value: of any type, or near the old one, or one that other checkpoints have."""
    near: list[Any] = []
    if isinstance(old, bool):
        near = [not old, int(old), str(old)]
    elif isinstance(old, (int, float)):
        near = [old + 1, old - 1, 2 * old, old // 2, -old, str(old), float(old), [old]]
    elif isinstance(old, str):
        near = [old.upper(), old + "x", old[:-1], [old], *ACTIVATIONS, "exec", "relu6", "longest", "linear"]
    elif isinstance(old, list):
        near = [[*old, *old], old[:-1], [str(one) for one in old], old + [-1], old + [10**9]]
    values = near if near and case.random.random() < 0.35 else VALUES
    return case.choice([value for value in values if value is REMOVED or _json(value) != _json(old)])


def _json(value: Any) -> str:
    return "" if value is REMOVED else json.dumps(value)


def _changed_text(case: Case, data: bytes) -> bytes:
    """A text that is no JSON any more, or still is."""
    middle = int(case.random.integers(len(data)))
    return case.choice(
        [
            b"",
            b"[]",
            b"null",
            b"{}",
            data[:middle],
            data + b"}",
            b"\xef\xbb\xbf" + data,
            b"\xff" + data,
            b"[" * 100_000,
            b'{"a":' * 100_000,
            data.rstrip().rstrip(b"}") + b', "model_type": "bert", "model_type": "gpt2"}',
            data[:middle] + bytes([int(case.random.integers(256))]) + data[middle + 1 :],
            b" " * 50_000_000 + data,
            data.decode().encode("utf-16"),
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        ]
    )


@functools.cache
def _all_config_keys() -> list[str]:
    """The keys of all checkpoints: each family gets those of the others."""
    read = [json.loads((tiny.checkpoint(name) / "config.json").read_text()) for name in tiny.NAMES]
    return sorted({key for values in read for key in values})


def _reason(key: str) -> str | None:
    return next((reason for pattern, reason in IGNORED.items() if re.fullmatch(pattern, key)), None)


def _short(value: Any) -> str:
    text = "removed" if value is REMOVED else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
