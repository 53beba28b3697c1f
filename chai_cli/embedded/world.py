"""The procedural world that the embedded model was trained on: what a scene is, and how scenes are drawn at random.

`paint.py` turns a scene into a clip and `captions.py` turns it into words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BACKGROUNDS = ("snow", "desert", "meadow", "ocean", "city", "sunset", "forest", "space")
SHAPES = ("ball", "square", "triangle", "star", "heart", "ring", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
SIZES = ("small", "large")
MOTIONS = ("left", "right", "rise", "fall", "bounce", "circle", "sway", "pulse")

ATTRIBUTES = {"background": BACKGROUNDS, "shape": SHAPES, "colour": COLOURS, "size": SIZES, "motion": MOTIONS}
OBJECT_ATTRIBUTES = ("shape", "colour", "size", "motion")

HEIGHT, WIDTH, FRAMES, FPS = 64, 64, 17, 8
TWO_OBJECT_SHARE = 0.3
HELD_OUT_SHARE = 12  # one combination in this many is never trained on


@dataclass(frozen=True)
class Thing:
    """One object of a scene, by attribute."""

    shape: str
    colour: str
    size: str
    motion: str


@dataclass(frozen=True)
class Scene:
    """What a clip shows. `seed` fixes everything the attributes leave open: terrain, light, places, speeds, patterns."""

    background: str
    things: tuple[Thing, ...]
    seed: int


def held_out(background: str, thing: Thing) -> bool:
    """True if this combination of place, shape, colour and motion is kept out of training (either size)."""
    key = f"{background}/{thing.shape}/{thing.colour}/{thing.motion}".encode()
    return hashlib.blake2b(key, digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def left_to_right(scene: Scene) -> tuple[Thing, ...]:
    """The objects of a scene in the order in which they stand in the clip, which its seed decides."""
    return scene.things if scene.seed % 2 else scene.things[::-1]


def random_thing(rng: np.random.Generator) -> Thing:
    return Thing(*(str(rng.choice(ATTRIBUTES[name])) for name in OBJECT_ATTRIBUTES))


def random_scene(rng: np.random.Generator, things: int | None = None, held: bool = False) -> Scene:
    """Draw a scene.

    Args:
        rng: The only source of randomness.
        things: 1 or 2 objects; by default two in 30 % of the scenes.
        held: True draws only scenes whose objects are all held out, False only scenes with none.
    """
    count = things or (2 if rng.random() < TWO_OBJECT_SHARE else 1)
    while True:
        background = str(rng.choice(BACKGROUNDS))
        drawn = tuple(random_thing(rng) for _ in range(count))
        if count == 2 and drawn[0].colour == drawn[1].colour and drawn[0].shape == drawn[1].shape:
            continue
        if all(held_out(background, thing) == held for thing in drawn):
            return Scene(background, drawn, int(rng.integers(2**31)))


def scenes(seed: int, things: int | None = None, held: bool = False) -> Iterator[Scene]:
    """An endless stream of scenes; the same arguments give the same stream."""
    rng = np.random.default_rng(seed)
    while True:
        yield random_scene(rng, things, held)
