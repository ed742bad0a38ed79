"""Which layers inside a layer or model are trainable, in its config. Keras would load all of them as trainable."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from keras_tx.internals.keras_models import direct_sublayers

# Of a config: {path of a layer: whether it is trainable}, of layers that differ in this from the layer around them.
KEY = "trainable_layers"


def config_of(layer: Any) -> dict[str, dict[str, bool]]:
    """The part of the config of `layer` that says which layers inside it are trainable; empty if all are as it is."""
    found = dict(_differences(layer, layer.trainable))
    return {KEY: found} if found else {}


def restore(layer: Any, trainable: Mapping[str, bool]) -> None:
    """Makes all variables of a built layer as trainable as it is, except those of the layers with these paths."""
    if not layer.trainable:
        layer.trainable = True  # on TensorFlow, to set what is set already changes nothing
        layer.trainable = False
    for path, value in trainable.items():
        found = layer
        for part in path.split("/"):
            found = next((one for one in direct_sublayers(found) if _name(found, one) == part), None)
            if found is None:
                warnings.warn(f"`{KEY}` names the layer {path!r}, which {layer.name!r} does not have.", stacklevel=2)
                break
        else:
            found.trainable = value


def _differences(layer: Any, inherited: bool, prefix: str = "") -> Iterator[tuple[str, bool]]:
    for one in direct_sublayers(layer):
        # What is saved of a layer with LoRA has none: its kernel, which was frozen, must not begin to learn.
        trainable = one.trainable and not getattr(one, "lora_enabled", False)
        path = f"{prefix}{_name(layer, one)}"
        if trainable != inherited:
            yield path, trainable
        yield from _differences(one, trainable, f"{path}/")


def _name(parent: Any, layer: Any) -> str:
    """The attribute of `parent` that is `layer`, with its place in a list; otherwise the name of the layer.

    Names that Keras gives to layers are different in another process.
    """
    named = dict(parent.named_children()) if hasattr(parent, "named_children") else {}  # of PyTorch
    for name, value in {**named, **vars(parent)}.items():
        if value is layer:
            return str(name)
        if isinstance(value, list) and not name.startswith("_"):
            for index, one in enumerate(value):
                if one is layer:
                    return f"{name}.{index}"
    return str(layer.name)
