"""Tables of labelled messages to try examples on: `python -m tests.made_tables FOLDER` writes five.csv, twenty.csv."""

import csv
import random
import sys
from pathlib import Path

FILLERS = "please today again the my our with for and still really now just order team since".split()


def write(path, rows, classes, seed=0):
    """Writes a table whose labels are told by a few words of their own, among words that all labels share.

    One row in twelve has the word of another label too, so that a table can't be learnt from one word alone.
    """
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = iter(rng.sample([a + b + c for a in syllables[:30] for b in syllables for c in "mnrs"], 12 * classes))
    own = [[next(words) for _ in range(12)] for _ in range(classes)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["message", "team"])
        for number in range(rows):
            label = number % classes
            signs = rng.sample(own[label], 2) + ([rng.choice(rng.choice(own))] if rng.random() < 1 / 12 else [])
            message = rng.choices(FILLERS, k=rng.randint(4, 12)) + signs
            rng.shuffle(message)
            table.writerow([" ".join(message), f"team {label}"])
    return path


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "five.csv", 230, 5)
    write(folder / "twenty.csv", 20_000, 20)
