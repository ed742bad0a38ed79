"""SentencePiece tokenizers, as T5, XLM-RoBERTa and Llama 2 have: (B,) strings -> (B, T) ids -> strings.

Kudo and Richardson 2018, arXiv:1808.06226; Unigram: Kudo 2018, arXiv:1804.10959.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import keras

from keras_tx.text.byte_pair import is_byte_level
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, arguments
from keras_tx.text.sentencepiece_graph import PieceGraph
from keras_tx.text.sentencepiece_model import check_normalizer, unsupported_parts
from keras_tx.text.tokenizer_json import from_json, from_pieces


@keras.saving.register_keras_serializable(package="keras_tx")
class SentencePieceTokenizer(JsonTokenizer):
    """Texts to ids and back with a SentencePiece vocabulary: Unigram, or byte pairs over characters (Llama 2).

    ```python
    tokenizer = SentencePieceTokenizer.from_pretrained("t5-small")  # a directory
    tokenizer(["A dog runs.", "Hi"])  # {"token_ids": int32 (2, T)}
    tokenizer.decode([[71, 1782, 1]])  # ["A dog"]
    ```

    In a graph it runs where texts are split at spaces, each with a space before it (T5, XLM-RoBERTa, CamemBERT), and as
    byte pairs whose merges are all that the vocabulary allows (Llama 2); `not_in_graph` names what else there is.
    Llama 2's ids and texts there were those of `tokenizers` on all 69,250 sentences tried, on each of 933,634 strings
    around one Unicode character (but the noncharacter U+1FFFE, which reads as a zero byte) and on 20,000 random ones.
    T5's ids were so too but in 41 of the random ones: `tokenizers` drops or leaves some combining marks that follow a
    character that Unicode normalization changes, or each other, where SentencePiece itself and so the graph do not;
    and of two splits with one score either may win.

    Args:
        definition: the text of a tokenizer.json, or what `json.load` makes of it.
        max_length: the most tokens of a row, special tokens included, where a call does not say; None: no limit.
        truncation_side: "right" or "left", where a row that is too long is cut.
        clean_up_tokenization_spaces: what decoding does where a call does not say.
        unknown_token: stands for what the vocabulary lacks; None: what the definition says.
        pad_token: fills rows up.
        cls_token: what begins every row; None: the first token that the definition puts before a text, if there is one.
        sep_token: what ends a text; None: the last token that the definition puts behind a text, if there is one.
        mask_token: hides a token in masked language modeling.

    Raises:
        TypeError, ValueError: a definition that is malformed, is of another kind or does not number its tokens without
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
        if not is_sentence_piece(self.parts):
            found = {"model": self.parts["model"]["type"], "decoder": (self.parts["decoder"] or {}).get("type")}
            raise ValueError(f"`definition` must be a SentencePiece model's. Received: {found}")
        check_normalizer(self.parts["normalizer"], "definition")

    @classmethod
    def _arguments(cls, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder)
        read = from_json if (folder / "tokenizer.json").is_file() else from_pieces
        return arguments(read(folder, settings), settings, folder)

    @cached_property
    def not_in_graph(self) -> str | None:
        """Why it does not run in a graph, or None."""
        return unsupported_parts(self.parts, self._tokenizer.normalizer)

    @cached_property
    def _graph(self) -> PieceGraph:
        return PieceGraph(
            self.parts, self.vocabulary, self._tokenizer.normalizer, lambda rows: self._decode(rows, False)
        )

    def _graph_encode(self, texts):
        return self._graph.encode(texts)

    def _graph_decode(self, ids):
        return self._graph.decode(ids)


def is_sentence_piece(parts: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is of a SentencePiece model: Unigram, or byte pairs that are not byte-level."""
    kind = parts["model"].get("type")
    return kind == "Unigram" or (kind == "BPE" and "▁" in str(parts.get("decoder")) and not is_byte_level(parts))
