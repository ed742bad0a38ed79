"""Generates 8,800 short film reviews, "negative" or "positive", in which the order of the words decides.

Most templates have one place for praise and one for blame, and show which of the two is the verdict. Filled in both
ways, they give two reviews with the same words and opposite labels, of which a model that counts words gets only one
right. The PLAIN reviews, one in three, only praise or only blame, so a model learns what each word means. Both reviews
of a pair are in the same part, and no review occurs twice.
"""

import random

LABELS = ("negative", "positive")
TRAIN_PAIRS, TEST_PAIRS = 4000, 400

PLAIN_SHARE = 0.35
PLAIN = (
    ("The {part} is simply {x}.", "x"),
    ("The {part} was {x} and I left with the feeling of having seen {X}.", "x"),
    ("The {film} is {X}, and the {part} is {x}.", "x"),
    ("What can I say? It is {X}.", "x"),
    ("I thought the {part} and the {other} were {x}.", "x"),
    ("It has been a while since I sat through so {x} a {film}.", "x"),
    ("In two words: {x} {film}.", "x"),
    ("The {film} has a {x} {part}, which makes it {X}.", "x"),
    ("For me the {part} alone was {X}.", "x"),
    ("A {x} {film} with a {part} to match.", "x"),
)
# {x} and {y} are adjectives, {X} and {Y} noun phrases; the one named on the right carries the reviewer's verdict.
TEMPLATES = (
    ("The {part} was {x}, but the {other} was {y}.", "y"),
    ("The {film} is not {x} but {y}.", "y"),
    ("The {film} is {x}, not {y}.", "x"),
    ("Not {x}, as the poster says, but {y} from the opening scene to the last.", "y"),
    ("This {film} is far more {x} than {y}.", "x"),
    ("I found the {part} less {x} than {y}.", "y"),
    ("Not only is this {film} not {x}, it is {y}.", "y"),
    ("Not only is the {part} {x}, it never becomes {y}.", "x"),
    ("Although the {part} is {x}, the {film} as a whole is {y}.", "y"),
    ("The {film} as a whole is {x}, although the {part} is {y}.", "x"),
    ("The {film} is {x} despite the {y} {part}.", "x"),
    ("Despite the {x} {part}, this is {Y}.", "y"),
    ("Without the {x} {part}, the {film} would be {y}.", "x"),
    ("It would be {x}, were it not for the {y} {part}.", "y"),
    ("The {part} stopped being {x} after ten minutes and became {y}.", "y"),
    ("The {film} is always {x} and never {y}.", "x"),
    ("The {part} is never {x} and always {y}.", "y"),
    ("The {part} is anything but {x}: I would call it {y}.", "y"),
    ("My friends called the {part} {x}, yet to me it was {y}.", "y"),
    ("To me the {part} was {x}, even if my friends called it {y}.", "x"),
    ("I expected {X} and got {Y}.", "y"),
    ("I got {X} where I had expected {Y}.", "x"),
    ("The trailer promised {X}; what we saw was {Y}.", "y"),
    ("This is closer to {X} than to {Y}.", "x"),
    ("The {film} could have been {X} but ended up as {Y}.", "y"),
    ("Do not believe that this {film} is {X}, it is {Y}.", "y"),
    ("I would call it {X} rather than {Y}.", "x"),
    ("Instead of {X}, the director gives us {Y}.", "y"),
    ("The director gives us {X} instead of {Y}.", "x"),
)
ADJECTIVES = (
    "dull boring clumsy tedious lifeless shallow predictable messy bland forgettable silly hollow".split(),
    "wonderful moving brilliant gripping charming clever beautiful touching delightful superb thrilling warm".split(),
)
NOUNS = (
    ("a disaster", "a mess", "a chore", "a failure", "a letdown", "a waste of time", "a bore", "a mistake"),
    ("a masterpiece", "a joy", "a gem", "a triumph", "a delight", "a treat", "a work of art", "a pleasure"),
)
FILMS = "film movie picture drama thriller comedy sequel remake western musical".split()
PARTS = (
    "plot acting soundtrack script ending dialogue pacing direction editing lighting finale humour romance story cast"
).split() + ["camera work", "second half", "opening scene", "leading role"]
OPENINGS = (
    "Seen on Sunday.",
    "We had front seats.",
    "My sister picked this one.",
    "A short note.",
    "Two hours long.",
    "I knew nothing beforehand.",
    "I went twice.",
    "No spoilers here.",
    "Well, the queue was long.",
    "I read the book.",
)
CLOSINGS = (
    "That is all I can say.",
    "We talked about it on the way home.",
    "The credits are long, by the way.",
    "I will not give away more.",
    "My neighbour, who came along, said the same!",
    "You know which actor I mean.",
    "See for yourself on Friday.",
    "It plays until the end of the month.",
    "And yes, there is a scene after the credits.",
    "Need I say more?",
)


def reviews(seed: int = 0) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns (train, test): lists of (text, label). Half of the labels are 0, negative, and half 1, positive."""
    rng = random.Random(seed)
    pairs: list[list[tuple[str, int]]] = []
    seen: set[str] = set()
    while len(pairs) < TRAIN_PAIRS + TEST_PAIRS:
        pair = _pair(rng)
        if seen.isdisjoint(text for text, _ in pair):
            seen.update(text for text, _ in pair)
            pairs.append(pair)
    train = [review for pair in pairs[:TRAIN_PAIRS] for review in pair]
    test = [review for pair in pairs[TRAIN_PAIRS:] for review in pair]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def _pair(rng: random.Random) -> list[tuple[str, int]]:
    """Fills in one template twice: with blame for x and praise for y, and the other way round."""
    template, verdict = rng.choice(PLAIN if rng.random() < PLAIN_SHARE else TEMPLATES)
    part, other = rng.sample(PARTS, 2)
    common = {"film": rng.choice(FILMS), "part": part, "other": other}
    adjectives = [rng.choice(words) for words in ADJECTIVES]
    nouns = [rng.choice(words) for words in NOUNS]
    opening = rng.choice(OPENINGS) + " " if rng.random() < 0.3 else ""
    closing = " " + rng.choice(CLOSINGS) if rng.random() < 0.3 else ""
    pair = []
    for first in (0, 1):
        opinions = {"x": adjectives[first], "y": adjectives[1 - first], "X": nouns[first], "Y": nouns[1 - first]}
        text = opening + template.format(**common, **opinions) + closing
        pair.append((text, first if verdict == "x" else 1 - first))
    return pair
