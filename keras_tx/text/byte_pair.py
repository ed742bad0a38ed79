"""Byte-level byte pairs, as GPT-2, RoBERTa, BART, Llama 3 and Qwen have: (B,) strings -> (B, T) ids -> (B,) strings.

Every text has ids: a byte is the smallest token. Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 (GPT-2).
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import keras

from keras_tx.text.byte_pair_graph import BytePairGraph, unsupported_parts
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, arguments
from keras_tx.text.tokenizer_json import from_json, from_merges


@keras.saving.register_keras_serializable(package="keras_tx")
class BytePairTokenizer(JsonTokenizer):
    """Texts to ids and back with a byte-level byte-pair vocabulary.

    ```python
    tokenizer = BytePairTokenizer.from_pretrained("gpt2", pad_token="<|endoftext|>")  # a directory
    tokenizer(["A dog runs.", "Hi"])  # {"token_ids": int32 (2, T)}
    tokenizer.decode([[32, 3290]])    # ["A dog"]
    ```

    In a graph it runs with the pre-tokenizers of GPT-2 (RoBERTa, BART), Llama 3 and Qwen 2; `not_in_graph` names what
    else a definition has. Its ids there were those of `tokenizers` on all 69,250 sentences tried, on each of 933,634
    strings around one Unicode character and on 20,000 random ones, and so were its texts. The only known difference:
    the noncharacter U+1FFFE reads as a zero byte.

    Args:
        definition: the text of a tokenizer.json, or what `json.load` makes of it.
        max_length: the most tokens of a row, special tokens included, where a call does not say; None: no limit.
        truncation_side: "right" or "left", where a row that is too long is cut.
        clean_up_tokenization_spaces: what decoding does where a call does not say. transformers leaves it to WordPiece.
        unknown_token: what the model takes for unknown, if there is such a token.
        pad_token: fills rows up. GPT-2 and Llama 3 have none: name one to make batches of texts of several lengths.
        cls_token: what begins every row; None: the first token that the definition puts before a text, if there is one.
        sep_token: what ends a text; None: the last token that the definition puts behind a text, if there is one.
        mask_token: hides a token in masked language modeling.

    Raises:
        TypeError, ValueError: a definition that is malformed, is not byte-level or does not number its tokens without
            gaps; a special token that is not in the vocabulary; a `max_length` too small.
    """

    def __init__(
        self,
        definition: str | dict[str, Any],
        *,
        max_length: int | None = None,
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        unknown_token: str | None = None,
        pad_token: str | None = None,
        cls_token: str | None = None,
        sep_token: str | None = None,
        mask_token: str | None = None,
    ):
        tokens = dict(unknown_token=unknown_token, pad_token=pad_token, cls_token=cls_token, sep_token=sep_token)
        super().__init__(
            definition,
            max_length=max_length,
            truncation_side=truncation_side,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            special_tokens=tokens | {"mask_token": mask_token},
        )
        if not is_byte_level(self.parts):
            found = {"model": self.parts["model"]["type"], "decoder": (self.parts["decoder"] or {}).get("type")}
            raise ValueError(f"`definition` must be byte-level byte pairs. Received: {found}")

    @classmethod
    def _arguments(cls, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder)
        if (folder / "tokenizer.json").is_file():
            return arguments(from_json(folder, settings), settings, folder)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return arguments(from_merges(folder, settings), settings, folder)
        names = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            "`directory` must contain tokenizer.json, or vocab.json and merges.txt. "
            f"Received: directory={str(folder)!r}, which contains {names}"
        )

    @cached_property
    def not_in_graph(self) -> str | None:
        """Why it does not run in a graph, or None."""
        return unsupported_parts(self.parts)

    @cached_property
    def _graph(self) -> BytePairGraph:
        return BytePairGraph(self.parts, self.vocabulary)

    def _graph_encode(self, texts):
        return self._graph.encode(texts)

    def _graph_decode(self, ids):
        return self._graph.decode(ids)


def is_byte_level(parts: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is of byte pairs whose smallest tokens are bytes."""
    return parts["model"].get("type") == "BPE" and (parts.get("decoder") or {}).get("type") == "ByteLevel"
