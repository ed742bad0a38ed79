"""The tiny checkpoints: where they lie, what transformers computes with them, and comparisons with it.

`checkpoint(name)` makes one when it is first asked for. All workers of a run share them. Runs on several backends do
too, if the environment variable KERAS_TX_TEST_CACHE names a folder for them. With
KERAS_TX_TEST_SEED=777 the weights are others: any seed must pass.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from keras_tx import pretrained
from keras_tx.pretrained.files import open_tensors
from tests.tools import to_numpy

SEED = int(os.environ.get("KERAS_TX_TEST_SEED", 20250101))
ENCODERS = [
    *("bert", "bert_cls", "distilbert", "distilbert_cls", "distilbert_qa", "electra", "modernbert", "roberta"),
    "roberta_cls",
]
DECODERS = ["gpt2", "gpt2_inner", "llama", "llama3", "mistral", "qwen2", "qwen3"]
SEQ2SEQ = ["bart", "marian", "t5", "t5_v11"]
GENERATIVE = DECODERS + SEQ2SEQ
NAMES = sorted([*ENCODERS, *GENERATIVE, "vit"])
VARIANTS = {  # and the checkpoint that they store
    "bart_unprefixed": "bart",
    "bert_bin": "bert",
    "bert_fp16": "bert",
    "bert_gamma_beta": "bert",
    "bert_unprefixed": "bert",
    "distilbert_cls_tf_h5": "distilbert_cls",
    "gpt2_original": "gpt2",
    "llama_bf16_sharded": "llama",
    "llama_v4_config": "llama",
    "marian_original": "marian",
    "t5_original": "t5",
    "t5_v11_resaved_by_v5": "t5_v11",
}
LOADABLE = [name for name in VARIANTS if name != "bert_bin"]  # a pickle is refused
HALF = {"bert_fp16": 2e-2, "llama_bf16_sharded": 2e-1}  # stored in half precision, and how far that is off


def checkpoint(name):
    """The directory of a checkpoint or of a variant."""
    target = _root() / name
    if not target.is_dir():
        from tests.pretrained import making, variants  # which import torch and transformers

        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        if name in VARIANTS:
            variants.make(name, checkpoint(VARIANTS[name]), beside)
        else:
            making.make(name, beside, SEED)
        try:
            beside.rename(target)
        except OSError:  # another worker was as quick
            if not target.is_dir():
                raise
            shutil.rmtree(beside)
    return target


@functools.cache
def _root():
    """A folder for everything that these weights depend on."""
    here = Path(__file__).parent
    parts = [(here / f"{name}.py").read_text() for name in ("making", "variants")]
    parts += [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return Path(os.environ["KERAS_TX_TEST_CACHE"]) / f"tiny_checkpoints-{SEED}-{key}"


@functools.cache
def loaded(name):
    """The model of a checkpoint, with hidden states. A test that changes its model loads one of its own."""
    return pretrained.from_pretrained(checkpoint(name), output_hidden_states=True)


@functools.cache
def reference(name):
    """{name: array} of inputs, and of what transformers computes."""
    with np.load(checkpoint(name) / "reference.npz") as arrays:
        found = dict(arrays)
    return {key: x.astype("int32") if x.dtype == "int64" else x for key, x in found.items()}


def tolerance(name):
    """Four times the error of float32 in transformers, and at least 2e-5."""
    return max(2e-5, 4 * float(reference(name)["float32_error"]))


def inputs_of(name, model):
    """What the reference was computed from."""
    return {key: reference(name)[key] for key in model.family.inputs if key in reference(name)}


def prompts_of(name):
    """What the texts of the reference continue, or translate."""
    start = "lp_" if name in DECODERS else ""
    return {key: reference(name)[f"{start}{key}"] for key in ("input_ids", "attention_mask")}


def assert_equals_reference(outputs, name, atol=None, only=None):
    """Compares every output that the reference has, at real tokens, each hidden state too. Returns the names."""
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
            # The error is that of logits; hidden states of T5 are larger.
            np.testing.assert_allclose(ours[real], theirs[real], rtol=2e-6, atol=atol, err_msg=f"{name}: {key}")
    return compared


def numbers(path):
    """{name: (dtype, shape, bytes)} of a checkpoint."""
    tensors = open_tensors(path)
    arrays = {name: np.ascontiguousarray(tensors.read(name)) for name in tensors}
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def copied(name, parent, **changed):
    """A copy of a checkpoint, whose config.json has these keys changed."""
    target = parent / "checkpoint"
    shutil.copytree(checkpoint(name), target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return target
