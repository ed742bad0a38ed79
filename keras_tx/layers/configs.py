"""Sublayers in configs: layer -> dict."""

import keras


def serialized(value):
    """`value` (a layer, None, or what else a config holds) as Keras serializes it, whether built or not."""
    config = keras.saving.serialize_keras_object(value)
    return {key: part for key, part in config.items() if key != "build_config"} if isinstance(config, dict) else config
