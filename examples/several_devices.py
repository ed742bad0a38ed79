"""Starts what the options of device_options.py ask for."""

import contextlib

import keras
import tensorflow as tf

from keras_tx import distribution


def start(arguments):
    """Starts a strategy or distribution; returns the scope in which the model is made, and whether this is the chief.

    Of several machines, the chief alone prints and writes files.
    """
    if arguments.mesh:
        devices = keras.distribution.DeviceMesh(arguments.mesh, ("batch", "model"))
        layout = distribution.get_layout_map(devices)
        keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout))
        return contextlib.nullcontext(), True
    if arguments.strategy == "multi_worker":
        strategy = distribution.multi_worker_strategy()
        cluster = strategy.cluster_resolver
        chief = "chief" if "chief" in cluster.cluster_spec().jobs else "worker"  # the first worker, if there is none
        return strategy.scope(), (cluster.task_type, cluster.task_id) == (chief, 0)
    if arguments.strategy == "mirrored":
        return distribution.mirrored_strategy(_cpu_devices(arguments.cpu_devices)).scope(), True
    return contextlib.nullcontext(), True


def _cpu_devices(count):
    if not count:
        return None
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return [f"CPU:{i}" for i in range(count)]
