"""The content of a tokenizer.json: a model, the steps before and after it, and special tokens around texts.

It is built here for tokenizers of words and characters, and read for what its decoder is.
"""

import json
from pathlib import Path
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.text.files import read_vocabulary_json
from keras_tx.text.vocabulary import check_vocabulary, read_vocabulary

tokenizers = Lazy("tokenizers", extra="text")

# The special tokens of new vocabularies, in the order of their ids: padding has the id 0.
OF_WORDS = {"pad_token": "[PAD]", "unknown_token": "[UNK]", "cls_token": "[SOS]", "sep_token": "[EOS]"}
OF_PIECES = {"pad_token": "<pad>", "unknown_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
ROLES = ("pad_token", "unknown_token", "cls_token", "sep_token", "mask_token")


def special_tokens(
    defaults: dict[str, str], options: dict[str, Any], needed: tuple[str, ...] = (), whole: bool = False
) -> dict[str, str]:
    """Returns the special tokens of a new vocabulary, in the order of their ids.

    Args:
        defaults: maps argument names to the tokens that are not in `options`.
        options: arguments of a constructor. A special token that is None is left out.
        needed: the arguments that must not be None.
        whole: whether the tokens need two characters, because each character that a text may have has its own id.

    Raises:
        TypeError: a token is not a string.
        ValueError: a token is too short.
    """
    found = {}
    for name in ROLES:
        token = options.get(name, defaults.get(name))
        if token is None and name not in needed:
            continue
        if not isinstance(token, str):
            rule = "a string" if name in needed else "a string or None"
            raise TypeError(f"`{name}` must be {rule}. Received: {name}={token!r}")
        if len(token) < (2 if whole else 1):
            rule = "at least two characters, because one may occur in a text" if whole else "at least one character"
            raise ValueError(f"`{name}` must have {rule}. Received: {name}={token!r}")
        found[name] = token
    return found


def build_definition(
    model: dict[str, Any],
    special: dict[str, str],
    *,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Builds the content of a tokenizer.json.

    A row begins with the "cls_token" of `special`, and the "sep_token" follows each text.

    Args:
        model: the model with its vocabulary, which has the special tokens.
        special: maps argument names to special tokens.
        normalizer, pre_tokenizer, decoder: the steps before and after the model.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": model["vocab"][token], "content": token} | flags for token in dict.fromkeys(special.values())]
    single = _template(special, "A")
    pair = _template(special, "A") + _template(special, "B")[1 if "cls_token" in special else 0 :]
    around = {special[role] for role in ("cls_token", "sep_token") if role in special}
    ids = {token: {"id": token, "ids": [model["vocab"][token]], "tokens": [token]} for token in sorted(around)}
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template if around else None,
        "decoder": decoder,
        "model": model,
    }


def as_step(name: str, value: Any) -> dict[str, Any] | None:
    """Returns a normalizer or a pre-tokenizer in the form of a tokenizer.json.

    Args:
        name: "normalizer" or "pre_tokenizer".
        value: None; or the name of a class of the library; or an object of it; or its form in a tokenizer.json; or a
            list of these, which are applied one after the other.

    Raises:
        TypeError: `value` is none of these.
        ValueError: the library has no step of this name, or does not accept the form.
    """
    module = tokenizers.normalizers if name == "normalizer" else tokenizers.pre_tokenizers
    base = module.Normalizer if name == "normalizer" else module.PreTokenizer
    if isinstance(value, (list, tuple)):
        inner = [as_step(name, one) for one in value]
        return {"type": "Sequence", f"{name.replace('_', '')}s": [one for one in inner if one is not None]}
    if isinstance(value, str):
        found = getattr(module, value, None)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(f"`{name}` must name a step of the `tokenizers` library. Received: {name}={value!r}")
        value = _of_library(name, found)
    if value is None:
        return None
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    if isinstance(value, dict):
        try:
            library = tokenizers.Tokenizer.from_str(json.dumps(json.loads(library.to_str()) | {name: value}))
        except Exception as error:  # the library raises Exception itself
            rule = "a step that the `tokenizers` library can read"
            raise ValueError(f"`{name}` must be {rule}. Received: {name}={value!r}: {error}") from error
    elif isinstance(value, base):
        setattr(library, name, value)
    else:
        rule = f"None, the name of a step, its form in a tokenizer.json or an object of tokenizers.{name}s"
        raise TypeError(f"`{name}` must be {rule}, or a list of these. Received: {name}={value!r}")
    step: dict[str, Any] = json.loads(library.to_str())[name]
    return step


def read_tokens(vocabulary: Any, special: dict[str, str]) -> dict[str, int]:
    """Maps the tokens of a vocabulary to their ids.

    Args:
        vocabulary: the tokens in the order of their ids; or the path of a vocab.json, which maps tokens to ids; or the
            path of another file with one token a line.
        special: maps argument names to the special tokens that must be among them.

    Raises:
        TypeError: `vocabulary` is not a path or a list of strings.
        ValueError: the file is missing or malformed, or the vocabulary lacks a special token or repeats a token.
    """
    if isinstance(vocabulary, (str, Path)):
        vocabulary = _read_file(Path(vocabulary))
    tokens = check_vocabulary(vocabulary, special, lines=False)
    return {token: i for i, token in enumerate(tokens)}


def _read_file(path: Path) -> list[str]:
    try:
        if path.suffix != ".json":
            return read_vocabulary(path)
        id_of = read_vocabulary_json(path)
    except (OSError, ValueError) as error:
        rule = "a list of tokens or the path of a vocabulary file"
        raise ValueError(f"`vocabulary` must be {rule}. Received: vocabulary={str(path)!r}: {error}") from error
    return sorted(id_of, key=id_of.__getitem__)


def _of_library(name: str, step: Any) -> Any:
    try:
        return step()
    except TypeError as error:
        received = f"{name}={step.__name__!r}: {error}"
        raise ValueError(f"`{name}` must be an object if the step needs arguments. Received: {received}") from error


def _template(special: dict[str, str], side: str) -> list[dict[str, Any]]:
    kind = 0 if side == "A" else 1
    before, after = (
        [{"SpecialToken": {"id": special[role], "type_id": kind}}] if role in special else []
        for role in ("cls_token", "sep_token")
    )
    return [*before, {"Sequence": {"id": side, "type_id": kind}}, *after]


def decoders(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the decoder in the content of a tokenizer.json."""
    decoder = parts.get("decoder") or {}
    steps: Any = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    is_right = isinstance(steps, list) and all(isinstance(step, dict) for step in steps)
    return list(steps) if is_right else []


def model_and_decoder(parts: dict[str, Any]) -> dict[str, Any]:
    """The type of the model and of the decoder, for errors; of a decoder that is a Sequence, the types of its steps."""
    kind, steps = (parts["decoder"] or {}).get("type"), [step.get("type") for step in decoders(parts)]
    return {"model": parts["model"]["type"], "decoder": steps if kind == "Sequence" and steps else kind}
