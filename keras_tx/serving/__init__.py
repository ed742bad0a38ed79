from keras_tx.serving.check import Report, check
from keras_tx.serving.export import export

__all__ = ["Report", "check", "export"]
