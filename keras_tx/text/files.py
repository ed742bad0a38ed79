"""Tokenizer directories of Hugging Face -> checked JSON and settings. Nothing is run or unpickled."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keras_tx import checks, json_text
from keras_tx.replace import replacing

Result = TypeVar("Result")

UNLIMITED = 1_000_000_000  # transformers writes 1e30 if the length has no limit
# Hugging Face's name -> our name, in the order of preference: `eos_token` takes precedence over `sep_token`.
ROLES = {
    "unk_token": "unknown_token",
    "pad_token": "pad_token",
    "eos_token": "sep_token",
    "sep_token": "sep_token",
    "mask_token": "mask_token",
}
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")
# Files of a tokenizer: the first that a directory has tells its kind.
OF_KINDS = (
    *("source.spm", "target.spm", "tokenizer.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "vocab.txt"),
)
MERGED = ("special_tokens_map.json", "added_tokens.json")  # which are read beside them
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass
class Settings:
    """The content of tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    Attributes:
        kind: the class in transformers without "Tokenizer" and "Fast", or the model type of config.json, or "".
        config: the content of tokenizer_config.json.
        tokens: maps Hugging Face's name of a special token to the token, such as "eos_token" to "</s>".
        added: the added tokens, which texts never split, in the order in which they are added: dictionaries with
            "content", "id" (or None) and flags.
        options: arguments of the constructors of our tokenizers.
    """

    kind: str
    config: dict[str, Any]
    tokens: dict[str, str] = field(default_factory=dict)
    added: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def folder_of(directory: str | Path) -> Path:
    """Returns the directory as a path; raises ValueError if there is none."""
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"`directory` must be a directory. Received: directory={str(directory)!r}")
    return folder


def through_directory(read: Callable[[str], Result], tokenizer: Any) -> Result:
    """Saves a tokenizer object of transformers to a temporary directory and returns the result of `read` for it.

    Raises:
        TypeError: the object has no `save_pretrained`.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(f"`tokenizer` must be a tokenizer of transformers. Received: tokenizer={tokenizer!r}")
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return read(directory)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file with one JSON object; raises ValueError, with the name of the file, for anything else."""
    try:
        data = json_text.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`directory` must hold JSON in {path.name}. Received: {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"`directory` must hold a JSON object in {path.name}. Received: {type(data).__name__} in {path}"
        )
    return data


def read_vocabulary_json(path: Path) -> dict[str, int]:
    """Reads a vocab.json, which maps tokens to ids and has every id from 0 on once."""
    data = check_ids(read_json(path), path)
    tokens_in_order(data, path)
    return data


def check_ids(vocabulary: Any, path: Path) -> dict[str, int]:
    """Returns the vocabulary if it maps tokens to integers."""
    if not isinstance(vocabulary, dict):
        raise ValueError(f"`directory` must hold a vocabulary. Received: a {type(vocabulary).__name__} in {path}")
    for token, i in vocabulary.items():
        if isinstance(i, bool) or not isinstance(i, int):
            raise ValueError(
                f"`directory` must hold ids in {path.name}. Received: {token!r:.200}: {i!r:.200} in {path}"
            )
    return vocabulary


def tokens_in_order(id_of: dict[str, int], place: Any) -> list[str]:
    """Returns the tokens in the order of their ids; raises ValueError if an id is missing or repeated."""
    token_of = {i: token for token, i in id_of.items()}
    if not token_of or len(token_of) != len(id_of) or max(token_of) != len(token_of) - 1 or min(token_of) != 0:
        ids = sorted(id_of.values())
        wrong = next((place for place, i in enumerate(ids) if place != i), 0)
        raise ValueError(
            f"`directory` must number its tokens without gaps. Received: {len(ids)} tokens, none or two with id "
            f"{wrong}, in {place}"
        )
    return [token_of[i] for i in range(len(token_of))]


def read_settings(folder: Path, splits: bool = False) -> Settings:
    """Reads the settings in the folder of a vocabulary; each of the files may be missing.

    Args:
        folder: the folder.
        splits: whether the class can split special tokens in texts (`split_special_tokens`).

    Raises:
        ValueError: a file is malformed, or needs what is not supported: custom code, special tokens that are split in
            texts, or two vocabularies.
    """
    config = _optional(folder, "tokenizer_config.json")
    place = folder / "tokenizer_config.json"
    if config.get("auto_map"):
        raise ValueError(
            f"`directory` must not need code of its own. Received: auto_map={config['auto_map']!r:.200} in {place}"
        )
    for key in ("separate_vocabs",) if splits else ("split_special_tokens", "separate_vocabs"):
        if config.get(key) not in (False, None):
            raise ValueError(f"`directory` must not ask for {key}. Received: {key}={config[key]!r:.200} in {place}")
    kind = config.get("tokenizer_class") or _optional(folder, "config.json").get("model_type") or ""
    if not isinstance(kind, str):
        raise ValueError(f"`directory` must name its class. Received: tokenizer_class={kind!r:.200} in {place}")
    settings = Settings(kind.removesuffix("Fast").removesuffix("Tokenizer"), config)
    named = _named(folder, config)
    for theirs in NAMED:
        if named.get(theirs) is not None:
            settings.tokens[theirs] = _token(named[theirs], theirs, place)["content"]
    settings.added = _added(folder, config, named, place)
    settings.options = _options(config, place)
    if not splits:
        settings.options.pop("split_special_tokens", None)
    return settings


def _named(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, overridden by special_tokens_map.json if it has no ids of added tokens."""
    return config if "added_tokens_decoder" in config else config | _optional(folder, "special_tokens_map.json")


