"""What is asked of every method: a stream of requests, and the cache that it meets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from chai_cli.embedded.captions import caption
from chai_cli.embedded.world import ATTRIBUTES, Scene, held_out, random_scene
from chai_cli.errors import ChaiError
from chai_cli.prompts import Request, Settings

TRIES = 1000  # draws in a row that may fail
SEEDS = ("own", "shared")
POLICIES = ("cold", "warm", "hits")
DONOR_SEEDS, REQUEST_SEEDS = 500_000, 1_000


@dataclass(frozen=True)
class Case:
    """One request of a workload.

    Attributes:
        scene: What the prompt says, where that is known.
    """

    prompt: str
    settings: Settings
    scene: Scene | None = None


@dataclass(frozen=True)
class Workload:
    """Requests, and what is in the cache before the first.

    Attributes:
        policy: `cold`, the cache is empty; `warm`, `donors` were rendered before; both keep every miss as a donor. `hits`: donors
            were rendered before, and nothing is added.
        parameters: What it was drawn with.
    """

    name: str
    policy: str
    cases: tuple[Case, ...]
    donors: tuple[Case, ...]
    parameters: dict[str, Any]

    def identity(self) -> dict[str, Any]:
        """What tells it from other workloads. How many requests it has does not: each is known by its own digest."""
        drawn = {key: value for key, value in self.parameters.items() if key != "count"}
        first = [asdict(case.settings) | {"prompt": case.prompt} for case in self.donors]
        return {"name": self.name, "policy": self.policy, **drawn, "donors": first}

    @property
    def grows(self) -> bool:
        return self.policy != "hits"


@dataclass(frozen=True)
class WorldLaw:
    """How a stream of the embedded world repeats itself.

    Prompt logs are related, not identical: a few subjects come back often, in new words and with changes. A request is a new
    subject with probability `fresh`; else an earlier one, the r-th oldest with a weight of r^-popularity, with one, two or three of its
    attributes changed (`changes` are the three probabilities). No request has all the attributes of an earlier one.

    Attributes:
        fresh: Share of new subjects.
        popularity: Exponent of Zipf's law.
        changes: Shares of requests with one, two and three attributes changed.
        seed: Of the stream.
    """

    fresh: float = 0.25
    popularity: float = 1.0
    changes: tuple[float, float, float] = (0.5, 0.35, 0.15)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fresh <= 1:
            raise ChaiError(f"the share of fresh subjects lies between 0 and 1, not {self.fresh}")
        if min(self.changes) < 0 or abs(sum(self.changes) - 1) > 1e-6:
            raise ChaiError(f"the shares of one, two and three changes must sum to 1, not {self.changes}")


def world(
    count: int,
    policy: str = "cold",
    donors: int = 0,
    law: WorldLaw | None = None,
    settings: Settings | None = None,
    seeds: str = "own",
) -> Workload:
    """A workload of the embedded world: one object, every attribute named, combinations that nobody trained on.

    Args:
        count: Requests.
        donors: Prompts rendered before, for `warm` and `hits`. For `hits` the requests are changes of these alone that share
            their place or their object with a donor (whether retrieval sees that is another matter, and reported).
        settings: Of every request; its seed is where seeds begin.
        seeds: Every request and donor has its `own`, or all the same (`shared`), as prompts of a text file have: then request and donor
            begin with the same noise.
    """
    chosen = law or WorldLaw()
    check_policy(policy, donors)
    if seeds not in SEEDS:
        raise ChaiError(f"seeds are one of {', '.join(SEEDS)}, not {seeds!r}")
    rng = np.random.default_rng(chosen.seed)
    first: list[Scene] = []
    if policy != "cold":
        stream = subjects(rng, chosen, []) if policy == "warm" else fresh_scenes(rng)
        first = [next(stream) for _ in range(donors)]
    hits = policy == "hits"
    later = subjects(rng, replace(chosen, fresh=0.0) if hits else chosen, first, near=hits)
    scenes = list(itertools.islice(later, count))
    asked, rendered = (np.random.default_rng([chosen.seed, part]) for part in (1, 2))
    base = settings or Settings()

    def case(scene: Scene, seed: int, words: np.random.Generator) -> Case:
        own = replace(base, seed=base.seed if seeds == "shared" else base.seed + seed)
        return Case(caption(scene, words, complete=True)[0], own, scene)

    return Workload(
        "world",
        policy,
        tuple(case(scene, REQUEST_SEEDS + i, asked) for i, scene in enumerate(scenes)),
        tuple(case(scene, DONOR_SEEDS + i, rendered) for i, scene in enumerate(first)),
        {"count": count, "donors": len(first), "seeds": seeds, **asdict(chosen)},
    )


def fresh_scenes(rng: np.random.Generator) -> Iterator[Scene]:
    while True:
        yield random_scene(rng, 1, held=True)


def subjects(rng: np.random.Generator, law: WorldLaw, earlier: list[Scene], near: bool = False) -> Iterator[Scene]:
    """Scenes by the law, after some earlier ones.

    Args:
        near: Only scenes that share their place or their object with one of the earlier.

    Raises:
        ChaiError: there are no more.
    """
    roots = list(earlier)
    seen = {words(scene) for scene in earlier}
    tries = 0
    while tries < TRIES:
        tries += 1
        new = not roots or rng.random() < law.fresh
        if new:
            scene: Scene | None = random_scene(rng, 1, held=True)
        else:
            weights = np.arange(1, len(roots) + 1) ** -law.popularity
            root = roots[int(rng.choice(len(roots), p=weights / weights.sum()))]
            scene = changed(root, rng, 1 + int(rng.choice(3, p=law.changes)))
        if scene is None or words(scene) in seen or (near and not any(shares(scene, donor) for donor in earlier)):
            continue
        tries = 0
        seen.add(words(scene))
        if new:
            roots.append(scene)
        yield scene
    raise ChaiError(f"there are only {len(seen) - len(earlier)} such requests; give a smaller --count, or more --donors")


def words(scene: Scene) -> tuple[str, ...]:
    return tuple(value(scene, name) for name in ATTRIBUTES)


def value(scene: Scene, name: str) -> str:
    """An attribute of a scene with one object."""
    return scene.background if name == "background" else getattr(scene.things[0], name)


def shares(scene: Scene, donor: Scene) -> bool:
    """Whether the place or the object (size, colour and shape) is the same."""
    thing, other = scene.things[0], donor.things[0]
    same_thing = (thing.size, thing.colour, thing.shape) == (other.size, other.colour, other.shape)
    return scene.background == donor.background or same_thing


def changed(scene: Scene, rng: np.random.Generator, count: int) -> Scene | None:
    """The scene with `count` attributes changed and a seed of its own; None if training saw all such combinations.

    The size is never changed alone: that would be the only change which keeps every combination untrained.
    """
    names = [str(name) for name in rng.choice(list(ATTRIBUTES), count, replace=False)]
    others = [[v for v in ATTRIBUTES[name] if v != value(scene, name)] for name in names]
    choices = list(itertools.product(*others))
    for place in rng.permutation(len(choices)) if names != ["size"] else ():
        new = dict(zip(names, choices[place], strict=True))
        background = new.pop("background", scene.background)
        thing = replace(scene.things[0], **new)
        if held_out(background, thing):
            return Scene(background, (thing,), int(rng.integers(2**31)))
    return None


def from_requests(name: str, requests: list[Request], policy: str = "cold", donors: int = 0) -> Workload:
    """A workload of the user's own prompts: the first `donors` are rendered before, the others are asked."""
    check_policy(policy, donors)
    cases = [Case(request.prompt, request.settings) for request in requests]
    first = cases[:donors] if policy != "cold" else []
    rest = cases[len(first) :]
    if not rest:
        raise ChaiError(f"{name} has {len(cases)} prompts, and all of them are donors; give a smaller --donors")
    return Workload(name, policy, tuple(rest), tuple(first), {"count": len(rest), "donors": len(first)})


def parse_changes(text: str) -> tuple[float, float, float]:
    """`0.5,0.35,0.15` as three shares."""
    try:
        one, two, three = (float(part) for part in text.split(","))
    except ValueError:
        raise ChaiError(f"--changes takes three shares, such as 0.5,0.35,0.15, not {text!r}") from None
    return one, two, three


def check_policy(policy: str, donors: int) -> None:
    if policy not in POLICIES:
        raise ChaiError(f"the policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    if policy != "cold" and donors < 1:
        raise ChaiError(f"--policy {policy} needs --donors of at least 1")
