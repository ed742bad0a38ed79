"""Lets --resume continue only the run that it means: one with the same data and options."""

import hashlib
import json
import os


def check(parser, folder, arguments, is_chief, texts, **options):
    """Ends the program if the run in `folder` had other texts or options; notes those of this run there.

    A backup fits every model with the same shapes. So without this check the weights of one text could be continued,
    and exported, with the vocabulary of another.
    """
    digest = hashlib.sha256()
    for one in texts:
        digest.update(one.encode() + b"\0")
    settings, path = {"texts": digest.hexdigest(), **options}, os.path.join(folder, "run.json")
    if arguments.resume and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = json.load(file)
        different = [name for name, value in settings.items() if before.get(name) != value]
        if different:
            parser.error(
                f"--resume continues a run with the same data and options. The run in {folder} had other "
                f"{', '.join(different)}: leave --resume out to begin anew, or choose another --out"
            )
    if is_chief:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(settings, file)
