"""Marian, the translation models of OPUS-MT.

Junczys-Dowmunt et al. 2018, arXiv:1804.00344; Tiedemann and Thottingal 2020, aclanthology.org/2020.eamt-1.61.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from keras import ops

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import SinusoidalPositionalEncoding
from keras_tx.layers.positions import sinusoids
from keras_tx.pretrained import table
from keras_tx.pretrained.families.bart import Bart
from keras_tx.pretrained.table import Row

_ROUNDED = 0.01  # the tolerance for tables in half precision


class Marian(Bart):
    """BART with sinusoidal positions (all sines before all cosines) and without a norm after the embedding."""

    model_types = ("marian",)
    tasks = {"base": "MarianModel", "conditional_generation": "MarianMTModel"}
    ignored = {
        **Bart.ignored,
        r"model\.(encoder|decoder)\.embed_positions\.weight": "sinusoids, which the model computes",
    }
    padding_id, start_id, eos_id = 58100, 58100, 0

    def check_ignored(self, name: str, read: Callable[[], np.ndarray]) -> None:
        if name.endswith("embed_positions.weight"):
            table = read().astype("float32")
            expected = sinusoids(np.arange(len(table)), self.hidden_dim, layout="concatenated")
            if table.shape != expected.shape or np.abs(table - ops.convert_to_numpy(expected)).max() > _ROUNDED:
                raise ValueError(
                    f"{name!r} must be sinusoids, all sines before all cosines, of width {self.hidden_dim}. Received: "
                    f"a different table of shape {table.shape}"
                )

    def _make_embeddings(self) -> None:
        self.embedding = self.target_embedding = self._embedding("vocab_size", "embedding")
        if not self.config.flag("share_encoder_decoder_embeddings", default=True):
            size = "vocab_size" if self.config.values.get("decoder_vocab_size") is None else "decoder_vocab_size"
            self.target_embedding = self._embedding(size, "target_embedding")
            self.copies = ()

    def _position_encoding(self, side: str) -> Any:
        return SinusoidalPositionalEncoding(layout="concatenated", dtype=self.dtype, name=f"{side}_positions")

    def _norm(self, side: str) -> Any:
        return None

    def _embedding_rows(self) -> Iterator[Row]:
        if self.target_embedding is self.embedding:
            yield from super()._embedding_rows()
            return
        for side, embedding in (("encoder", self.embedding), ("decoder", self.target_embedding)):
            yield table.Row(f"{self.prefix}{side}.embed_tokens.weight", embeddings_of(embedding.tokens))

    def _side_rows(self, side: str) -> Iterator[Row]:
        yield from ()

    def computed(self) -> dict[str, np.ndarray]:
        tables = super().computed()
        if self.task != "base":
            return tables
        length, size = self.config.number("max_position_embeddings"), self.hidden_dim
        angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
        table = np.concatenate([np.sin(angles), np.cos(angles[:, : size // 2])], axis=1)
        return tables | {f"{self.prefix}{side}.embed_positions.weight": table for side in ("encoder", "decoder")}


FAMILIES = (Marian,)
