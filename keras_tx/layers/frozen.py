"""Which layers inside a layer or model are frozen, in its config. Keras would make them trainable when it loads one."""

from collections.abc import Iterable, Iterator
from typing import Any

from keras_tx.internals.keras_models import direct_sublayers

KEY = "frozen_layers"  # of a config


def config_of(layer: Any) -> dict[str, list[str]]:
    """The part of the config of `layer` that says which layers inside it are frozen; empty if none is."""
    names = list(_names_within(layer)) if layer.trainable else []
    return {KEY: names} if names else {}


def _names_within(layer: Any, prefix: str = "") -> Iterator[str]:
    for one in direct_sublayers(layer):
        if one.trainable:
            yield from _names_within(one, f"{prefix}{one.name}/")
        else:
            yield f"{prefix}{one.name}"


def freeze(layer: Any, names: Iterable[str] = ()) -> None:
    """Freezes all variables of a built layer whose `trainable` is False, and the layers inside it with these names."""
    if not layer.trainable:
        layer.trainable = True  # on TensorFlow, to set what is set already changes nothing
        layer.trainable = False
    for name in names:
        found = [layer]
        for part in name.split("/"):
            found = [one for parent in found for one in direct_sublayers(parent) if one.name == part]
        for one in found:
            one.trainable = False
