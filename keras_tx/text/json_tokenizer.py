"""Tokenizers that a tokenizer.json defines. Outside a graph the `tokenizers` library runs them."""

import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from keras_tx import checks, json_text
from keras_tx.text.files import ROLES, Settings, tokens_in_order, write_tokenizer
from keras_tx.text.library_tokenizer import LibraryTokenizer
from keras_tx.text.template import Template
from keras_tx.text.tokenizer_json import call_library, parse_tokenizer_json

# A key of tokenizer_config.json for arguments of ours that transformers does not read from it.
OWN = "keras_tx"
PROBES = ("a", "b", "1", ".")  # a definition may delete some of them, such as a pre-tokenizer that splits at "."


class JsonTokenizer(LibraryTokenizer):
    """A tokenizer that is defined by a tokenizer.json.

    Args:
        definition: the content of a tokenizer.json, as a string or as the dict that `json.load` returns.
        special_tokens: maps an argument name to its special token, or to None.
        split_special_tokens: whether a special token that a text contains is text.
        options: the other arguments of `LibraryTokenizer`.
    """

    def __init__(
        self,
        definition: str | dict[str, Any],
        *,
        special_tokens: dict[str, str | None],
        split_special_tokens: bool,
        **options: Any,
    ) -> None:
        if not isinstance(definition, (str, dict)):
            received = type(definition).__name__
            raise TypeError(f"`definition` must be the content of a tokenizer.json. Received: a {received}")
        text = definition if isinstance(definition, str) else json.dumps(definition)
        self._tokenizer = parse_tokenizer_json(text, "definition")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.split_special_tokens: bool = checks.boolean("split_special_tokens", split_special_tokens)
        self._tokenizer.encode_special_tokens = self.split_special_tokens
        self.definition: str = self._tokenizer.to_str()
        vocabulary = tokens_in_order(self._tokenizer.get_vocab(with_added_tokens=True), "definition")
        if special_tokens["unknown_token"] is None:
            special_tokens["unknown_token"] = _unknown_token(self.parts["model"])
        single, double = self._template(False), self._template(True)
        super().__init__(vocabulary, single, double, special_tokens=special_tokens, **options)

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The definition as a dictionary."""
        parts: dict[str, Any] = json.loads(self.definition)
        return parts

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which `from_pretrained` and transformers can load.

        They replace the tokenizer that the directory has: files that would be loaded instead are removed.
        """
        tokens = self.special_tokens
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {theirs: tokens[ours] for theirs, ours in ROLES.items() if ours in tokens}
        if "cls_token" in tokens:
            config |= {"bos_token": tokens["cls_token"], "cls_token": tokens["cls_token"]}
        config |= {"model_max_length": self.max_length} if self.max_length is not None else {}
        config["truncation_side"] = self.truncation_side
        config["clean_up_tokenization_spaces"] = self.clean_up_tokenization_spaces
        config["split_special_tokens"] = self.split_special_tokens
        config |= {OWN: self._own_arguments()} if self._own_arguments() else {}
        files = {"tokenizer.json": self.definition, "tokenizer_config.json": json_text.of_file(config)}
        write_tokenizer(directory, files)

    def _own_arguments(self) -> dict[str, Any]:
        """The arguments of the constructor that the other keys of tokenizer_config.json do not bring back."""
        own: dict[str, Any] = {}
        token = self.special_tokens.get("cls_token")
        if token is not None and self._id_of[token] not in self.template.before[:1]:
            own["cls_token"] = token
        if self.clean_up_tokenization_spaces and self.parts["model"]["type"] == "BPE":
            own["clean_up_tokenization_spaces"] = True
        return own

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        split = {"split_special_tokens": self.split_special_tokens}
        return {"definition": self.definition} | self._common_config() | split

    def _template(self, pair: bool) -> Template:
        """Finds out where the post-processor puts special tokens, by encoding one text or two."""
        for probe in PROBES:
            found = call_library(
                lambda probe=probe: self._tokenizer.encode(probe, probe if pair else None),  # type: ignore[misc]
                f"`definition` must encode every text. Received: text {probe!r}",
            )
            ids, sides = found.ids, found.sequence_ids
            if 0 in sides and (not pair or 1 in sides):
                break
        else:
            raise ValueError(f"`definition` must keep the texts that it encodes. Received: ids {ids} for {probe!r}")
        if unknown := [i for i in ids if i >= self._tokenizer.get_vocab_size()]:
            raise ValueError(
                "`definition` must put tokens of its vocabulary around texts. Received: token id "
                f"{unknown[0]}, of {self._tokenizer.get_vocab_size()} tokens"
            )
        start, end = sides.index(0), len(sides) - sides[::-1].index(0)
        texts = [side for side, _ in itertools.groupby(sides) if side is not None]
        of_no_text = zip(sides, found.special_tokens_mask, strict=True)
        is_repeated = any(side is None and not special for side, special in of_no_text)
        if texts != ([0, 1] if pair else [0]) or is_repeated:
            raise ValueError(
                "`definition` must put every text once, and a pair after its first text, between special tokens. "
                f"Received: texts in the order {texts} of {'a pair' if pair else 'one text'}, counted from 0"
            )
        if not pair:
            return Template(tuple(ids[:start]), (), tuple(ids[end:]))
        second, last = sides.index(1), len(sides) - sides[::-1].index(1)
        return Template(tuple(ids[:start]), tuple(ids[end:second]), tuple(ids[last:]))

    @property
    def _found(self) -> list[dict[str, Any]]:
        """The added tokens that are found in texts."""
        return [token for token in self.parts["added_tokens"] if not (self.split_special_tokens and token["special"])]

    @cached_property
    def _found_normalized(self) -> list[dict[str, Any]]:
        """The same, each as in the normalized text if it is found there."""
        return [self._normalized(token) for token in self._found]

    @property
    def _decoded(self) -> list[str]:
        """The vocabulary with added tokens as the library decodes them, which is in normalized text."""
        content_of = {token["id"]: self._normalized(token)["content"] for token in self.parts["added_tokens"]}
        return [content_of.get(i, token) for i, token in enumerate(self.vocabulary)]

    def _normalized(self, token: dict[str, Any]) -> dict[str, Any]:
        normalizer = self._tokenizer.normalizer
        changes = normalizer is not None and token["normalized"]
        return token | {"content": normalizer.normalize_str(token["content"])} if changes else token

    @property
    def _unsupported_split(self) -> str | None:
        """The reason why a graph cannot find the added tokens, or None."""
        if self.split_special_tokens and self._found and len(self._found) < len(self.parts["added_tokens"]):
            return "it splits special tokens in texts, but has added tokens that it does not split"
        return None

    def _special_ids(self) -> set[int]:
        added = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        # The unknown token may be the one of the model, which nobody named, and which transformers then keeps.
        return added | {self._id_of[token] for name, token in self.special_tokens.items() if name != "unknown_token"}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode(self, rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        if skip_special_tokens:
            rows = [[i for i in row if not self._is_special[i]] for row in rows]
        texts: list[str] = self._tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)
        return texts


