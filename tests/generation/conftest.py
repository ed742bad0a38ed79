import keras
import pytest

from tests.generation import built
from tests.tools import randomize


@pytest.fixture(scope="module")
def lm():
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    return built.made("causal_lm")


@pytest.fixture(scope="module")
def translator():
    keras.utils.set_random_seed(7)
    return randomize(built.translator(tie_embeddings=False), scale=0.4)


@pytest.fixture(scope="module")
def draft_model():
    keras.utils.set_random_seed(9)
    return built.made("untied")
