"""A request and the store give a donor: the entry whose entities cover the request best, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from chai_cli.embed import Embedder
from chai_cli.entities import entities
from store import LatentStore, Match, Vector

ENTITY, PROMPT = "entity", "prompt"
NEAREST = 128  # rows looked at for each entity and for the prompt
SCORED = 32  # entries that are then scored on all their vectors
ROUNDING = 1e-6  # the same text embedded in another batch may differ by this much


@dataclass(frozen=True, eq=False)
class Meaning:
    """What a prompt is about.

    Attributes:
        vectors: One of kind `entity` for each entity, in their order, and one of kind `prompt`: what `LatentStore.put` takes.
    """

    prompt: str
    entities: tuple[str, ...]
    vectors: tuple[Vector, ...]

    @cached_property
    def named(self) -> np.ndarray:
        """The entities' unit vectors [E, D]."""
        rows = [vector.values for vector in self.vectors if vector.kind == ENTITY]
        return np.stack(rows) if rows else np.zeros((0, len(self.whole)), np.float32)

    def unnamed(self) -> Meaning:
        """The same prompt without its entities."""
        return Meaning(self.prompt, (), tuple(vector for vector in self.vectors if vector.kind == PROMPT))

    @cached_property
    def whole(self) -> np.ndarray:
        """The prompt's unit vector [D]."""
        return next(vector.values for vector in self.vectors if vector.kind == PROMPT)


@dataclass(frozen=True)
class Shared:
    """An entity of the request, the donor's entity that it was found to be, and their cosine similarity."""

    entity: str
    donor_entity: str
    similarity: float


@dataclass(frozen=True)
class Candidate:
    """An entry that may be a donor.

    Attributes:
        score: Nine tenths `coverage`, one tenth `similarity`; `similarity` alone for a prompt that names no entity.
        similarity: Cosine of the whole prompts.
        shared: The request's entities that the entry has, in the request's order.
        coverage: Sum of the shared entities' similarities over the number of the request's entities: 1 = all, exactly.
    """

    id: str
    score: float
    similarity: float
    shared: tuple[Shared, ...]
    coverage: float


@dataclass(frozen=True)
class Lookup:
    """What a look-up found: accepted candidates, best first, and in plain words why the first was taken or why there is none."""

    candidates: tuple[Candidate, ...]
    why: str

    @property
    def donor(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


@dataclass(frozen=True)
class Cover:
    """Prompts to render first so that the most others find a donor.

    Attributes:
        chosen: Their indices, best gain first.
        gains: For each, how many prompts it covers that none before it did, itself included.
        covered: Prompts that have a donor then, the chosen ones included.
        total: All prompts.
    """

    chosen: list[int] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)
    covered: int = 0
    total: int = 0


def understand(prompts: Sequence[str], embedder: Embedder) -> list[Meaning]:
    """The entities of prompts and all their vectors, in batches."""
    found = entities(prompts)
    unique = list(dict.fromkeys(entity for group in found for entity in group))
    rows = dict(zip(unique, embedder.embed(unique), strict=True))
    wholes = embedder.embed_prompts(prompts, found)
    return [
        Meaning(prompt, named, (*(Vector(ENTITY, entity, rows[entity]) for entity in named), Vector(PROMPT, "", whole)))
        for prompt, named, whole in zip(prompts, found, wholes, strict=True)
    ]


