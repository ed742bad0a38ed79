"""Makes the pictures of the site: `python docs/make_pictures.py` writes docs/images, in about five minutes.

- A picture that a block of a page writes comes from running that page.
- `attention.png` is the one that `examples/translate.py` draws.
- `serve.png` is the page of `keras_tx.serving.serve` for the export of examples/classify.py, in chromium.
- `terminal.svg` is what `examples/classify.py` prints, without the table of layers and all epochs but the last.
"""

import io
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from pathlib import Path

import blocks
import keras
import rich.console
import rich.terminal_theme
import rich.text

from keras_tx.serving import serve

IMAGES = blocks.DOCS / "images"
EXAMPLES = {"attention.png": "examples/translate.py", "terminal.svg": "examples/classify.py"}
BROWSED = {"serve.png": ("examples/classify.py", "It is not a masterpiece, but I was moved.", "900,1000")}
WIDTH = 120
KEPT = re.compile(r"sample:|vocabulary:|Epoch|.*val_accuracy|test accuracy|saved_models/\w+/\d+:|.*[01]\.\d{3}  ")
# rich's own frame, without its fonts, which a browser would load from another server.
FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", rich.console.CONSOLE_SVG_FORMAT, flags=re.S)


def pictures(page):
    """The names of the pictures that a page shows, and of those that its own blocks write."""
    shown = set(re.findall(r"\]\((?:\.\./)*(?:docs/)?images/([\w.]+)\)", page.read_text(encoding="utf-8")))
    written = {name for name in shown if any(f'"{name}"' in block.code for block in blocks.blocks(page))}
    return shown, written


def from_pages():
    for page in blocks.pages():
        written = pictures(page)[1]
        if written:
            print(page, flush=True)
            keras.utils.set_random_seed(7)
            with tempfile.TemporaryDirectory() as folder:
                blocks.run(page, folder)
                for name in written:
                    (IMAGES / name).write_bytes((Path(folder) / name).read_bytes())


def from_examples():
    for name, example in EXAMPLES.items():
        print(example, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(blocks.ROOT / example)]
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
            if name.endswith(".svg"):
                (IMAGES / name).write_text(terminal(example, done.stdout), encoding="utf-8")
            else:
                (IMAGES / name).write_bytes(next(Path(folder).rglob(name)).read_bytes())


def from_browser():
    for name, (example, text, size) in BROWSED.items():
        print(example, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(blocks.ROOT / example)]
            subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
            (model,) = Path(folder).rglob("saved_model.pb")
            with serve.Server(model.parents[1], model_name="reviews") as server:
                server.load()
                threading.Thread(target=server.serve_forever, daemon=True).start()
                page = f"http://127.0.0.1:{server.server_port}/?text={urllib.parse.quote(text)}"
                options = "--headless --no-sandbox --disable-gpu --disable-background-networking".split()
                options += [f"--window-size={size}", "--virtual-time-budget=10000", f"--screenshot={IMAGES / name}"]
                subprocess.run(["chromium", *options, page], check=True)
                server.shutdown()


def terminal(example, printed):
    """A picture of a terminal with the command and what it printed."""
    console = rich.console.Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(rich.text.Text(f"$ python {example}", style="bold"))
    lines, left_out = printed.splitlines(), False
    last_epoch = max(index for index, line in enumerate(lines) if line.startswith("Epoch"))
    for index, line in enumerate(lines):
        line = rich.text.Text.from_ansi(re.split("[\r\b]+", line)[-1])  # what a progress bar shows at last
        is_earlier = index < last_epoch and ("Epoch" in line.plain or "val_accuracy" in line.plain)
        is_kept = KEPT.match(line.plain) and not is_earlier
        if is_kept:
            line.truncate(WIDTH)
            console.print(line)
        elif not left_out and line.plain.strip():
            console.print("...")
        left_out = not is_kept
    return console.export_svg(title=example, theme=rich.terminal_theme.MONOKAI, code_format=FRAME)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    from_pages()
    from_examples()
    from_browser()
