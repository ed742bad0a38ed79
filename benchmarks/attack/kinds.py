"""The kinds of cases that run in a `Worker`, and how many of each."""

from benchmarks.attack import archives, checkpoints, configs, tokenizer_files, weights
from benchmarks.attack.outcome import Case, Kind, Outcome
from tests.pretrained import tiny

KINDS = {
    "config.json": Kind(configs.config, 340),
    "generation_config.json": Kind(configs.generation_config, 130),
    "model.safetensors": Kind(weights.safetensors, 180),
    "shards and index": Kind(weights.shards, 80),
    "tf_model.h5": Kind(weights.hdf5, 70),
    "tokenizer files": Kind(tokenizer_files.files, 140),
    ".keras": Kind(archives.keras_file, 40),
    "backup of Resume": Kind(archives.backup, 20),
    "texts": Kind(tokenizer_files.texts, 0),
}


def prepare() -> None:
    """Imports and computes what all cases share, so that no case is measured with it."""
    good(None)


def good(case: Case | None) -> Outcome:
    """Whether an unchanged checkpoint loads, and computes what it should."""
    source = checkpoints.original("bert_cls")
    model = checkpoints.pretrained.from_pretrained(source.folder)
    expected = tiny.reference("bert_cls")
    names = {"logits": expected["logits"]}
    apart = checkpoints.difference(checkpoints.ours(model, source.inputs), names, source.masks)
    return Outcome("right" if apart <= checkpoints.TOLERANCE else "wrong", f"differs by {apart:.1e}")