class Retriever:
    """Finds donors in a store.

    An entry is accepted when it has at least one of the request's entities and covers enough of them, or, for a request that names
    none, when the whole prompts are similar enough. Accepted entries are ranked by `Candidate.score`; of equal ones the newest comes first.

    Args:
        min_similarity: Cosine from which two entities are the same; the embedder's own by default.
        min_prompt_similarity: Cosine from which two whole prompts are; the embedder's own by default.
        min_coverage: Least `Candidate.coverage`.
    """

    def __init__(
        self,
        store: LatentStore,
        embedder: Embedder,
        min_similarity: float | None = None,
        min_prompt_similarity: float | None = None,
        min_coverage: float = 0.0,
    ) -> None:
        self.store = store
        self.embedder = embedder
        self.min_coverage = min_coverage
        self.min_similarity = embedder.min_similarity if min_similarity is None else min_similarity
        self.min_prompt_similarity = embedder.min_prompt_similarity if min_prompt_similarity is None else min_prompt_similarity

    def find(self, namespace: str, meaning: Meaning, limit: int = 8) -> Lookup:
        """The accepted candidates of a namespace for a request, at most `limit`.

        The nearest rows of every entity and of the prompt gather entries. Those that the rows found speak for most are then scored
        on all their vectors, so that an entry which is near in several ways never loses to one at the head of a single list.
        """
        near = self.store.search(namespace, ENTITY, meaning.named, NEAREST) if meaning.entities else []
        alike = self.store.search(namespace, PROMPT, meaning.whole[None], NEAREST)[0]
        if not alike and not any(near):
            return Lookup((), "the cache is empty")
        level = self.min_similarity - ROUNDING
        covering = [[match for match in matches if match.similarity >= level] for matches in near]
        ids = likely(covering, alike, max(SCORED, limit))
        scored = self.score(namespace, meaning, ids)
        candidates = [c for c in scored if self.accepts(c, meaning)]
        candidates.sort(key=lambda candidate: -candidate.score)  # stable: newest first among equals
        if candidates:
            return Lookup(tuple(candidates[:limit]), reason(candidates[0]))
        if not meaning.entities:
            nearest = alike[0].similarity if alike else 0.0
            return Lookup((), f"the prompt names no entity; nearest prompt: {nearest:.2f} < {self.min_prompt_similarity:.2f}")
        most = max((candidate.coverage for candidate in scored), default=0.0)
        if most > 0:
            return Lookup((), f"the best donor covers {most:.2f} of the prompt's entities < {self.min_coverage:.2f}")
        found = [(matches[0], entity) for matches, entity in zip(near, meaning.entities, strict=True) if matches]
        if not found:
            return Lookup((), "no cached prompt names an entity")
        best, entity = max(found, key=lambda pair: pair[0].similarity)
        return Lookup((), f"nearest entity: {entity!r} ~ {best.label!r} {best.similarity:.2f} < {self.min_similarity:.2f}")

    def accepts(self, candidate: Candidate, meaning: Meaning) -> bool:
        if meaning.entities:
            return bool(candidate.shared) and candidate.coverage >= self.min_coverage - ROUNDING
        return candidate.similarity >= self.min_prompt_similarity - ROUNDING

    def score(self, namespace: str, meaning: Meaning, ids: Sequence[str]) -> list[Candidate]:
        theirs = self.store.vectors(namespace, ENTITY, ids)
        wholes = self.store.vectors(namespace, PROMPT, ids)
        found = []
        for id in ids:
            similarity = min(1.0, float(wholes[id][0][1] @ meaning.whole)) if id in wholes else 0.0
            shared = self.shared(meaning, theirs.get(id, []))
            coverage = sum(pair.similarity for pair in shared) / max(1, len(meaning.entities))
            score = 0.9 * coverage + 0.1 * similarity if meaning.entities else similarity
            found.append(Candidate(id, score, similarity, shared, coverage))
        return found

    def shared(self, meaning: Meaning, theirs: Sequence[tuple[str, np.ndarray]]) -> tuple[Shared, ...]:
        if not theirs or not meaning.entities:
            return ()
        similarity = meaning.named @ np.stack([values for _, values in theirs]).T
        best = similarity.argmax(1)
        return tuple(
            Shared(entity, theirs[best[i]][0], min(1.0, float(similarity[i, best[i]])))
            for i, entity in enumerate(meaning.entities)
            if similarity[i, best[i]] >= self.min_similarity - ROUNDING
        )


def likely(covering: Sequence[Sequence[Match]], alike: Sequence[Match], count: int) -> list[str]:
    """The entries that the rows found speak for most, newest first.

    Args:
        covering: For each entity of the request its matches, best first. Without entities the prompts alone speak.
        alike: The matches of the whole prompt.
    """
    rough = {} if covering else {match.id: 0.0 for match in alike}
    for matches in covering:
        best = {match.id: match.similarity for match in reversed(matches)}  # the last written is the best
        for id, similarity in best.items():
            rough[id] = rough.get(id, 0.0) + similarity / len(covering)
    for match in alike:
        if match.id in rough:
            rough[match.id] += match.similarity
    newest = sorted(rough, reverse=True)
    return sorted(sorted(newest, key=lambda id: -rough[id])[:count], reverse=True)


