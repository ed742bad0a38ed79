"""The one door to the private parts of Keras and TensorFlow.

keras_tx uses nothing that Keras and TensorFlow do not promise to keep, except here, with one function for each use:

- `keras_models`: functional models, layers, variables and masks,
- `keras_lora`: LoRA of dense layers and embeddings,
- `keras_training`: losses, metrics and data of `fit`, and what is built before its first step,
- `keras_jax_steps`: the steps of `fit` and `evaluate` on JAX,
- `keras_torch`: parameters and their gradients on PyTorch,
- `keras_optimizers`: optimizers, and how they update weights,
- `keras_replicas`: strategies of `tf.distribute`, and what is mended in Keras for them,
- `keras_loss_scales`: `LossScaleOptimizer`, and what is mended in it for such strategies,
- `keras_batches`: single batches under such strategies,
- `tensorflow_graphs`: graphs, and the ops of tensorflow_text.

`tests/internals` checks that nothing else does, and has a test for every function, which names the version and the file
to update when Keras or TensorFlow has changed. The private parts of TensorFlow's C++ library are in
`serving/check/tensorflow_internals.py`, because the process that uses them must run without Keras and keras_tx.
"""
