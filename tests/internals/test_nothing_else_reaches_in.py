"""Only the modules of `keras_tx/internals` use private parts of Keras and TensorFlow, and each of them is tested."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import keras
import pytest

import keras_tx
from keras_tx.internals import keras_models
from tests.internals.doors import (
    BATCHES,
    GRAPHS,
    JAX_STEPS,
    LIBRARY,
    LORA,
    MODELS,
    OPTIMIZERS,
    PACKAGE,
    REPLICAS,
    SCALES,
    TORCH,
    TRAINING,
    still,
)

DOORS = (MODELS, LORA, TRAINING, JAX_STEPS, OPTIMIZERS, REPLICAS, SCALES, BATCHES, GRAPHS, TORCH, LIBRARY)
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in DOORS]
NAMES = {  # private names that only a door may contain, even in a comment
    *"_flatten_layers _keras_history _inbound_nodes _outbound_nodes _nodes_by_depth _functional _inputs_struct".split(),
    *"_convert_input_args _call_signature _initial_epoch _initializer _dtype_policy _kernel _embeddings".split(),
    *"_initial_seed _compile_loss _compile_metrics _loss_tracker _user_loss_weights _keras_mask".split(),
    *"_aggregate_additional_loss _should_use_adamw _muon_update_step _get_variable_index _XlaMustCompile".split(),
    *"_create_op_internal _get_kernel_with_merged_lora _get_embeddings_with_merged_lora".split(),
}
WORDS = re.compile(
    rf"(?<!\w)({'|'.join(sorted(NAMES))})(?!\w)|keras\.src|tensorflow\.python|tensorflow_text\.python|"
    r"(jax|torch|numpy)\._\w|_ZN\d|libtensorflow|tf_keras"
)
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Names that Keras has too, but not the objects of keras_tx from which they are read; and those of named tuples.
MEANT = {"_dropout_layer", "_replace", "_asdict", "_fields", "_make"}
READS = {"getattr", "hasattr", "setattr", "delattr", "__setattr__", "__getattribute__", "attrgetter", "get", "pop"}
CLASS_NAMES_OF_OTHERS = {"BPE", "PanicException"}  # of the `tokenizers` library
BY_NAME = {"serving/other_backends.py"}  # errors and strategies go to another process as JSON


def test_a_change_of_keras_is_told_with_its_version():
    expected = re.escape(f"Keras {keras.__version__} no longer sings: update keras_tx/internals/keras_models.py")
    with pytest.raises(AssertionError, match=expected), still("sings"):
        raise AttributeError("song")


@pytest.mark.parametrize(
    "door",
    [MODELS, LORA, TRAINING, JAX_STEPS, OPTIMIZERS, REPLICAS, SCALES, BATCHES, GRAPHS, TORCH],
    ids=lambda door: door.stem,
)
def test_each_function_is_documented_and_tested(door):
    module = importlib.import_module(f"keras_tx.internals.{door.stem}")
    tests = (Path(__file__).parent / f"test_{door.name}").read_text()
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_"):
            assert thing.__doc__ and len(thing.__doc__.split()) > 5, name
            assert name == "Call" or f"{door.stem}.{name}" in tests, name


def is_private(name):
    return bool(PRIVATE.fullmatch(name)) and not name.startswith("__")


@functools.cache
def private_names_in(cls):
    """The private attributes in the code of one class."""
    try:
        return set(re.findall(r"(?:self\.|cls\.|def |^    )(_[A-Za-z]\w*)", inspect.getsource(cls), re.M))
    except (OSError, TypeError):  # a class that is not written in Python
        return set()


@pytest.fixture(scope="module")
def names_of_keras():
    """Every private attribute that occurs in Keras' own code."""
    folder, names = Path(keras.__file__).parent / "src", set()
    for path in folder.rglob("*.py"):
        if not path.name.endswith("_test.py"):
            names.update(re.findall(r"(?:\.|def |^    )(_[A-Za-z]\w*)", path.read_text(), re.M))
    assert len(NAMES - names) <= 5, "NAMES"
    return names


@pytest.fixture(scope="module")
def names_of_keras_tx():
    """Every private attribute that classes of keras_tx give to their objects."""
    names = set()
    for path in FILES:
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.Call) and ast.unparse(cls.func) == "object.__setattr__":
                names.update(one.value for one in cls.args if isinstance(one, ast.Constant))
            for node in ast.walk(cls) if isinstance(cls, ast.ClassDef) else ():
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names