def reason(candidate: Candidate) -> str:
    if not candidate.shared:
        return f"the prompts are alike {candidate.similarity:.2f}"
    pairs = (
        repr(pair.entity)
        if pair.entity == pair.donor_entity
        else f"{pair.entity!r} ~ {pair.donor_entity!r} {pair.similarity:.2f}"
        for pair in candidate.shared
    )
    return f"shares {', '.join(pairs)}"


def choose_donors(
    meanings: Sequence[Meaning],
    min_similarity: float,
    limit: int | None = None,
    budget_entries: int | None = None,
    already: Sequence[Meaning] = (),
    min_prompt_similarity: float = 1.0,
    min_coverage: float = 0.0,
) -> Cover:
    """Prompts to render first, chosen greedily: each time the one that covers the most prompts not covered yet.

    Prompt A covers prompt B where `Retriever` would accept A's entry as B's donor; every prompt covers itself. Of equal gains the
    first prompt in the list is taken. Greedy choice covers at least 1 - 1/e of what the best choice of the same number can
    (Nemhauser, Wolsey, Fisher 1978).

    Args:
        limit, budget_entries: At most so many are chosen; the smaller counts.
        already: Prompts in the cache: what they cover needs no render.
        min_prompt_similarity: For prompts that name no entity; by default only the same prompt covers these.
        min_coverage: As of `Retriever`.
    """
    count = len(meanings)
    if not count:
        return Cover()
    most = min([count, *(cap for cap in (limit, budget_entries) if cap is not None)])
    thresholds = (min_similarity - ROUNDING, min_prompt_similarity - ROUNDING, min_coverage)
    open_ = np.ones(count, bool)
    if already:
        open_ &= ~coverage(already, meanings, *thresholds).any(0)
    covers = coverage(meanings, meanings, *thresholds)
    np.fill_diagonal(covers, True)
    gains = covers[:, open_].sum(1)
    cover = Cover(total=count)
    while open_.any() and len(cover.chosen) < most:
        best = int(gains.argmax())
        new = covers[best] & open_
        cover.chosen.append(best)
        cover.gains.append(int(new.sum()))
        gains = gains - covers[:, new].sum(1)
        open_ &= ~new
    return Cover(cover.chosen, cover.gains, count - int(open_.sum()), count)


def coverage(
    donors: Sequence[Meaning], requests: Sequence[Meaning], entity: float, prompt: float, share: float = 0.0
) -> np.ndarray:
    """Whether each donor [rows] would be accepted for each request [columns], bool [N, M].

    Args:
        entity, prompt: Cosines from which entities, and whole prompts of requests without any, count as the same.
        share: Least `Candidate.coverage`.
    """
    kinds = {text: row for one in (*donors, *requests) for text, row in zip(one.entities, one.named, strict=True)}
    number = {text: i for i, text in enumerate(kinds)}
    covers = np.zeros((len(donors), len(requests)), bool)
    named = [column for column, request in enumerate(requests) if request.entities]
    if named:
        matrix = np.stack(list(kinds.values()))
        listed = np.array([number[text] for column in named for text in requests[column].entities])
        counts = np.array([len(requests[column].entities) for column in named])
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        for row, donor in enumerate(donors):
            if donor.entities:
                near = np.minimum(matrix[[number[text] for text in donor.entities]] @ matrix.T, 1).max(0)
                total = np.add.reduceat(np.where(near >= entity, near, 0)[listed], starts)
                covers[row, named] = (total > 0) & (total / counts >= share - ROUNDING)
    nameless = [column for column, request in enumerate(requests) if not request.entities]
    if nameless:
        wholes = np.stack([donor.whole for donor in donors])
        covers[:, nameless] = wholes @ np.stack([requests[column].whole for column in nameless]).T >= prompt
    return covers
