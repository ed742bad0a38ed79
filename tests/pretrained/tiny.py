"""The tiny checkpoints of shared/: what the tests of `keras_tx.pretrained` have in common."""

import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from keras_tx import pretrained
from tests.tools import SHARED, to_numpy

TINY = Path(os.environ.get("TINY_HF", SHARED / "fixtures" / "tiny_hf"))  # others of the same kind are as good
needs_tiny = pytest.mark.skipif(not TINY.is_dir(), reason="needs the tiny checkpoints of shared/")
NAMES = sorted(path.parent.name for path in TINY.glob("*/config.json"))
VARIANTS = sorted(path.parent.name for path in TINY.glob("variants/*/variant.json"))
READING = [name for name in NAMES if name.split("_")[0] in ("bert", "roberta", "distilbert", "electra", "modernbert")]
WRITING = [name for name in NAMES if (TINY / name / "generation_config.json").exists()]


@functools.cache
def loaded(name):
    """The model of a fixture with hidden states. Tests that change it load their own."""
    return pretrained.from_pretrained(TINY / name, output_hidden_states=True)


@functools.cache
def reference(name):
    """{name: array} of what transformers computes."""
    with np.load(TINY / name / "reference.npz") as arrays:
        return dict(arrays)


@functools.cache
def tolerance(name):
    """Four times the error of float32 in transformers, and not less than 2e-5."""
    families = json.loads((TINY / "manifest.json").read_text())["families"]
    return max(2e-5, 4 * families[name]["fp32_maxabs"])


def inputs_of(name, model):
    """What the reference was computed from."""
    return {key: reference(name)[key] for key in model.family.inputs if key in reference(name)}


def assert_equals_reference(outputs, name, atol=None, only=None):
    """Compares every output that the reference has at real tokens, each hidden state, and that none is missing."""
    arrays, atol = reference(name), tolerance(name) if atol is None else atol
    compared = {key for key in outputs if key in arrays and (only is None or key in only)}
    for key in compared:
        of_decoder = "decoder_attention_mask" in arrays and not key.startswith("encoder")
        mask = arrays.get("decoder_attention_mask" if of_decoder else "attention_mask")
        expected = list(arrays[key]) if isinstance(outputs[key], tuple) else [arrays[key]]
        actual = [to_numpy(x) for x in (outputs[key] if isinstance(outputs[key], tuple) else [outputs[key]])]
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.shape == theirs.shape
            by_token = mask is not None and theirs.shape[:2] == mask.shape
            real = mask.astype("bool") if by_token else ...
            np.testing.assert_allclose(ours[real], theirs[real], rtol=0, atol=atol, err_msg=f"{name}: {key}")
    return compared


def copied(name, folder, **changed):
    """A copy of a fixture, whose config.json has these keys changed."""
    target = folder / "checkpoint"
    shutil.copytree(TINY / name, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return target
