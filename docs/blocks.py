"""The code blocks of the pages: which there are, whether they run, and whether they print what the page says.

The blocks of a page run from top to bottom in one namespace and one empty folder:

- A block marked `python` runs. The block marked `text` right after it is what it prints, where `...` stands for any
  characters. A block that prints and has no such block after it is an error. With `title="for example"` only the
  number of its lines is compared: it shows what one run printed, where runs differ.
- A block with `title="NAME"` is written to the file NAME. If it is Python, it also runs, as a script.
- A block marked `bash` is not run: its programs, scripts, modules, extras and options must exist.
- A block after a line that begins with "Not run here" does not run; that line tells the reader why.
- A page whose front matter has `continues: PAGE` runs after PAGE, in the same namespace and folder.
- A page whose front matter has `backend: NAME` runs on this backend of Keras, the others on TensorFlow.
- A page whose front matter has `needs: PACKAGE` needs a package that is not in the extra `all`.
"""

import ast
import contextlib
import dataclasses
import difflib
import doctest
import io
import linecache
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EXAMPLE = "for example"
NOT_RUN = "Not run here"
FENCE = re.compile(r"^( *)```(\w*)([^\n`]*)\n(.*?)^\1```[ \t]*$", re.M | re.S)
# Languages of blocks that are neither run nor looked at: what programs print, and files that are shown.
SHOWN = {"text", "json", "mermaid", "csv", "yaml", "ini", "toml", "pbtxt", "dockerfile", "html"}
# Programs outside this project that commands of the pages call, with the options that are used.
PROGRAMS = {
    "curl": {"-d", "-s"},
    "docker": {
        *("-p", "-v", "-e", "--rm", "--name"),
        *("--model_config_file", "--monitoring_config_file", "--enable_batching"),  # of TensorFlow Serving
        "--enable_per_model_batching_parameters",
    },
    "git": set(),
    "cd": set(),
    "export": set(),
    "tensorboard": {"--logdir"},
    "mkdocs": {"--strict"},
    "playwright": set(),
}


