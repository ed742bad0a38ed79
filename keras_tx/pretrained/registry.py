"""Finds the family of a checkpoint by the `model_type` of config.json, and imports its module on first use."""

import importlib
from collections.abc import Collection
from typing import Any

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
        ValueError: `model_type` is missing or unknown, or there is an `auto_map`.
    """
    model_type = config.take("model_type", default=None)
    if not isinstance(model_type, str) or model_type not in FILES:
        raise ValueError(
            f"`model_type` in config.json must be one of {sorted(FILES)}. Received: model_type={model_type!r:.200}"
        )
    if config.take("auto_map", default=None):
        raise ValueError(
            "`auto_map` in config.json refers to code inside the checkpoint, which is never run. Received: "
            f"auto_map={config.values['auto_map']!r:.200}"
        )
    file = importlib.import_module(f"keras_tx.pretrained.families.{FILES[model_type]}")
    families: tuple[type[Family], ...] = file.FAMILIES
    return next(family for family in families if model_type in family.model_types)


def read_family(
    values: dict[str, Any] | Config,
    task: str | None = None,
    *,
    tied: bool | None = None,
    absent: Collection[str] = (),
    dtype: Any = None,
) -> Family:
    """Creates the family of a config with its layers, none of which is built yet.

    The whole config is read here, so that an unsupported config raises an error before anything large is created.

    Args:
        values: the content of config.json; or a `Config`, which then has the absent parts.
        task: a task of the family. None: the task of `architectures` in the config.
        tied: whether the token embeddings are also the kernel of the output layer. None: as in the config.
        absent: optional parts that the checkpoint lacks.
        dtype: the dtype policy of the layers.

    Raises:
        ValueError: the model type or task is unknown, or a key is missing or not supported.
    """
    config = values if isinstance(values, Config) else Config(values, absent)
    kind = family_of(config)
    task = kind.task_of(config) if task is None else kind.check_task(task)
    said = config.flag("tie_word_embeddings", default=kind.tied_by_default)
    family = kind(config, task, tied=said if tied is None else tied, dtype=dtype)
    config.check()
    return family
