"""Lets TensorFlow create the variables of this process without their names for debugging.

The name is an attribute of the operation that creates a variable, and TensorFlow makes a kernel for each new attribute:
ten times as long as to create the variable. Tests create thousands of models.
"""

import inspect


def set_up():
    """Changes all variables that are created from now on. They keep their names and paths."""
    from tensorflow.python.ops import gen_resource_variable_ops as operations

    create = operations.var_handle_op
    assert "debug_name" in inspect.signature(create).parameters, "TensorFlow creates variables in another way"

    def without_debug_name(*arguments, debug_name="", **options):
        return create(*arguments, **options)

    operations.var_handle_op = without_debug_name