@dataclasses.dataclass
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    code: str
    reason: str | None  # why it does not run
    output: "Block | None" = None  # the block right after it, with what it prints

    @property
    def where(self):
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def pages():
    """The README and all pages of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def front_matter(page):
    """The values of the front matter of a page, strings by their names."""
    match = re.match(r"---\n(.*?)\n---\n", page.read_text(encoding="utf-8"), re.S)
    return dict(line.split(": ", 1) for line in match[1].splitlines()) if match else {}


def blocks(page):
    """The blocks of a page, in their order; a block of output belongs to the Python block before it."""
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for match in FENCE.finditer(text):
        indent, language, info, code = match.groups()
        title = re.search(r'title="([^"]+)"', info)
        between = text[end : match.start()].strip()
        last = between.splitlines()[-1].strip("* ") if between else ""
        code = re.sub(rf"^{indent}", "", code, flags=re.M)
        line = text.count("\n", 0, match.start()) + 1
        reason = last if last.startswith(NOT_RUN) else None
        block = Block(page, line, language, title[1] if title else None, code, reason)
        if language == "text" and found and found[-1].language == "python" and not between:
            found[-1].output = block
        else:
            found.append(block)
        end = match.end()
    return found


def chain(page):
    """The pages to run for a page: those that it continues, and the page itself."""
    before = front_matter(page).get("continues")
    return [*(chain(page.parent / before) if before else []), page]


def run(page, folder, each=None):
    """Runs the blocks of a page, and of those that it continues, in a folder; raises AssertionError for wrong output.

    Args:
        page: the path of the page.
        folder: an empty folder.
        each: a function that is called with each block and what it printed, instead of the comparison.
    """
    scope = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for one in chain(page):
            for block in blocks(one):
                if block.reason is not None:
                    continue
                if block.title is not None and block.language != "bash":
                    Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                    Path(block.title).write_text(block.code, encoding="utf-8")
                if block.language == "python":
                    printed = _printed(block, {"__name__": "__main__"} if block.title else scope)
                    (each or compare)(block, printed)


def _printed(block, scope):
    # `inspect` finds the source of functions, which TensorFlow compiles, where `linecache` has it.
    lines = ["\n"] * block.line + block.code.splitlines(keepends=True)  # numbered as in the page
    linecache.cache[block.where] = (0, None, lines, block.where)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("".join(lines), block.where, "exec"), scope)
    return out.getvalue()


def compare(block, printed):
    """Raises AssertionError if a block has printed something else than its page says."""
    expected = block.output.code if block.output else ""
    if block.output and block.output.title == EXAMPLE:
        if len(expected.splitlines()) != len(printed.splitlines()):
            raise AssertionError(f"{block.where} prints another number of lines than the page says:\n{printed}")
    elif not doctest.OutputChecker().check_output(expected, printed, FLAGS):
        lines = difflib.unified_diff(expected.splitlines(), printed.splitlines(), "the page", "the code", lineterm="")
        raise AssertionError(f"{block.where} prints something else than the page says:\n" + "\n".join(lines))


def wrong_commands(block, extras):
    """What does not exist of a block of shell commands: a sentence for each.

    Args:
        block: a block marked `bash`.
        extras: the names of the package's extras.
    """
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command = []
        for word in [*words, "&&"]:
            if word in ("&&", "|", "&"):
                yield from (f"{block.where}: {sentence}" for sentence in _wrong_command(command, extras))
                command = []
            else:
                command.append(word)


def _wrong_command(command, extras):
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]  # variables of the environment
    if not command:
        return
    program, arguments = command[0], command[1:]
    options = {word.split("=")[0] for word in arguments if re.match(r"--?[a-zA-Z]", word)}
    if program == "pip":
        for named in re.findall(r"\[(.*?)\]", " ".join(arguments)):
            yield from (f"there is no extra {name!r}" for name in named.split(",") if name not in extras)
    elif program == "python" and arguments[0] == "-m":
        yield from _wrong_options(_module(arguments[1]), options - {"-m"})
    elif program == "python":
        scripts = [ROOT / word for word in arguments if word.endswith(".py")]  # one may start another
        yield from _wrong_options(scripts[0], options - _options_of(scripts[1:]))
    elif program.startswith("scripts/"):
        yield from _wrong_options(ROOT / program, options)
    elif program in PROGRAMS:
        yield from (f"{program} has no option {option}" for option in sorted(options - PROGRAMS[program]))
    else:
        yield f"the program {program!r} is not known"


def _module(name):
    """The file that `python -m NAME` runs."""
    path = ROOT / name.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _wrong_options(path, options):
    """Options that a program of the project does not define, or that the file itself does not exist."""
    if not path.is_file():
        yield f"there is no file {path.relative_to(ROOT)}"
        return
    unknown = sorted(options - _options_of([path]) - {"--help"})
    yield from (f"{path.relative_to(ROOT)} has no option {option}" for option in unknown)


def _options_of(paths):
    """The options that programs define, or the files beside them that they import."""
    files = set(filter(Path.is_file, paths))
    for path in list(files):
        imported = re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.M)
        beside = [path.parent / f"{name}.py" for name in imported]
        files |= set(path.parent.glob("*.py") if path.name == "__main__.py" else filter(Path.is_file, beside))
    return {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-")
    }


def main():
    """Prints what each block of the given pages prints: `python docs/blocks.py docs/get-started.md`."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            begin = [time.process_time()]

            def show(block, printed, begin=begin):
                print(f"--- {block.where}, {time.process_time() - begin[0]:.1f} s\n{printed}", end="", flush=True)
                begin[0] = time.process_time()

            run(Path(name).resolve(), folder, show)


if __name__ == "__main__":
    main()
