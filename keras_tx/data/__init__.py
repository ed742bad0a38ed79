from keras_tx.data.buckets import bucket_by_length
from keras_tx.data.datasets import TextDataset, load_dataset

__all__ = ["TextDataset", "bucket_by_length", "load_dataset"]
