import keras
import pytest

from tests.generation import built
from tests.tools import randomize


@pytest.fixture(scope="module")
def lm(request):
    """A language model of `built`, by default "causal_lm", otherwise the one that a file of tests calls `LM`."""
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    return built.made(getattr(request.module, "LM", "causal_lm"))


@pytest.fixture(scope="module")
def translator():
    keras.utils.set_random_seed(7)
    return randomize(built.translator(tie_embeddings=False), scale=0.4)


@pytest.fixture(scope="module")
def draft_model():
    keras.utils.set_random_seed(9)
    return built.made("untied")