def constructor_arguments(tokenizer: Any, settings: Settings, folder: Path) -> dict[str, Any]:
    """Returns the arguments of `JsonTokenizer`'s subclasses for a tokenizer of the `tokenizers` library.

    Raises:
        ValueError: the tokenizer does not number its tokens without gaps, or the arguments that `save` wrote for this
            package are damaged.
    """
    tokens_in_order(tokenizer.get_vocab(with_added_tokens=True), folder)
    found: dict[str, Any] = {"definition": tokenizer.to_str()} | settings.options
    if type(tokenizer.model).__name__ == "BPE":
        found.pop("clean_up_tokenization_spaces", None)  # transformers ignores it, as spaces are part of the tokens
    padding = tokenizer.padding or {}
    for theirs, ours in ROLES.items():
        if theirs in settings.tokens:
            found.setdefault(ours, settings.tokens[theirs])
    if padding.get("pad_token"):
        found.setdefault("pad_token", padding["pad_token"])
    own = settings.config.get(OWN, {})
    kinds = {"cls_token": str, "clean_up_tokenization_spaces": bool}
    if not isinstance(own, dict) or not all(isinstance(own.get(name), kinds.get(name, ())) for name in own):
        raise ValueError(
            f"`directory` must have in {OWN!r} only a string `cls_token` and a boolean `clean_up_tokenization_spaces`. "
            f"Received: {own!r:.200} in {folder / 'tokenizer_config.json'}"
        )
    return found | own


def _unknown_token(model: dict[str, Any]) -> str | None:
    token: str | None = model.get("unk_token")
    if model.get("unk_id") is not None:
        token = model["vocab"][model["unk_id"]][0]
    return token
