"""Rows of ids -> rows with special tokens: before A (between B) after, cut to a length; as lists and in the graph."""

from dataclasses import dataclass

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


@dataclass(frozen=True)
class Template:
    """The ids that stand before a row, between it and its pair, and after both."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def size(self, pair: bool) -> int:
        """How many ids it adds."""
        return len(self.before) + len(self.after) + (len(self.between) if pair else 0)

    def fill(self, first: list, second: list | None, limit: int | None, side: str) -> list[list[int]]:
        """Lists of B rows each -> B rows of at most `limit` ids, cut on `side`; the longer half is cut first."""
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

    def fill_ragged(self, first, second, limit: int | None, side: str):
        """The same for ragged int32 (B, None) in the graph."""
        n = first.row_lengths()
        if limit is not None:
            room = tf.constant(limit - self.size(second is not None), n.dtype)
            if second is not None:
                m = second.row_lengths()
                second_room = tf.maximum(room - n, (room + tf.cast(n <= m, n.dtype)) // 2)
                room = tf.maximum(room - m, (room + tf.cast(n > m, n.dtype)) // 2)
                second = _cut_ragged(second, tf.minimum(m, second_room), side)
            first = _cut_ragged(first, tf.minimum(n, room), side)
        parts = (
            [self.before, first, self.after]
            if second is None
            else [self.before, first, self.between, second, self.after]
        )
        count = first.nrows(out_type=tf.int32)
        columns = [
            tf.tile([part], [count, 1]) if type(part) is tuple else part
            for part in parts
            if type(part) is not tuple or part
        ]
        return tf.concat(columns, axis=1)


def _cut(row: list, kept: int, side: str) -> list:
    return row[:kept] if side == "right" else row[len(row) - kept :]


def _cut_ragged(ragged, kept, side: str):
    starts = ragged.row_starts() if side == "right" else ragged.row_limits() - kept
    return tf.gather(ragged.values, tf.ragged.range(starts, starts + kept))
