from keras_tx.generation.beam import Beam
from keras_tx.generation.generate import generate, stream
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.sample import Sample
from keras_tx.generation.speculative import Speculative
from keras_tx.generation.strategy import Strategy

__all__ = ["Beam", "Greedy", "Sample", "Speculative", "Strategy", "generate", "stream"]
