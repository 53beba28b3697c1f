"""Scenes as sentences: many templates, synonyms, free order, filler, and often with attributes left out."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from chai_cli.embedded.world import Scene, Thing

Rng = np.random.Generator

SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
COLOUR_WORDS = {
    "red": ("red", "red", "crimson", "scarlet"),
    "orange": ("orange", "orange", "tangerine"),
    "yellow": ("yellow", "yellow", "golden"),
    "green": ("green", "green", "emerald"),
    "blue": ("blue", "blue", "azure"),
    "purple": ("purple", "purple", "violet"),
    "pink": ("pink", "pink", "rosy"),
    "white": ("white", "white", "pale"),
}
SHAPE_WORDS = {
    "ball": ("ball", "ball", "sphere", "disc"),
    "square": ("square", "square", "box", "block"),
    "triangle": ("triangle", "triangle", "wedge"),
    "star": ("star",),
    "heart": ("heart",),
    "ring": ("ring", "ring", "hoop"),
    "cross": ("cross", "cross", "plus sign"),
}
# present tense / participle
MOTION_WORDS = {
    "left": ("moves left|moving left", "slides to the left|sliding to the left", "drifts left|drifting left"),
    "right": ("moves right|moving right", "slides to the right|sliding to the right", "drifts right|drifting right"),
    "rise": ("rises|rising", "moves up|moving up", "floats upwards|floating upwards"),
    "fall": ("falls|falling", "moves down|moving down", "sinks downwards|sinking downwards"),
    "bounce": ("bounces|bouncing", "bounces up and down|bouncing up and down", "hops|hopping"),
    "circle": ("circles|circling", "moves in a circle|moving in a circle", "goes round and round|going round and round"),
    "sway": ("sways|swaying", "swings from side to side|swinging from side to side", "rocks|rocking"),
    "pulse": ("pulses|pulsing", "grows and shrinks|growing and shrinking", "throbs|throbbing"),
}
PLACE_WORDS = {
    "snow": ("on a snowy field", "in the snow", "over snowy hills", "on a winter day"),
    "desert": ("in the desert", "over sand dunes", "in a sandy desert"),
    "meadow": ("on a green meadow", "over a meadow", "on a grassy field"),
    "ocean": ("over the ocean", "at sea", "above the waves"),
    "city": ("in a city at night", "over the night city", "above the city lights"),
    "sunset": ("at sunset", "in front of a sunset", "in the evening glow"),
    "forest": ("in a forest", "among the trees", "in the woods"),
    "space": ("in space", "in outer space", "among the stars of space"),
}
OPENERS = ("", "", "", "a video of ", "a clip of ", "we see ", "a scene with ", "an animation of ")
CLOSERS = ("", "", "", "", ", high quality", ", cartoon style", ", smooth motion")
JOINERS = (" and ", " and ", ", and ", " while ", " next to ")
LEFT_OUT = {"size": 0.35, "colour": 0.12, "shape": 0.06, "motion": 0.15, "background": 0.15}


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def name(thing: Thing, rng: Rng | None, keep: frozenset[str]) -> str:
    """`a small red ball`; without a shape `a small red object`; plain words when there is no generator."""
    words = []
    if "size" in keep:
        words.append(pick(SIZE_WORDS[thing.size], rng))
    if "colour" in keep:
        words.append(pick(COLOUR_WORDS[thing.colour], rng))
    words.append(pick(SHAPE_WORDS[thing.shape], rng) if "shape" in keep else pick(("object", "thing"), rng))
    return article(" ".join(words))


def pick(options: tuple[str, ...], rng: Rng | None) -> str:
    return options[0] if rng is None else options[int(rng.integers(len(options)))]


def phrase(thing: Thing, rng: Rng | None, keep: frozenset[str], finite: bool) -> str:
    """The object and what it does: `a red ball moves left`, or `a red ball moving left`."""
    noun = name(thing, rng, keep)
    if "motion" not in keep:
        return noun
    return f"{noun} {pick(MOTION_WORDS[thing.motion], rng).split('|')[0 if finite else 1]}"


def full_caption(scene: Scene) -> str:
    """The plainest sentence that names every attribute: the prompts fidelity is measured on."""
    everything = frozenset(LEFT_OUT)
    things = " and ".join(phrase(thing, None, everything, True) for thing in scene.things)
    return f"{things} {PLACE_WORDS[scene.background][0]}"


def caption(scene: Scene, rng: Rng, complete: bool = False) -> tuple[str, list[frozenset[str]]]:
    """A sentence for a scene.

    Args:
        rng: Draws the template, the synonyms and what is left out.
        complete: Leave nothing out.

    Returns:
        The sentence and, for each object, the attributes it names (`background` counts for each of them).
    """
    placed = complete or rng.random() >= LEFT_OUT["background"]
    kept = []
    for _ in scene.things:
        names = {key for key, chance in LEFT_OUT.items() if complete or rng.random() >= chance}
        kept.append(frozenset(names | {"background"} if placed else names - {"background"}))
    finite = rng.random() < 0.6
    order = rng.permutation(len(scene.things))
    body = pick(JOINERS[:4] if finite else JOINERS, rng).join(phrase(scene.things[i], rng, kept[i], finite) for i in order)
    where = pick(PLACE_WORDS[scene.background], rng) if placed else ""
    if placed and rng.random() < 0.3:
        text = f"{where}, {pick(OPENERS[:3], rng)}{body}"
    else:
        text = f"{pick(OPENERS, rng)}{body}{',' if where and rng.random() < 0.3 else ''} {where}".rstrip()
    text += pick(CLOSERS, rng)
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:] + "."
    return text, kept


@cache
def vocabulary() -> frozenset[str]:
    """Every word a caption of this world can hold."""
    phrases = [*OPENERS, *CLOSERS, *JOINERS, "a an the object thing with is are on in at of over to it its"]
    for table in (SIZE_WORDS, COLOUR_WORDS, SHAPE_WORDS, MOTION_WORDS, PLACE_WORDS):
        phrases += [phrase for options in table.values() for phrase in options]
    return frozenset(re.findall(r"[a-z]+", " ".join(phrases)))


def unknown_words(prompt: str) -> list[str]:
    """The words of a prompt that the embedded model has never seen, in order, each once."""
    words = re.findall(r"[^\W_]+(?:['’][^\W_]+)*", prompt.lower())
    return list(dict.fromkeys(word for word in words if word not in vocabulary()))
