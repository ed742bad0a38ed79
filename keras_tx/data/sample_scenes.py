"""Generates 150,000 characters of short scenes, for language models over characters.

In each scene somebody has lost something and asks from door to door. Earlier text determines what follows: the person
who is addressed answers, names and "his" or "her" fit the person, "good evening" fits the hour and every excuse a
trade. The lost thing has the same name to the end, where a tale grows line by line and a couplet rhymes.
"""

import random

LENGTH = 150_000  # the last scene is complete, so there are some more characters

HIS, HER = ("he", "his"), ("she", "her")
# Person: pronouns and occupation.
PEOPLE = {
    "miller": (HIS, "grinding the corn"),
    "baker": (HIS, "baking the bread"),
    "widow": (HER, "mending a shirt"),
    "weaver": (HER, "working at the loom"),
    "smith": (HIS, "shoeing the mare"),
    "fisher": (HIS, "mending the nets"),
    "cook": (HER, "stirring the soup"),
    "sexton": (HIS, "ringing the bells"),
    "gardener": (HER, "watering the beans"),
    "shepherd": (HER, "counting the sheep"),
    "tailor": (HIS, "cutting a coat"),
    "teacher": (HER, "reading a letter"),
}
ANIMALS = "goose hen kid lamb calf pony duckling piglet puppy kitten".split()
COLOURS = "grey white black brown spotted little lazy hungry old clever".split()
HOURS = {"morning": "cold bright rainy", "evening": "windy quiet foggy", "afternoon": "hot sunny sleepy"}
# The place where it is found, and lines that rhyme with it.
PLACES = {
    "behind the mill": ("And all the town was dark and still.", "And now the moon is on the hill."),
    "under the bed": ("With nothing but straw to rest its head.", "As warm as a loaf of rye, they said."),
    "beside the well": ("And nobody heard the supper bell.", "And how it came there none can tell."),
    "on the wall": ("And never was it afraid to fall.", "And that, my dears, is nearly all."),
    "in the barn": ("Asleep on a heap of woollen yarn.",),
    "near the gate": ("And home they went, though it was late.", "With half an apple on a plate."),
    "by the stream": ("And fast asleep, as in a dream.", "As happy as a cat with cream."),
    "in the tree": ("As plain as ever a thing can be.", "Where all the world was there to see."),
}
DEEDS = "fed chased washed followed called caught kissed scolded".split()
GREETINGS = ("Good {hour}, {other}.", "A good {hour} to you, {other}!", "{Other}, good {hour}!")
QUESTIONS = ("Have you seen my {thing}?", "Did my {thing} come this way?", "Where is my {thing}? Do you know?")
NOES = ("No, {name}, I have not.", "Not I, {name}.", "Alas, no, {name}.")
EXCUSES = ("I was {busy} since noon.", "All day long I was {busy}.", "I was {busy} and saw nothing at all.")
ADVICE = ("Ask the {next}: {they} may know.", "Go to the {next}, and ask {next_of} children too.")
YESES = ("Yes, {name}, I have!", "But of course, {name}!", "I have indeed, {name}.")
NEWS = ("Your {thing} is {place}.", "The {thing} {place} must be yours.")
THANKS = ("Thank you, {other}! I will never lose my {thing} again.", "Bless you, {other}! Here is a penny for you.")


def scenes(seed: int = 0) -> str:
    """Returns one string of at least `LENGTH` characters."""
    rng = random.Random(seed)
    made: list[str] = []
    while sum(map(len, made)) < LENGTH:
        made.append(_scene(rng))
    return "".join(made)


def _scene(rng: random.Random) -> str:
    names = rng.sample(list(PEOPLE), rng.randint(3, 5))
    thing = f"{rng.choice(COLOURS)} {rng.choice(ANIMALS)}"
    hour, place = rng.choice(list(HOURS)), rng.choice(list(PLACES))
    name, asked = names[0], names[1:]
    they, of = PEOPLE[name][0]
    lines = [f"THE {name.upper()}'S {thing.upper()}"]
    lines.append(f"One {rng.choice(HOURS[hour].split())} {hour} the {name} could not find {of} {thing}.")
    for other, following in zip(asked, [*asked[1:], None], strict=True):
        words = {"name": name, "thing": thing, "hour": hour, "place": place, "other": other}
        words |= {"Other": other.capitalize(), "busy": PEOPLE[other][1]}
        lines.append(_spoken(rng, name, words, GREETINGS, QUESTIONS))
        if following:
            words |= {"next": following, "they": PEOPLE[following][0][0], "next_of": PEOPLE[following][0][1]}
            lines.append(_spoken(rng, other, words, NOES, EXCUSES, ADVICE))
        else:
            lines.append(_spoken(rng, other, words, YESES, NEWS))
            lines.append(_spoken(rng, name, words, THANKS))
    return "\n\n".join([*lines, _tale(rng, thing, place, names), _couplet(rng, they, place)]) + "\n\n\n"


def _spoken(rng: random.Random, name: str, words: dict[str, str], *choices: tuple[str, ...]) -> str:
    return f"{name.upper()}:\n" + "\n".join(rng.choice(choice).format(**words) for choice in choices)


def _tale(rng: random.Random, thing: str, place: str, names: list[str]) -> str:
    """A tale in which each line contains the line before."""
    tail, lines = f"the {thing} that hid {place}", []
    for deed, name in zip(rng.sample(DEEDS, len(names) - 2), names, strict=False):
        lines.append(f"This is {tail}.")
        tail = f"the {name} that {deed} {tail}"
    return "\n".join([*lines, f"This is {tail}."])


def _couplet(rng: random.Random, they: str, place: str) -> str:
    return f"So {they} found it {place},\n{rng.choice(PLACES[place])}"
