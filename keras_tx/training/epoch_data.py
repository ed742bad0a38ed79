"""Data of `tf.data` that are made anew in each epoch, from its number."""

from collections.abc import Callable
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


class EpochData:
    """Datasets that read which epoch it is, when `fit` begins to read them."""

    def __init__(self) -> None:
        self._epoch: Any = None  # a tf.Variable, once there is a dataset that reads it
        # The epochs whose data were begun: a table and not one number, because a dataset that is read ahead may begin
        # an epoch while another one is still read.
        self._begun: Any = None

    @property
    def is_used(self) -> bool:
        return self._epoch is not None

    def begin(self, epoch: int) -> None:
        """Says which epoch it is."""
        if self.is_used:
            self._epoch.assign(epoch)

    def dataset(self, make: Callable[[Tensor], Any]) -> Any:
        """See `Resume.dataset`."""
        if not self.is_used:
            with tf.device("CPU:0"):
                self._epoch = tf.Variable(0, dtype="int64", trainable=False, name="epoch")
                self._begun = tf.lookup.experimental.MutableHashTable("int64", "int64", 0)
        first = make(tf.constant(0, "int64"))
        if not isinstance(first, tf.data.Dataset):
            raise TypeError(f"`make` must return a tf.data.Dataset. Received: {first!r}")
        count = first.cardinality()
        if count == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "`make` must return the data of one epoch, a finite dataset: leave `repeat()` out, or limit it with "
                "`take(number_of_batches)`. Received: a dataset without an end"
            )

        def begun(_: Tensor) -> Any:
            epoch = self._epoch.read_value()
            self._begun.insert(epoch, tf.ones_like(epoch))
            return epoch

        # `make` alone is the function of `flat_map`, so that AutoGraph converts it, as users expect there.
        dataset = tf.data.Dataset.range(1).map(begun).flat_map(make)
        # Those of a dataset within `flat_map` are lost, such as whether each worker has a part of the data already.
        dataset = dataset.with_options(first.options())
        return dataset if count < 0 else dataset.apply(tf.data.experimental.assert_cardinality(count))

    def check(self, epoch: int) -> None:
        """Raises an error if `fit` has not begun to read the data of this epoch, but goes on in those of another."""
        if self.is_used and int(self._begun.size()) and not self._begun.lookup(tf.constant(epoch, "int64")):
            raise ValueError(
                "Data from `Resume.dataset` must be read from their beginning in each epoch, as a `fit` that is "
                "started again does: do not pass `steps_per_epoch` to `fit`, and call `cache` and `repeat` within "
                f"`make` alone. Received: epoch {epoch + 1}, which goes on in the data of an earlier epoch"
            )
