"""Translates generation_config.json into keyword arguments of `keras_tx.generation.generate`."""

from typing import Any

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
}
DEFAULT_LENGTH = 20  # new tokens, as in transformers


def generate_options(values: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for a target that begins with one start token.

    Lengths in the file count the start token; those of `generate` do not.

    Raises:
        ValueError: a setting would change the generated text and is not supported; the message names it.
    """
    for name, off in _UNSUPPORTED.items():
        if values.get(name) is not None and values[name] not in off:
            raise ValueError(
                f"`{name}` of the generation config must be None, because it is not supported. To generate without it, "
                f"change `model.generation_config`. Received: {name}={values[name]!r}"
            )
    stop_tokens = _listed(values.get("eos_token_id"))
    start = values.get("decoder_start_token_id")
    length = values.get("max_new_tokens") or (values.get("max_length") or 1 + DEFAULT_LENGTH) - 1
    least = max(values.get("min_new_tokens") or 0, (values.get("min_length") or 0) - 1)
    forced = {}
    if values.get("forced_bos_token_id") is not None:
        forced[0] = values["forced_bos_token_id"]
    elif values.get("force_bos_token_to_be_generated"):  # in config.json of older summarization models
        forced[0] = values.get("bos_token_id")
    if values.get("forced_eos_token_id") is not None:
        forced[-1] = _listed(values["forced_eos_token_id"])[0]
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
