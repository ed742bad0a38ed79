"""What a checkpoint computes, here and in transformers."""

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
import transformers

from benchmarks.attack.outcome import Case, Outcome
from keras_tx import pretrained
from tests.pretrained import making, tiny

TOLERANCE = 1e-4  # relative to the largest number: rounding of float32, after any change of the config
NEW_TOKENS = 4
Arrays = Mapping[str, Any]


@dataclass
class Original:
    """A checkpoint that is not changed, and its outputs."""

    name: str
    folder: Path
    inputs: Arrays
    outputs: Arrays

    @property
    def masks(self) -> list[np.ndarray]:
        """The masks of the encoder's and of the decoder's tokens, which have different shapes; none for images."""
        names = ("decoder_attention_mask", "attention_mask")
        return [self.inputs[name].astype(bool) for name in names if name in self.inputs]

    @property
    def prompts(self) -> Arrays | None:
        """What `generate` continues; None for models that do not generate."""
        return tiny.prompts_of(self.name) if self.name in tiny.GENERATIVE else None


@functools.cache
def original(name: str) -> Original:
    """The unchanged checkpoint `name`, of `tests.pretrained.tiny`."""
    folder = tiny.checkpoint(name)
    base = tiny.VARIANTS.get(name, name)
    model = tiny.loaded(name)
    inputs = tiny.inputs_of(base, model)
    return Original(base, folder, inputs, ours(model, inputs))


def copied(case: Case, name: str) -> Path:
    """A copy of a checkpoint that a case may change."""
    folder = case.folder / "checkpoint"
    shutil.copytree(tiny.checkpoint(name), folder, ignore=shutil.ignore_patterns("reference.npz"))
    case.changed = name
    return folder


def ours(model: keras.Model, inputs: Arrays) -> Arrays:
    """The outputs of a model as arrays."""
    given = {name: value for name, value in inputs.items() if name in model.family.inputs}
    return {
        name: keras.ops.convert_to_numpy(value) for name, value in model(given).items() if not isinstance(value, tuple)
    }


def theirs(folder: Path, architecture: str, inputs: Arrays) -> tuple[Any, Arrays]:
    """The model of transformers, and its outputs as arrays."""
    with making.on_cpu():
        kind = getattr(transformers, architecture)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        tensors = {name: torch.tensor(value) for name, value in inputs.items()}
        tensors = {name: x if x.is_floating_point() else x.long() for name, x in tensors.items()}
        found = model(**tensors)
        return model, {name: value.numpy() for name, value in found.items() if torch.is_tensor(value)}


def difference(found: Arrays, expected: Arrays, masks: Sequence[np.ndarray]) -> float:
    """The largest difference at real tokens, relative to the largest number; infinite for other names and shapes."""
    names = found.keys() & expected.keys()
    if not names:
        return np.inf
    return max(_apart(_real(found[name], masks), _real(expected[name], masks)) for name in names)


