"""Reads and writes BertTokenizer's arguments: vocab.txt or tokenizer.json, and tokenizer_config.json.

If tokenizer.json and tokenizer_config.json differ, the latter takes precedence, as in transformers' BertTokenizer.
"""

from pathlib import Path
from typing import Any

from keras_tx import json_text
from keras_tx.text.files import check_ids, folder_of, read_json, read_settings, write_tokenizer
from keras_tx.text.vocabulary import PREFIX, SPECIAL_TOKENS, read_vocabulary

# Hugging Face's name -> ours.
OPTIONS = {"do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "split_chinese"}
CLEAN_UP = "clean_up_tokenization_spaces"  # the same in both
TOKENS = {
    "unk_token": "unknown_token",
    "pad_token": "pad_token",
    "cls_token": "cls_token",
    "sep_token": "sep_token",
    "mask_token": "mask_token",
}
NORMALIZER = {"lowercase": "lowercase", "strip_accents": "strip_accents", "handle_chinese_chars": "split_chinese"}

# The classes in transformers, without "Tokenizer" and "Fast", that are equivalent to BertTokenizer; and two names that
# do not tell the kind of tokenizer.
BERT_CLASSES = {"Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "SqueezeBert", "LayoutLM", "Lxmert"}
GENERIC_CLASSES = {"PreTrained", "TokenizersBackend"}


def read_arguments(directory: str | Path) -> dict[str, Any]:
    """Reads the arguments of BertTokenizer from a directory.

    Raises:
        ValueError: there is no such directory, it has neither vocab.txt nor tokenizer.json, or its tokenizer is not
            BERT's, has special tokens beyond the five, or is said to lack one of them.
    """
    folder = folder_of(directory)
    of_json = None
    if (folder / "tokenizer.json").is_file():  # transformers prefers it too; it tells a tokenizer of another kind best
        of_json = _read_tokenizer_json(folder / "tokenizer.json")
    settings = read_settings(folder)
    config = settings.config
    kind = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast").removesuffix("Tokenizer")
    if kind not in BERT_CLASSES | GENERIC_CLASSES:
        raise ValueError(
            "`directory` must hold a BERT tokenizer. "
            f"Received: tokenizer_class={config['tokenizer_class']!r:.200} in {folder / 'tokenizer_config.json'}"
        )
    if of_json is not None:
        options, added = of_json
    elif (folder / "vocab.txt").is_file():
        options = {"vocabulary": read_vocabulary(folder / "vocab.txt")}
        added = {}
    else:
        raise ValueError(
            f"`directory` must contain vocab.txt or tokenizer.json. Received: directory={str(directory)!r}, "
            f"which contains {sorted(path.name for path in folder.iterdir())}"
        )
    options |= _flags(config, OPTIONS, folder / "tokenizer_config.json")
    if of_json is not None and kind in GENERIC_CLASSES:  # else transformers puts BERT's tokens around texts anyhow
        _check_template(folder / "tokenizer.json", settings.tokens)
    if absent := [theirs for theirs in TOKENS if config.get(theirs, "") is None]:
        raise ValueError(
            "`directory` must name each of BERT's special tokens, or leave the name out for the usual one. Received: "
            f"{absent[0]}=None in {folder / 'tokenizer_config.json'}"
        )
    options |= {ours: settings.tokens[theirs] for theirs, ours in TOKENS.items() if theirs in settings.tokens}
    if settings.options.get("truncation_side") == "left":
        raise ValueError(
            "`directory` must not ask for truncation on the left, which `BertTokenizer` does not have. Received: "
            f"truncation_side='left' in {folder / 'tokenizer_config.json'}"
        )
    options |= {name: value for name, value in settings.options.items() if name in ("max_length", CLEAN_UP)}
    added |= {token["content"]: token["id"] for token in settings.added if token["id"] is not None}
    if extra := sorted(set(added).difference((SPECIAL_TOKENS | options)[name] for name in SPECIAL_TOKENS)):
        raise ValueError(
            f"`directory` must have no special tokens except BERT's five. Received: {extra!r:.200} in {folder}"
        )
    options["vocabulary"] = _with_added_tokens(options["vocabulary"], added, folder)
    return options


def write_directory(directory: str | Path, options: dict[str, Any]) -> None:
    """Writes vocab.txt and tokenizer_config.json, for transformers and for `read_arguments`.

    Files that would be loaded instead are removed.
    """
    config = {"tokenizer_class": "BertTokenizer", "model_max_length": options["max_length"]}
    config |= {theirs: options[ours] for theirs, ours in {**OPTIONS, **TOKENS, CLEAN_UP: CLEAN_UP}.items()}
    vocabulary = "".join(token + "\n" for token in options["vocabulary"])
    write_tokenizer(directory, {"vocab.txt": vocabulary, "tokenizer_config.json": json_text.of_file(config)})


def _read_tokenizer_json(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Reads the arguments that a tokenizer.json holds, and its added tokens with their ids."""
    data = read_json(path)
    model, normalizer, before = (_dictionary(data, name) for name in ("model", "normalizer", "pre_tokenizer"))
    found = {
        "model.type": model.get("type"),
        "model.continuing_subword_prefix": model.get("continuing_subword_prefix"),
        "model.max_input_chars_per_word": model.get("max_input_chars_per_word"),
        "normalizer.type": normalizer.get("type"),
        "normalizer.clean_text": normalizer.get("clean_text"),
        "pre_tokenizer.type": before.get("type"),
    }
    for (key, value), wanted in zip(
        found.items(), ("WordPiece", PREFIX, 100, "BertNormalizer", True, "BertPreTokenizer"), strict=True
    ):
        if value != wanted:
            raise ValueError(
                f"`directory` must hold a BERT tokenizer: {key}={wanted!r}. Received: {key}={value!r:.200} in {path}"
            )
    options = _flags(normalizer, NORMALIZER, path)
    vocabulary = check_ids(model.get("vocab"), path)
    options["vocabulary"] = sorted(vocabulary, key=vocabulary.__getitem__)
    _check_places(options["vocabulary"], vocabulary, path)
    options["unknown_token"] = model.get("unk_token")
    added = data.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token for token in added
    ):
        raise ValueError(
            f"`directory` must list added tokens with their ids. Received: added_tokens={added!r:.200} in {path}"
        )
    return options, check_ids({token["content"]: token["id"] for token in added}, path)


def _check_template(path: Path, tokens: dict[str, str]) -> None:
    """Raises unless a tokenizer.json puts around texts what BERT puts."""
    step = _dictionary(read_json(path), "post_processor")
    cls, sep = (tokens.get(name, usual) for name, usual in (("cls_token", "[CLS]"), ("sep_token", "[SEP]")))

    def parts(*known: tuple[str, str, int]) -> list[Any]:
        return [{kind: {"id": name, "type_id": segment}} for kind, name, segment in known]

    single = parts(("SpecialToken", cls, 0), ("Sequence", "A", 0), ("SpecialToken", sep, 0))
    pair = [*single, *parts(("Sequence", "B", 1), ("SpecialToken", sep, 1))]
    is_template = step.get("type") == "TemplateProcessing" and (step.get("single"), step.get("pair")) == (single, pair)
    if not is_template and step.get("type") != "BertProcessing":
        raise ValueError(
            f"`directory` must hold a BERT tokenizer, which puts {cls} and {sep} around texts. Received: "
            f"post_processor={step!r:.200} in {path}"
        )


def _flags(values: dict[str, Any], names: dict[str, str], path: Path) -> dict[str, Any]:
    """The values of these names in a file, under our names."""
    for name in names:
        allowed = (True, False, None) if name == "strip_accents" else (True, False)
        if name in values and not any(values[name] is one for one in allowed):
            raise ValueError(
                f"`directory` must give one of {allowed}. Received: {name}={values[name]!r:.100} in {path}"
            )
    return {ours: values[theirs] for theirs, ours in names.items() if theirs in values}


def _with_added_tokens(vocabulary: list[str], added: dict[str, int], folder: Path) -> list[str]:
    """Appends the added tokens that the vocabulary lacks, and checks that the index of every token is its id."""
    known = set(vocabulary)
    whole = vocabulary + sorted((token for token in added if token not in known), key=added.__getitem__)
    _check_places(whole, added, folder)
    return whole


def _check_places(vocabulary: list[str], id_of: dict[str, int], path: Path) -> None:
    place_of = {token: place for place, token in enumerate(vocabulary)}
    for token, i in id_of.items():
        if place_of[token] != i:
            raise ValueError(
                "`directory` must number its tokens without gaps. "
                f"Received: {token!r:.200} with id {i} at place {place_of[token]} in {path}"
            )


def _dictionary(data: dict[str, Any], name: str) -> dict[str, Any]:
    part = data.get(name)
    return part if isinstance(part, dict) else {}
