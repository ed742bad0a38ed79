"""Checks generation_config.json, and translates it into keyword arguments of `keras_tx.generation.generate`."""

import math
import reprlib
from collections.abc import Callable
from typing import Any

LARGEST = 2**31 - 1  # ids and lengths are 32-bit integers

# Settings that would change the generated text and are not supported, with the values that switch them off.
_UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "forced_decoder_ids": (),
    "begin_suppress_tokens": ([],),
    "guidance_scale": (1,),
    "stop_strings": ([],),
    "dola_layers": (),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
    "top_h": (),
}


def _is_integer(value: Any, least: int = -LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 1e38 and least <= value <= most


def _are_integers(value: Any, least: int = -LARGEST) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_integer(one, least) for one in value)


Rule = tuple[str, Callable[[Any], bool]]
_FLAG: Rule = ("true or false", lambda value: isinstance(value, bool))
_COUNT: Rule = (f"a positive integer, at most {LARGEST}", lambda value: _is_integer(value, 1))
_COUNT_OR_ZERO: Rule = (f"a non-negative integer, at most {LARGEST}", lambda value: _is_integer(value, 0))
_FRACTION: Rule = ("a number from 0 to 1", lambda value: _is_number(value, 0, 1))
_ID: Rule = ("an id, an integer of 32 bits", _is_integer)
_RULES: dict[str, Rule] = {
    "do_sample": _FLAG,
    "num_beams": _COUNT,
    "num_return_sequences": _COUNT,
    "length_penalty": ("a finite number", _is_number),
    "early_stopping": ("true, false or 'never'", lambda value: isinstance(value, bool) or value == "never"),
    "temperature": ("a non-negative number", lambda value: _is_number(value, 0)),
    "top_k": _COUNT_OR_ZERO,
    "top_p": _FRACTION,
    "min_p": _FRACTION,
    "typical_p": _FRACTION,
    "epsilon_cutoff": _FRACTION,
    "eta_cutoff": _FRACTION,
    "max_length": _COUNT,
    "max_new_tokens": _COUNT,
    "min_length": _COUNT_OR_ZERO,
    "min_new_tokens": _COUNT_OR_ZERO,
    "repetition_penalty": ("a positive number", lambda value: _is_number(value, 0) and value > 0),
    "no_repeat_ngram_size": _COUNT_OR_ZERO,
    "renormalize_logits": _FLAG,
    "bos_token_id": _ID,
    "pad_token_id": _ID,
    "decoder_start_token_id": _ID,
    "eos_token_id": ("an id or a list of ids", lambda value: _is_integer(value) or _are_integers(value)),
    "forced_bos_token_id": _COUNT_OR_ZERO,
    "forced_eos_token_id": (
        "a non-negative id or a list of such ids",
        lambda value: _is_integer(value, 0) or _are_integers(value, 0),
    ),
    "force_bos_token_to_be_generated": _FLAG,
    "bad_words_ids": (
        "a list of lists of non-negative ids",
        lambda value: isinstance(value, list) and all(_are_integers(one, 0) for one in value),
    ),
    "suppress_tokens": ("a list of non-negative ids", lambda value: value == [] or _are_integers(value, 0)),
}
_POSITIVE: Rule = ("a positive number, with `do_sample`", lambda value: value > 0)
_IN_SAMPLING: dict[str, Rule] = {"temperature": _POSITIVE, "top_p": _POSITIVE}
DEFAULT_LENGTH = 20  # new tokens, as in transformers


def check(values: dict[str, Any], where: str) -> None:
    """Checks the type and the range of every setting that is used; null is like a missing key.

    Args:
        values: the settings.
        where: the file, for the error.

    Raises:
        ValueError: a setting is wrong; the message has the file, the key, the rule and the value.
    """
    rules = [*_RULES.items(), *(_IN_SAMPLING.items() if values.get("do_sample") is True else ())]
    for name, (rule, holds) in rules:
        value = values.get(name)
        if value is not None and not holds(value):
            raise ValueError(f"`{name}` in {where} must be {rule}. Received: {name}={reprlib.repr(value)}")


def generate_options(values: dict[str, Any], begins_with: int = 1) -> dict[str, Any]:
    """The keyword arguments of `generate` for a target.

    Lengths in the file count the tokens that the target begins with; those of `generate` do not. As in transformers,
    the first new token is forced only after the start token.

    Args:
        values: the settings.
        begins_with: the number of tokens that the target begins with: 1 if it is the start token alone.

    Raises:
        ValueError: a setting would change the generated text and is not supported; the message names it.
    """
    for name, off in _UNSUPPORTED.items():
        if values.get(name) is not None and values[name] not in off:
            raise ValueError(
                f"`{name}` of the generation config must be None, because it is not supported. To generate without it, "
                f"change `model.generation_config`. Received: {name}={values[name]!r:.200}"
            )
    stop_tokens = _listed(values.get("eos_token_id"))
    start = values.get("decoder_start_token_id")
    length = values.get("max_new_tokens") or (values.get("max_length") or begins_with + DEFAULT_LENGTH) - begins_with
    least = max(values.get("min_new_tokens") or 0, (values.get("min_length") or 0) - begins_with)
    forced = {}
    if begins_with > 1:
        pass
    elif values.get("forced_bos_token_id") is not None:
        forced[0] = values["forced_bos_token_id"]
    elif values.get("force_bos_token_to_be_generated") and values.get("bos_token_id") is not None:
        forced[0] = values["bos_token_id"]  # in config.json of older summarization models
    if values.get("forced_eos_token_id") is not None:
        # Of several, transformers gives all the same score, so that the lowest id is chosen.
        forced[-1] = min(_listed(values["forced_eos_token_id"]))
    bad = [row for row in values.get("bad_words_ids") or [] if row not in [[token] for token in stop_tokens]]
    found = {
        "start_token": values.get("bos_token_id") if start is None else start,
        "stop_tokens": tuple(stop_tokens),
        "max_new_tokens": max(length, 1),
        "min_new_tokens": least,
        "repetition_penalty": values.get("repetition_penalty"),
        "no_repeat_ngram_size": values.get("no_repeat_ngram_size"),
        "renormalize_logits": values.get("renormalize_logits"),
        "forbidden_tokens": [*bad, *([token] for token in values.get("suppress_tokens") or [])],
        "forced_tokens": forced,
    }
    return {name: value for name, value in found.items() if value or value == 0}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