def _real(value: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    """The real tokens of an output by token, else all of it."""
    mask = next((mask for mask in masks if mask.shape == value.shape[:2]), None)
    return value if mask is None else value[mask]


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        return np.inf
    with np.errstate(all="ignore"):
        if np.array_equal(found, expected, equal_nan=True):
            return 0.0
        apart = np.abs(found.astype("float64") - expected).max() / max(1.0, np.abs(expected).max())
    return float(np.nan_to_num(apart, nan=np.inf))


def finite(arrays: Arrays, masks: Sequence[np.ndarray]) -> bool:
    """Whether all numbers at real tokens are finite."""
    return all(np.isfinite(_real(value, masks)).all() for value in arrays.values())


def loads_as_transformers(
    case: Case, name: str, folder: Path, *, ignored: str | None = None, generates: bool = False, compared: bool = True
) -> Outcome:
    """Loads a changed checkpoint, and decides whether what comes of it is right.

    It is right if a ValueError or OSError refuses it, or if its outputs are those of transformers for the same folder.
    If transformers refuses it, the outputs must be those of the unchanged checkpoint, and there must be a reason.

    Args:
        case: the case.
        name: the checkpoint.
        folder: its changed copy.
        ignored: why the change may be ignored, if it may.
        generates: whether to compare generated ids too.
        compared: whether transformers can read the files at all.
    """
    (found, ids), outcome = _run_ours(case, name, folder, generates)
    if outcome is not None:
        return outcome
    source = original(name)
    unchanged = difference(found, source.outputs, source.masks) <= TOLERANCE
    if not compared:
        return Outcome("right" if unchanged else "wrong", "" if unchanged else "loads with other outputs")
    try:
        architecture = json.loads((folder / "config.json").read_text()).get("architectures")
        peer, expected = theirs(folder, _architecture(architecture, source), source.inputs)
        their_ids = _their_ids(peer, source) if ids is not None else None
    except Exception as error:  # transformers raises anything
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        if unchanged and ignored:
            return Outcome("right", f"ignored: {ignored}; transformers raises {told}")
        which = "those of the unchanged checkpoint" if unchanged else "others than before"
        return Outcome("wrong", f"it loads, with outputs that are {which}, and transformers raises {told}")
    if not finite(expected, source.masks):
        return Outcome("right", "overflows, as in transformers")
    apart = difference(found, expected, source.masks)
    if apart > TOLERANCE:
        if unchanged and ignored:
            return Outcome("right", f"ignored: {ignored}")
        which = "those of the unchanged checkpoint" if unchanged else "others than before"
        return Outcome("wrong", f"it loads, with outputs that are {which}; those of transformers differ by {apart:.1e}")
    if ids is not None and ignored and np.array_equal(ids, _generated(name)):
        return Outcome("right", f"ignored: {ignored}")
    if ids is not None and not _same_ids(ids, their_ids):
        return Outcome("wrong", f"generates {np.asarray(ids).tolist()}, transformers {their_ids.tolist()}")
    return Outcome("right", "as transformers" if not unchanged else "as before")


def _run_ours(case: Case, name: str, folder: Path, generates: bool) -> tuple[Any, Outcome | None]:
    """The outputs and the generated ids, if they are wanted, of a changed checkpoint; or the outcome of its error."""
    model, outcome = case.attempt(lambda: pretrained.from_pretrained(folder))
    if outcome is not None:
        return (None, None), outcome
    source = original(name)

    def run() -> tuple[Any, Any]:
        ids = None
        if generates and source.prompts is not None:
            ids = model.generate(source.prompts, max_new_tokens=NEW_TOKENS, jit_compile=False)
        return ours(model, source.inputs), ids

    found, outcome = case.attempt(run)
    return found or (None, None), outcome


def _architecture(named: Any, source: Original) -> str:
    first = named[0] if isinstance(named, list) and named else None
    usual = making.CHECKPOINTS[source.name][0]
    return first if isinstance(first, str) and hasattr(transformers, first) else usual


def _their_ids(model: Any, source: Original) -> np.ndarray:
    prompts = {name: torch.tensor(value).long() for name, value in source.prompts.items()}
    with making.on_cpu():
        ids = model.generate(**prompts, max_new_tokens=NEW_TOKENS).numpy()
    return ids[:, 1:] if model.config.is_encoder_decoder else ids  # without the start token


@functools.cache
def _generated(name: str) -> np.ndarray:
    """What the unchanged checkpoint generates."""
    model = tiny.loaded(name)
    return np.asarray(model.generate(original(name).prompts, max_new_tokens=NEW_TOKENS, jit_compile=False))


def _same_ids(found: Any, expected: np.ndarray) -> bool:
    """Whether generated ids are equal; after the end of a text the padding may be longer."""
    found = np.asarray(found)
    width = min(found.shape[1], expected.shape[1])
    rest = {len(set(ids[row, width:].tolist())) <= 1 for ids in (found, expected) for row in range(len(ids))}
    return np.array_equal(found[:, :width], expected[:, :width]) and rest == {True}
