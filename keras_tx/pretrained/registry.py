"""The families by the `model_type` of config.json. A file is imported when one of its families is asked for."""

import importlib

from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family

FILES = {
    "bart": "bart",
    "bert": "bert",
    "camembert": "roberta",
    "distilbert": "distilbert",
    "electra": "electra",
    "gpt2": "gpt2",
    "llama": "llama",
    "marian": "marian",
    "mistral": "llama",
    "modernbert": "modernbert",
    "mt5": "t5",
    "qwen2": "llama",
    "qwen3": "llama",
    "roberta": "roberta",
    "t5": "t5",
    "vit": "vit",
    "xlm-roberta": "roberta",
}


def family_of(config: Config) -> type[Family]:
    """The family of a config.

    Raises:
        ValueError: for a `model_type` that is missing or not known, and for `auto_map`.
    """
    model_type = config.take("model_type", default=None)
    if not isinstance(model_type, str) or model_type not in FILES:
        raise ValueError(
            f"`model_type` in config.json must be one of {sorted(FILES)}. Received: model_type={model_type!r}"
        )
    if config.take("auto_map", default=None):
        raise ValueError(
            "`auto_map` in config.json names code that comes with the checkpoint, which is never run. Received: "
            f"auto_map={config.values['auto_map']!r}"
        )
    file = importlib.import_module(f"keras_tx.pretrained.families.{FILES[model_type]}")
    return next(family for family in file.FAMILIES if model_type in family.model_types)