def private_names_read(tree):
    """(object, name, line) of every private attribute that is read, written or named in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr, node.lineno
        strings, holder = [], ""
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in READS:
            strings, holder = node.args, ast.unparse(node.args[0]) if node.args else ""
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            strings = [node.left]
        elif isinstance(node, ast.Subscript):
            strings = [node.slice]
        for one in strings:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                for part in one.value.split("."):
                    if is_private(part):
                        yield holder, part, node.lineno


def class_names_compared(tree):
    """Lines where the name or module of a class decides something, beside those of keras_tx's own modules."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (*READS, "startswith", "endswith"):
            parts = [node.func, *node.args]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        found = [one for part in parts for one in ast.walk(part)]
        asked = {one.attr for one in found if isinstance(one, ast.Attribute)}
        asked |= {one.value for one in found if isinstance(one, ast.Constant)}
        if not asked & {"__name__", "__qualname__", "__module__"}:
            continue
        words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        if not words & CLASS_NAMES_OF_OTHERS and "keras_tx." not in words and "__main__" not in words:
            yield node.lineno, ast.unparse(node)


def test_no_other_file_names_a_private_part():
    found = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := WORDS.search(line):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {match[0]}")
    assert not found, f"only keras_tx/internals may use these: {found}"


def test_no_other_file_reads_private_attributes_of_others(names_of_keras, names_of_keras_tx):
    found = []
    for path in FILES:
        for holder, name, line in private_names_read(ast.parse(path.read_text())):
            own = name in names_of_keras_tx and name not in names_of_keras
            if holder not in ("self", "cls", "super()") and name not in MEANT and not own:
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {holder}.{name}")
    assert not found, f"only keras_tx/internals may read private attributes of other libraries: {found}"


def private_names_of(cls):
    """The private attributes in the code of the Keras classes that a class is made from."""
    return set().union(*[private_names_in(base) for base in cls.__mro__ if keras_models.is_of_keras(base)])


def test_no_other_class_uses_or_overrides_private_attributes_of_its_keras_base(names_of_keras):
    found = []
    for path in FILES:
        if path.parent.name == "check":  # scripts without Keras
            continue
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            of_bases = private_names_of(getattr(module, cls.name)) if cls in tree.body else names_of_keras
            for node in ast.walk(cls):
                used = ""
                if isinstance(node, ast.FunctionDef):
                    used = node.name
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
                    used = node.attr
                if is_private(used) and used in of_bases:
                    found.append(f"{path.name}: {cls.name}.{used}")
    assert not found, f"only keras_tx/internals may use the private parts of Keras' classes: {found}"


def test_no_other_file_decides_by_the_name_of_a_class():
    found = []
    for path in [one for one in FILES if one.relative_to(PACKAGE).as_posix() not in BY_NAME]:
        found += [f"{path.name}:{line}: {code}" for line, code in class_names_compared(ast.parse(path.read_text()))]
    assert not found, f"a class is known by `isinstance`, in keras_tx/internals if it must be by its name: {found}"


REACHING = {
    "words": ["from keras.src import ops", "import tensorflow.python.eager", "x = layer._kernel  # a comment"],
    "reads": [
        "layer._flatten_layers()", "getattr(x, '_keras_history')", "y = vars(x)['_layers']", "'_layers' in vars(x)",
        "operator.attrgetter('a._kernel')(x)", "vars(x).get('_layers')", "model._tracker.x", "x._layers = 3",
    ],
    "names": [
        "type(x).__name__ == 'Dense'", "{'Dense': 1}.get(type(x).__name__)", "TABLE[type(x).__name__]",
        "type(x).__name__ in NAMES", "x.__class__.__name__ != 'A'", "type(x).__module__.startswith('keras.')",
        "getattr(f, '__module__', '').startswith('keras.')", "type(x).__qualname__.endswith('Add')",
    ],
}  # fmt: skip


def test_these_tests_see_what_reaches_in(names_of_keras, names_of_keras_tx):
    for line in REACHING["words"]:
        assert WORDS.search(line), line
    for line in REACHING["reads"]:
        read = [name for _, name, _ in private_names_read(ast.parse(line))]
        assert any(name not in names_of_keras_tx or name in names_of_keras for name in read), line
    for line in REACHING["names"]:
        assert list(class_names_compared(ast.parse(line))), line
    assert {"_tracker", "_flatten_layers", "_call_signature"} <= private_names_of(keras_tx.layers.Encoder)
    assert "_compile_loss" in private_names_of(keras_tx.models.CausalLM)
    assert len(names_of_keras) > 500 and len(names_of_keras_tx) > 100
    assert {"_layers", "_tracker", "_kernel", "_keras_history"} <= names_of_keras
