from keras_tx.generation.beam import Beam
from keras_tx.generation.generate import generate, stream
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.sampling import Sample

__all__ = ["Beam", "Greedy", "Sample", "generate", "stream"]
