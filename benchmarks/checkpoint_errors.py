"""A table of how far loaded checkpoints are from PyTorch's results, in keras_tx and in KerasHub.

python -m benchmarks checkpoint_errors FOLDER

FOLDER has a folder for each checkpoint, with config.json, the weights and reference.npz, which holds inputs and outputs
by the names that transformers gives them (`input_ids`, `attention_mask`, `hidden_states`, `logits`, ...). Only real
tokens count.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from keras_tx import pretrained

Arrays = dict[str, np.ndarray]


def largest(ours: Any, expected: np.ndarray, mask: np.ndarray | None) -> float:
    """The largest difference. Of arrays (B, T) and (..., B, T, D) only tokens with a 1 in `mask` (B, T) count."""
    found = np.asarray(keras.ops.convert_to_numpy(ours), "float64")
    if found.shape != expected.shape:
        raise ValueError(f"shape {found.shape} instead of {expected.shape}")
    difference = np.abs(found - expected)
    if mask is not None and difference.shape == mask.shape:
        difference = difference[mask.astype(bool)]
    elif mask is not None and difference.shape[-3:-1] == mask.shape:
        difference = difference[..., mask.astype(bool), :]
    return float(difference.max())


def of_keras_tx(folder: Path, reference: Arrays) -> dict[str, float]:
    """The largest error of each output by its name; of the hidden states, that of the worst layer."""
    model = pretrained.from_pretrained(folder, output_hidden_states=True)
    outputs = model({name: reference[name] for name in model.family.inputs if name in reference})
    errors: dict[str, float] = {}
    for name, value in outputs.items():
        if name in reference:
            value = keras.ops.stack(value) if isinstance(value, tuple) else value
            row = "hidden states" if "hidden_state" in name else name
            errors[row] = max(errors.get(row, 0.0), largest(value, reference[name], _mask(name, reference)))
    return errors


def of_keras_hub(folder: Path, reference: Arrays) -> float:
    """The error of the last hidden states of KerasHub's backbone."""
    import keras_hub

    backbone = keras_hub.models.Backbone.from_preset(str(folder))
    if "decoder_input_ids" in reference:
        names = {"input_ids": "encoder_token_ids", "attention_mask": "encoder_padding_mask"}
        names |= {"decoder_input_ids": "decoder_token_ids", "decoder_attention_mask": "decoder_padding_mask"}
    else:
        names = {"input_ids": "token_ids", "attention_mask": "padding_mask", "token_type_ids": "segment_ids"}
    wanted = {tensor.name for tensor in backbone.inputs}
    if "pixel_values" in reference:
        outputs = backbone(np.moveaxis(reference["pixel_values"], 1, -1))
    else:
        zeros = np.zeros_like(reference["input_ids"])  # RoBERTa has no segments in its inputs, KerasHub's BERT has
        given = {names[key]: value for key, value in reference.items() if key in names}
        outputs = backbone({name: given.get(name, zeros) for name in wanted})
    if isinstance(outputs, dict):
        outputs = outputs.get("decoder_sequence_output", outputs.get("sequence_output"))
    name = "decoder_hidden_states" if "decoder_hidden_states" in reference else "hidden_states"
    return largest(outputs, _last(reference, name), _mask(name, reference))


def _last(reference: Arrays, name: str) -> np.ndarray:
    return reference["last_hidden_state"] if "last_hidden_state" in reference else reference[name][-1]


def _mask(name: str, reference: Arrays) -> np.ndarray | None:
    of_decoder = "decoder_attention_mask" in reference and not name.startswith("encoder")
    return reference.get("decoder_attention_mask" if of_decoder else "attention_mask")


def said(function: Callable[[Path, Arrays], Any], *arguments: Any) -> Any:
    """The result of a call, or the first line of its error: a checkpoint that cannot be loaded is a result, too."""
    try:
        return function(*arguments)
    except Exception as error:
        first, _, _ = str(error).strip().partition("\n")
        return f"{type(error).__name__}: {first[:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    heads = ("checkpoint", "keras_tx: all hidden states", "keras_tx: logits", "KerasHub: last hidden states")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for path in sorted(arguments.folder.glob("*/reference.npz")):
        with np.load(path) as arrays:
            reference = dict(arrays)
        ours, theirs = said(of_keras_tx, path.parent, reference), said(of_keras_hub, path.parent, reference)
        cells = [f"{ours[name]:.1e}" if name in ours else "" for name in ("hidden states", "logits")]
        cells.append(f"{theirs:.1e}" if isinstance(theirs, float) else theirs)
        print(f"| {path.parent.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
