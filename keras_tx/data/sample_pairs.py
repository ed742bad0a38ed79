"""Generates 6,600 sentences in English and Tavic, an invented language in which no word can be translated by itself.

Tavic puts the verb last, the tense after it and "not" before it; adjectives follow their noun, and so do prepositions.
Every noun has one of three genders, which its form does not show; determiners, adjectives, pronouns and plurals agree
with it, and determiners show the case. Some verbs have a particle after their subject, and some English verbs have two
parts ("picks the lamp up"). Some English words have two translations: "bat" (the animal, or the tool), "light" (of a
bag, or of a house). Every English sentence has one translation and occurs once.
"""

import random
from typing import NamedTuple

LANGUAGES = ("english", "tavic")
SIZES = {"train": 6000, "validation": 300, "test": 300}
LENGTHS = range(3, 14)  # English words

# English singular and plural, Tavic stem, gender (the vowel of what agrees with it).
NOUNS = {
    "person": "man men drav o, woman women selk a, boy boys tibo o, girl girls mirn a, king kings orvad e, "
    "baker bakers puln o, doctor doctors hesk a, teacher teachers lamd e",
    "animal": "horse horses karb e, dog dogs wusk o, cat cats nial a, bird birds pirit e, goat goats bemek a",
    "thing": "book books livra e, letter letters skeb o, lamp lamps fosh a, box boxes kastun o, key keys zikl a, "
    "apple apples pomir e, bag bags turv a, chair chairs sedon o, picture pictures vidak e",
    "place": "house houses dombu e, garden gardens hortil a, forest forests silg o, village villages pagur a, "
    "tower towers turon o, bridge bridges ponde e",
    "machine": "clock clocks tempra a, mill mills molnu e",
    "instrument": "violin violins strigo o, flute flutes fulal a",
    "game": "ball balls globi e, card cards shart o",
    # These have the same words in English. They occur only with verbs that tell which one is meant.
    "animal (double)": "bat bats fleru a, crane cranes gruk e",
    "thing (double)": "bat bats kolb e, crane cranes levag o",
}
ANIMATE = ("person", "animal", "animal (double)")
WARES = ("thing", "instrument", "game", "animal")
# English base form, third person, past and second part, Tavic particle ("-" is none) and stem; subjects; objects.
VERBS = (
    ("see sees saw - - ornk", ANIMATE, ("person", "animal", "thing", "place", "machine")),
    ("love loves loved - - amir", ANIMATE, ("person", "animal", "thing", "place", "instrument")),
    ("find finds found - ap talm", ANIMATE, ("person", "animal", "thing", "instrument", "game")),
    ("buy buys bought - - kesk", ("person",), (*WARES, "machine", "thing (double)")),
    ("sell sells sold - ul kesk", ("person",), (*WARES, "machine", "thing (double)")),
    ("carry carries carried - - portu", ("person",), ("thing", "instrument", "thing (double)")),
    ("paint paints painted - - pinsh", ("person",), ("person", "animal", "place")),
    ("feed feeds fed - em nutr", ("person",), ("animal", "animal (double)")),
    ("repair repairs repaired - re fakt", ("person",), ("thing", "place", "machine", "thing (double)")),
    ("pick picks picked up ap levu", ("person",), ("thing", "instrument", "game", "thing (double)")),
    ("wake wakes woke up ul somn", ANIMATE, ("person", "animal", "animal (double)")),
    ("play plays played - - musk", ("person",), ("instrument",)),
    ("play plays played - - ludr", ("person",), ("game",)),
    ("give gives gave - em dont", ("person",), WARES),
    ("show shows showed - - mostr", ("person",), WARES),
    ("sleep sleeps slept - - somn", ANIMATE, ()),
    ("wait waits waited - re stant", ANIMATE, ()),
    ("sing sings sang - - kantl", ("person", "animal (double)"), ()),
    ("run runs ran - - korj", ("person", "animal"), ()),
    ("run runs ran - - funk", ("machine",), ()),
    ("get gets got up ul stant", ANIMATE, ()),
)
TO_SOMEBODY = ("give", "show")
# English, Tavic stem; kinds of nouns.
ADJECTIVES = (
    ("old senk", ANIMATE),
    ("old vetul", ("thing", "place", "machine", "instrument", "game", "thing (double)")),
    ("light levik", ("thing", "instrument", "thing (double)")),
    ("light lumik", ("place",)),
    ("small piko", (*ANIMATE, "thing", "place", "machine", "instrument", "game", "thing (double)")),
    ("beautiful belor", (*ANIMATE, "thing", "place", "machine", "instrument")),
    ("red rush", ("thing", "place", "game", "thing (double)")),
    ("green virg", ("thing", "place", "game")),
    ("heavy grum", ("thing", "machine", "thing (double)")),
    ("new novi", ("thing", "place", "machine", "instrument", "game", "thing (double)")),
    ("young yunt", ANIMATE),
    ("hungry famel", ANIMATE),
)
PREPOSITIONS = ("in ho", "behind dak", "near vis")
TIMES = {"past": ("yesterday hev", "then olim"), "present": ("now nunk", "often sepe"), "future": ("tomorrow zav",)}
TENSES = {"past": "pe", "present": "ha", "future": "vu"}
DETERMINERS = {
    False: ("the l", "the l", "a un", "my b"),
    True: ("the l", "my b", "two duv", "many pol"),
}  # by whether the noun is plural
PLURALS = {"o": "ek", "a": "im", "e": "us"}


Verb = tuple[str, tuple[str, ...], tuple[str, ...]]  # words, kinds of subjects, kinds of objects


class Phrase(NamedTuple):
    """A noun phrase in both languages. The Tavic has no case yet; `vowel` is the ending of what agrees with it."""

    english: str
    determiner: str
    rest: str
    vowel: str
    plural: bool
    kind: str

    def tavic(self, case: str = "") -> str:
        return f"{self.determiner}{case} {self.rest}"


def pairs(seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Returns {"train": pairs, "validation": pairs, "test": pairs}, each pair (English, Tavic)."""
    rng = random.Random(seed)
    made: dict[str, str] = {}
    while len(made) < sum(SIZES.values()):
        english, tavic = _sentence(rng)
        if len(english.split()) in LENGTHS:
            made[english] = tavic
    rest = iter(made.items())
    return {part: [next(rest) for _ in range(size)] for part, size in SIZES.items()}


def _sentence(rng: random.Random) -> tuple[str, str]:
    tense = rng.choice(list(TENSES))
    verb = rng.choice(VERBS)
    subject = _subject(rng, verb[1])
    asked = rng.random() < 0.15
    first, rest, predicate, thing = _predicate(rng, verb, tense, subject.plural, asked)
    english, tavic = [first, subject.english, rest], [subject.tavic(), predicate]
    chance = rng.random()
    if chance < 0.3:
        time, its = rng.choice(TIMES[tense]).split()
        english.insert(3 if asked else rng.choice((0, 3)), time)
        tavic.insert(0, its)
    elif chance < 0.5 and thing and thing.kind not in ANIMATE:
        reason, its = _reason(rng, tense, thing)
        english.append(reason)
        tavic.append(its)
    mark = "?" if asked else "."
    return _joined(*english) + mark, _joined("ka" * asked, *tavic).replace(" ,", ",") + mark


def _reason(rng: random.Random, tense: str, thing: Phrase) -> tuple[str, str]:
    """A reason in both languages: a pronoun and an adjective, which both agree with the `thing`."""
    adjective, its = _adjective(rng, thing.kind)
    if tense == "past":
        english = "they were" if thing.plural else "it was"
    else:
        tense, english = "present", "they are" if thing.plural else "it is"
    return f"because {english} {adjective}", f", wen y{thing.vowel} {its}{thing.vowel} {TENSES[tense]}"


def _subject(rng: random.Random, kinds: tuple[str, ...]) -> Phrase:
    """A noun phrase, sometimes two of them, or one with a relative clause."""
    phrase = _noun_phrase(rng, kinds)
    chance = rng.random()
    if chance < 0.1:
        other = _noun_phrase(rng, kinds)
        english, before = f"{phrase.english} and {other.english}", f"{phrase.tavic()} sha {other.determiner}"
        return other._replace(english=english, determiner=before, plural=True)
    if chance < 0.25 and phrase.kind in ("person", "animal"):
        verb = rng.choice([verb for verb in VERBS if phrase.kind in verb[1]])
        _, english, tavic, _ = _predicate(rng, verb, rng.choice(list(TENSES)), phrase.plural)
        who = "who" if phrase.kind == "person" else "that"
        return phrase._replace(english=f"{phrase.english} {who} {english}", rest=f"{phrase.rest} ki {tavic} ,")
    return phrase


def _noun_phrase(rng: random.Random, kinds: tuple[str, ...]) -> Phrase:
    kind = rng.choice(kinds)
    singular, plural, stem, gender = rng.choice(NOUNS[kind].split(", ")).split()
    many = rng.random() < 0.3
    vowel = "i" if many else gender
    english, rest = [plural if many else singular], [stem + PLURALS[gender] * many]
    if rng.random() < 0.35:
        adjective, its = _adjective(rng, kind)
        english.insert(0, adjective)
        rest.append(its + vowel)
    determiner, its = rng.choice(DETERMINERS[many]).split()
    english.insert(0, "an" if determiner == "a" and english[0][0] in "aeiou" else determiner)
    return Phrase(_joined(*english), its + vowel, _joined(*rest), vowel, many, kind)


def _adjective(rng: random.Random, kind: str) -> list[str]:
    return rng.choice([words for words, kinds in ADJECTIVES if kind in kinds]).split()


def _predicate(
    rng: random.Random, verb: Verb, tense: str, plural: bool, asked: bool = False
) -> tuple[str, str, str, Phrase | None]:
    """What a subject does: the English words before the subject, the other English words, the Tavic, the object."""
    words, _, objects = verb
    base, third, past, up, particle, stem = (word.strip("-") for word in words.split())
    auxiliary = {"past": "did", "present": "do" if plural else "does", "future": "will"}[tense]
    negated = rng.random() < 0.15
    if asked or negated or tense == "future":
        english = [auxiliary * (not asked), "not" * negated, base]
    else:
        english = [past if tense == "past" else base if plural else third]
    tavic, thing = [particle], None
    if objects:
        thing = _noun_phrase(rng, objects)
        somebody = _noun_phrase(rng, ("person", "animal")) if base in TO_SOMEBODY else None
        if somebody:
            english += rng.choice(([somebody.english, thing.english], [thing.english, "to", somebody.english]))
            tavic.append(somebody.tavic("r"))
        else:
            english += rng.choice(([up, thing.english], [thing.english, up]))
        tavic.append(thing.tavic("n"))
    else:
        english.append(up)
    if rng.random() < 0.25:
        place = _noun_phrase(rng, ("place",))
        preposition, its = rng.choice(PREPOSITIONS).split()
        english += [preposition, place.english]
        tavic += [place.tavic("r"), its]
    tavic += ["ni" * negated, stem + ("en" if plural else "at"), TENSES[tense]]
    return auxiliary * asked, _joined(*english), _joined(*tavic), thing


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)
