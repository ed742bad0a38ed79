"""Truncates rows of ids and adds special tokens; as lists and in a TensorFlow graph."""

from dataclasses import dataclass

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


@dataclass(frozen=True)
class Template:
    """The special tokens of a row: before a text, between it and its pair, and after both.

    Attributes:
        before, between, after: the ids of the special tokens.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def size(self, pair: bool) -> int:
        """The number of special tokens in a row, of one text or of a pair."""
        return len(self.before) + len(self.after) + (len(self.between) if pair else 0)

    def fill(
        self, first: list[list[int]], second: list[list[int]] | None, limit: int | None, side: str
    ) -> list[list[int]]:
        """Puts the special tokens around rows of ids.

        Of a pair, the longer text is truncated first, then both to the same length. If the number of tokens is odd, the
        longer text keeps one more, or the second one if they are equally long.

        Args:
            first: B lists of ids.
            second: B lists of ids, or None.
            limit: the largest number of tokens in a row, or None.
            side: "right" or "left", the side on which a text is truncated.

        Returns:
            B lists of ids.
        """
        rows = []
        for a, b in zip(first, [None] * len(first) if second is None else second, strict=True):
            if limit is not None:
                room, n, m = limit - self.size(b is not None), len(a), len(b or ())
                if b is not None:
                    b = _cut(b, min(m, max(room - n, (room + (n <= m)) // 2)), side)
                    room = max(room - m, (room + (n > m)) // 2)
                a = _cut(a, min(n, room), side)
            rows.append([*self.before, *a, *(() if b is None else (*self.between, *b)), *self.after])
        return rows

    def fill_ragged(self, first: Tensor, second: Tensor | None, limit: int | None, side: str) -> Tensor:
        """Does the same for ragged int32 (B, None) in a graph."""
        n = first.row_lengths()
        if limit is not None:
            room = tf.constant(limit - self.size(second is not None), n.dtype)
            if second is not None:
                m = second.row_lengths()
                second_room = tf.maximum(room - n, (room + tf.cast(n <= m, n.dtype)) // 2)
                room = tf.maximum(room - m, (room + tf.cast(n > m, n.dtype)) // 2)
                second = _cut_ragged(second, tf.minimum(m, second_room), side)
            first = _cut_ragged(first, tf.minimum(n, room), side)
        count = first.nrows(out_type=tf.int32)

        def columns(ids: tuple[int, ...]) -> list[Tensor]:
            return [tf.tile([ids], [count, 1])] if ids else []

        parts = [*columns(self.before), first]
        if second is not None:
            parts += [*columns(self.between), second]
        return tf.concat(parts + columns(self.after), axis=1)


def _cut(row: list[int], length: int, side: str) -> list[int]:
    return row[:length] if side == "right" else row[len(row) - length :]


def _cut_ragged(ragged: Tensor, lengths: Tensor, side: str) -> Tensor:
    starts = ragged.row_starts() if side == "right" else ragged.row_limits() - lengths
    return tf.gather(ragged.values, tf.ragged.range(starts, starts + lengths))
