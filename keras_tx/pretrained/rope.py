"""Rotary embeddings in the words of config.json -> `RotaryEmbedding`.

transformers 5 writes all in `rope_parameters`, 4 wrote `rope_theta` and, beside it, `rope_scaling`.
"""

from typing import Any

from keras_tx.layers import RotaryEmbedding
from keras_tx.pretrained.config import Config

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def parameters_of(config: Config, *, theta: float = 10000.0) -> dict:
    """What the config says, as transformers 5 has it: a dict with `rope_type` and `rope_theta`.

    Args:
        config: a `Config`.
        theta: where the config has none.

    Raises:
        ValueError: for parameters that are no dict.
    """
    for name in ("rope_scaling", "rope_parameters"):  # in the order in which transformers takes them
        given = config.take(name, default=None)
        if given:
            break
    return completed(as_dict(name, given), theta=config.take("rope_theta", default=theta))


def as_dict(name: str, given: Any) -> dict:
    """`given`, or an empty dict for None.

    Raises:
        ValueError: for anything else that is no dict.
    """
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"`{name}` in config.json must be a dict. Received: {name}={given!r}")
    return given


def completed(given: dict, *, theta: float) -> dict:
    """`given` with `rope_type` and `rope_theta`; "type" is the older name of the first."""
    rest = {name: value for name, value in given.items() if name not in ("type", "rope_type", "rope_theta")}
    kind = given.get("rope_type") or given.get("type") or "default"
    base = given.get("rope_theta")
    return {"rope_type": kind, "rope_theta": theta if base is None else base, **rest}


def rotary(config: Config, parameters: dict) -> RotaryEmbedding:
    """The layer of `parameters_of`, with the lengths that transformers takes from elsewhere in the config.

    Raises:
        ValueError: for a type that is not supported, or parameters that it does not have or must have.
    """
    kind, original = parameters["rope_type"], "original_max_position_embeddings"
    if kind not in KINDS:
        raise ValueError(f"`rope_type` in config.json must be one of {list(KINDS)}. Received: rope_type={kind!r}")
    config.refuse("partial_rotary_factor", 1)  # these families rotate whole heads
    scaling = {name: value for name, value in parameters.items() if name != "finetuned"}  # a remark in old files
    if kind in ("default", "linear"):  # transformers reads no length for these, and some files have one
        scaling.pop(original, None)
    elif kind == "dynamic":  # the length in the parameters is not read
        scaling[original] = config.take("max_position_embeddings")
    elif kind in ("yarn", "llama3"):
        own = scaling.get(original)
        own = config.take("max_position_embeddings") if own is None else own
        scaling[original] = config.take(original, default=own)
    if kind == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = config.take("max_position_embeddings") / scaling[original]
    try:
        return RotaryEmbedding(base=parameters["rope_theta"], scaling=scaling, name="rotary")
    except ValueError as error:
        raise ValueError(
            f"`rope_parameters` in config.json must be of a kind that can be loaded: {error}. Received: {parameters}"
        ) from error


def both_spellings(parameters: dict) -> dict:
    """`parameters_of` -> what versions 4 and 5 of transformers read."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }
