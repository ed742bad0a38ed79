"""Lets --resume continue only the run that it means: one with the same data and options."""

import contextlib
import hashlib
import json
import os
import re

# What `training.Resume` writes. A part is from a process that was killed while it wrote.
OF_BACKUP = re.compile(r"(backup\.npz|worker-\d+\.txt)(-[0-9a-f]{16}\.part)?")


def begin(parser, folder, backup, arguments, is_chief, texts, **options):
    """Ends the program if --resume is given and the run in `folder` had other texts or options.

    Without --resume, removes the backup of an earlier run. Notes the texts and options of this run in `folder`. To be
    called when all arguments are known to be good.

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
    if not arguments.resume and os.path.isdir(backup):  # in every worker, which may have disks of their own
        for name in filter(OF_BACKUP.fullmatch, os.listdir(backup)):
            with contextlib.suppress(FileNotFoundError):  # workers may share a disk, too
                os.remove(os.path.join(backup, name))
    if is_chief:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(settings, file)
        os.replace(f"{path}.part", path)  # whoever is killed before leaves the old file