def _added(folder: Path, config: dict[str, Any], named: dict[str, Any], place: Path) -> list[dict[str, Any]]:
    numbered = config.get("added_tokens_decoder") or {}
    if not isinstance(numbered, dict) or not all(str(i).isdecimal() for i in numbered):
        raise ValueError(
            f"`directory` must number its added tokens. Received: added_tokens_decoder={numbered!r:.200} in {place}"
        )
    added = [_token(token, "added_tokens_decoder", place) | {"id": int(i)} for i, token in numbered.items()]
    added.sort(key=lambda token: token["id"])
    lists = [token for key in LISTS for token in _list(named.get(key) or [], key, place)]
    special = [_token(named[key], key, place) for key in NAMED if named.get(key) is not None] + lists
    if not numbered:
        names = {token["content"] for token in special}
        for content, i in sorted(
            _optional(folder, "added_tokens.json").items(), key=lambda item: str(item[1]).zfill(20)
        ):
            if isinstance(i, bool) or not isinstance(i, int):
                raise ValueError(
                    "`directory` must hold ids in added_tokens.json. Received: "
                    f"{content!r:.200}: {i!r:.200} in {folder}"
                )
            flags = {"special": content in names, "normalized": content not in names}
            added.append(_token(content, "added_tokens.json", place) | flags | {"id": i})
    seen = {token["content"] for token in added}
    for token in special:
        if token["content"] not in seen:
            seen.add(token["content"])
            added.append(token | {"special": True, "id": None})
    return added


def _list(tokens: Any, key: str, place: Path) -> list[dict[str, Any]]:
    tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
    if not isinstance(tokens, list):
        raise ValueError(f"`directory` must list tokens. Received: {key}={tokens!r:.200} in {place}")
    return [_token(token, key, place) for token in tokens]


def _token(token: Any, key: str, place: Path) -> dict[str, Any]:
    """Converts a token, given as text or as a dictionary, to a dictionary with all flags."""
    token = {"content": token} if isinstance(token, str) else token
    if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
        raise ValueError(f"`directory` must give tokens as text. Received: {key}: {token!r:.200} in {place}")
    flags = {flag: token.get(flag, flag == "special") for flag in FLAGS}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise ValueError(
            f"`directory` must give tokens' flags as true or false. Received: {key}: {token!r:.200} in {place}"
        )
    return {"content": token["content"], **flags}


def _options(config: dict[str, Any], place: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
    length = config.get("model_max_length", config.get("max_len"))
    if isinstance(length, bool) or (length is not None and not (isinstance(length, (int, float)) and length > 0)):
        raise ValueError(
            "`directory` must have a positive number as `model_max_length`. Received: "
            f"model_max_length={length!r:.200} in {place}"
        )
    if length is not None and length < UNLIMITED:
        options["max_length"] = int(length)
    for theirs, allowed in {
        "truncation_side": ("right", "left"),
        "clean_up_tokenization_spaces": (True, False),
        "split_special_tokens": (True, False),
        "add_prefix_space": (True, False),
    }.items():
        # transformers ignores null, except here
        if config.get(theirs) is not None or (theirs == "split_special_tokens" and theirs in config):
            if type(config[theirs]) is not type(allowed[0]) or config[theirs] not in allowed:
                raise ValueError(
                    f"`directory` must give one of {allowed}. Received: {theirs}={config[theirs]!r:.200} in {place}"
                )
            options[theirs] = config[theirs]
    options.pop("add_prefix_space", None)  # those who build a tokenizer read it
    return options


def write_tokenizer(directory: str | Path, files: Mapping[str, str | bytes]) -> None:
    """Writes the files of a tokenizer in place of another one in the directory, all at one moment.

    Files of the other one are removed if they would be loaded instead, or together with the new ones.

    Args:
        directory: the directory, which is created if it does not exist.
        files: maps names to contents; the first is the file that tells the kind of the tokenizer.
    """
    first = next(iter(files))
    others = {*OF_KINDS[: OF_KINDS.index(first)], *MERGED}
    with replacing(checks.local_path("directory", directory), lambda name, _: name in others, gate=first) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
