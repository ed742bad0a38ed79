"""Creates a `RotaryEmbedding` from the rotary parameters of config.json.

transformers 5 writes them all into `rope_parameters`; version 4 wrote `rope_theta` and `rope_scaling`.
"""

from typing import Any

from keras_tx import checks
from keras_tx.layers import RotaryEmbedding
from keras_tx.pretrained.config import Config

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


def parameters_of(config: Config, *, theta: float = 10000.0) -> dict[str, Any]:
    """The rotary parameters in the format of transformers 5: a dict with `rope_type`, `rope_theta` and others.

    Args:
        config: a `Config`.
        theta: the default of `rope_theta`.

    Raises:
        ValueError: the parameters are not a dict.
    """
    # transformers takes the first of these that is given. What `save_pretrained` writes has both.
    given = {name: config.take(name, default=None) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if given["rope_scaling"] else "rope_parameters"
    return completed(as_dict(name, given[name]), theta=config.take("rope_theta", default=theta))


def as_dict(name: str, given: Any) -> dict[str, Any]:
    """`given`, or an empty dict for None.

    Raises:
        ValueError: it is neither None nor a dict.
    """
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"`{name}` in config.json must be a dict. Received: {name}={given!r:.200}")
    return given


def completed(given: dict[str, Any], *, theta: float) -> dict[str, Any]:
    """`given` with defaults for `rope_type`, formerly called "type", and `rope_theta`."""
    rest = {name: value for name, value in given.items() if name not in ("type", "rope_type", "rope_theta")}
    kind = given.get("rope_type") or given.get("type") or "default"
    base = given.get("rope_theta")
    return {"rope_type": kind, "rope_theta": theta if base is None else base, **rest}


def rotary(config: Config, parameters: dict[str, Any]) -> RotaryEmbedding:
    """The layer for `parameters`, with the lengths that transformers takes from other keys of the config.

    Raises:
        ValueError: the type is not supported, or a parameter is unknown or missing.
    """
    kind, original = parameters["rope_type"], "original_max_position_embeddings"
    if kind not in KINDS:
        raise ValueError(f"`rope_type` in config.json must be one of {list(KINDS)}. Received: rope_type={kind!r:.200}")
    config.refuse("partial_rotary_factor", 1)  # these families rotate whole heads
    scaling = {
        name: value for name, value in parameters.items() if name != "finetuned"
    }  # a comment in old files, without effect
    if kind in ("default", "linear"):  # some files have a length that transformers does not read
        scaling.pop(original, None)
    elif kind == "dynamic":  # transformers does not read the length in the parameters
        scaling[original] = config.number("max_position_embeddings")
    elif kind in ("yarn", "llama3"):
        own = scaling.get(original)
        own = config.number("max_position_embeddings") if own is None else own
        scaling[original] = config.number(original, default=own)
    try:
        if kind == "yarn" and scaling.get("factor") is None:
            length = checks.positive_int(original, scaling[original])
            scaling["factor"] = config.number("max_position_embeddings") / length
        return RotaryEmbedding(base=parameters["rope_theta"], scaling=scaling, name="rotary")
    except ValueError as error:
        raise ValueError(f"`rope_parameters` in config.json cannot be used: {error}. Received: {parameters}") from error


def both_spellings(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters in the formats of both transformers 4 and 5."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }
