from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from chai_cli.embed import EMBEDDED, Embedder, load_embedder
from chai_cli.embedded.captions import caption
from chai_cli.embedded.world import scenes
from chai_cli.retrieve import Candidate, Lookup, Meaning, Retriever, Shared, choose_donors, understand
from store import Entry, LatentStore, Vector

SPACE = "space"
Put = Callable[..., str]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(str(EMBEDDED))


@pytest.fixture
def store(tmp_path: Path) -> LatentStore:
    return LatentStore(tmp_path / "cache")


@pytest.fixture
def put(store: LatentStore) -> Put:
    def put(meaning: Meaning, namespace: str = SPACE) -> str:
        entry = Entry(meaning.prompt, meaning.entities, namespace, "model", 0, {}, (64, 64, 17), 1.0)
        return store.put(entry, {"clean": torch.zeros(1)}, meaning.vectors).id

    return put


@pytest.fixture
def find(store: LatentStore, embedder: Embedder) -> Callable[[Meaning], Lookup]:
    retriever = Retriever(store, embedder)
    return lambda meaning: retriever.find(SPACE, meaning)


def made(prompt: str, whole: Sequence[float], **entities: Sequence[float]) -> Meaning:
    """A meaning with chosen directions instead of a tower's."""
    rows = {name.replace("_", " "): unit(values) for name, values in entities.items()}
    vectors = [Vector("entity", name, row) for name, row in rows.items()]
    return Meaning(prompt, tuple(rows), (*vectors, Vector("prompt", "", unit(whole))))


def unit(values: Sequence[float]) -> np.ndarray:
    row = np.array(values, np.float32)
    return row / np.linalg.norm(row)


def at(similarity: float) -> tuple[float, float, float]:
    """A direction with this cosine to (1, 0, 0)."""
    return (similarity, float(np.sqrt(1 - similarity**2)), 0.0)


X, Y, Z = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def test_a_meaning_is_what_the_store_takes(embedder: Embedder) -> None:
    (meaning,) = understand(["a large red ball bounces on a snowy field"], embedder)
    assert [(v.kind, v.label) for v in meaning.vectors] == [
        ("entity", "large red ball"),
        ("entity", "snowy field"),
        ("prompt", ""),
    ]
    assert meaning.entities == ("large red ball", "snowy field")
    assert meaning.named.shape == (2, embedder.width)
    assert meaning.whole.shape == (embedder.width,)
    assert understand([], embedder) == []


def test_prompts_are_understood_alike_alone_and_together(embedder: Embedder) -> None:
    prompts = ["a red ball in the snow", "", "a blue star at sea, and a red ball in the woods " * 6, "a red ball in the snow"]
    for prompt, together in zip(prompts, understand(prompts, embedder), strict=True):
        (alone,) = understand([prompt], embedder)
        assert alone.entities == together.entities
        assert np.allclose(alone.named, together.named, atol=1e-5)
        assert np.allclose(alone.whole, together.whole, atol=1e-5)


def test_an_entry_that_shares_an_object_is_the_donor(find: Callable[[Meaning], Lookup], put: Put, embedder: Embedder) -> None:
    ball, star, asked = understand(
        ["a red ball bounces in the desert", "a blue star at sea", "a crimson sphere falls in space"], embedder
    )
    id = put(ball)
    put(star)
    lookup = find(asked)
    assert lookup.donor is not None
    assert lookup.donor.id == id
    assert [(s.entity, s.donor_entity) for s in lookup.donor.shared] == [("crimson sphere", "red ball")]
    assert lookup.why.startswith("shares 'crimson sphere' ~ 'red ball' 0.")


def test_an_entry_that_shares_a_scene_is_the_donor(find: Callable[[Meaning], Lookup], put: Put, embedder: Embedder) -> None:
    cached, asked = understand(["a red ball in a forest", "a white ring among the trees"], embedder)
    id = put(cached)
    lookup = find(asked)
    assert lookup.donor is not None
    assert lookup.donor.id == id
    assert [s.entity for s in lookup.donor.shared] == ["tree"]


def test_the_same_prompt_is_covered_whole(find: Callable[[Meaning], Lookup], put: Put, embedder: Embedder) -> None:
    (meaning,) = understand(["a large red ball bounces on a snowy field"], embedder)
    put(meaning)
    donor = find(meaning).donor
    assert donor is not None
    assert donor.coverage == pytest.approx(1)
    assert donor.similarity == pytest.approx(1)
    assert donor.score == pytest.approx(1)
    assert find(meaning).why == "shares 'large red ball', 'snowy field'"


def test_the_entry_that_covers_more_comes_first(find: Callable[[Meaning], Lookup], put: Put) -> None:
    asked = made("asked", X, ball=X, field=Y)
    one, both = put(made("one", X, ball=X)), put(made("both", X, round_ball=X, snow=Y))
    put(made("none", X, ship=Z))
    found = find(asked).candidates
    assert [c.id for c in found] == [both, one]
    assert [c.coverage for c in found] == pytest.approx([1, 0.5])
    assert found[0].shared == (Shared("ball", "round ball", 1.0), Shared("field", "snow", 1.0))


def test_of_equal_coverage_the_more_similar_prompt_comes_first(find: Callable[[Meaning], Lookup], put: Put) -> None:
    near, far = put(made("near", at(0.9), ball=X)), put(made("far", at(0.2), ball=X))
    found = find(made("asked", X, ball=X)).candidates
    assert [c.id for c in found] == [near, far]
    assert [c.score for c in found] == pytest.approx([0.99, 0.92])


def test_of_equal_entries_the_newest_comes_first(find: Callable[[Meaning], Lookup], put: Put) -> None:
    ids = [put(made(f"entry {n}", X, ball=X)) for n in range(5)]
    assert [c.id for c in find(made("asked", X, ball=X)).candidates] == ids[::-1]


def test_candidates_are_cut_at_the_limit(store: LatentStore, embedder: Embedder, put: Put) -> None:
    for n in range(12):
        put(made(f"entry {n}", X, ball=X))
    assert len(Retriever(store, embedder).find(SPACE, made("asked", X, ball=X), limit=3).candidates) == 3


def test_an_entry_found_by_one_entity_is_scored_on_all_its_entities(store: LatentStore, embedder: Embedder, put: Put) -> None:
    """`ball` is crowded with nearer entries: only the look at `field` gathers the best entry, which has both."""
    crowd = 300
    for n in range(crowd):
        put(made(f"crowd {n}", Z, ball=X))
    best = put(made("best", Y, ball=at(0.95), field=Z))
    donor = Retriever(store, embedder, 0.9).find(SPACE, made("asked", Y, ball=X, field=Z)).donor
    assert donor is not None
    assert donor.id == best
    assert [round(s.similarity, 2) for s in donor.shared] == [0.95, 1.0]


def test_the_threshold_itself_is_a_hit(store: LatentStore, embedder: Embedder, put: Put) -> None:
    put(made("entry", X, ball=at(0.8)))
    assert Retriever(store, embedder, 0.8).find(SPACE, made("asked", X, ball=X)).donor
    assert not Retriever(store, embedder, 0.81).find(SPACE, made("asked", X, ball=X)).donor


def test_a_miss_says_why(store: LatentStore, embedder: Embedder, put: Put) -> None:
    retriever = Retriever(store, embedder, 0.8, 0.9)
    asked = made("asked", X, red_ball=X)
    assert retriever.find(SPACE, asked) == Lookup((), "the cache is empty")
    put(made("without entities", Y))
    assert retriever.find(SPACE, asked).why == "no cached prompt names an entity"
    put(made("entry", Y, blue_ball=at(0.71), house=Y))
    lookup = retriever.find(SPACE, asked)
    assert lookup.donor is None
    assert lookup.why == "nearest entity: 'red ball' ~ 'blue ball' 0.71 < 0.80"
    assert retriever.find(SPACE, made("asked", at(0.5))).why.startswith("the prompt names no entity; nearest prompt: ")


def test_without_entities_the_whole_prompt_decides(store: LatentStore, embedder: Embedder, put: Put) -> None:
    retriever = Retriever(store, embedder, 0.8, 0.9)
    id = put(made("entry", X, ball=X))
    donor = retriever.find(SPACE, made("asked", at(0.95))).donor
    assert donor == Candidate(id, donor.score if donor else 0, donor.similarity if donor else 0, (), 0.0)
    assert donor.score == pytest.approx(0.95)
    assert retriever.find(SPACE, made("asked", at(0.85))).donor is None


def test_a_like_prompt_with_none_of_the_entities_is_a_miss(store: LatentStore, embedder: Embedder, put: Put) -> None:
    put(made("entry", X, ball=X))
    assert Retriever(store, embedder, 0.8, 0.9).find(SPACE, made("asked", X, ship=Z)).donor is None


def test_other_namespaces_give_no_donors(find: Callable[[Meaning], Lookup], put: Put) -> None:
    put(made("entry", X, ball=X), "another")
    assert find(made("asked", X, ball=X)).why == "the cache is empty"


def test_the_embedders_own_thresholds_are_the_default(store: LatentStore, embedder: Embedder) -> None:
    retriever = Retriever(store, embedder)
    assert retriever.min_similarity == embedder.min_similarity
    assert Retriever(store, embedder, 0.5).min_similarity == 0.5


def test_the_default_threshold_separates_the_things_of_the_world(embedder: Embedder) -> None:
    from tests.retrieval_study import relation, share, world_objects, world_places

    keys = [*world_objects()[::7], *world_places()]
    rows = embedder.embed([text for text, _ in keys])
    similarity = rows @ rows.T
    pairs: dict[str, list[float]] = {}
    for (i, (_, one)), (j, (_, two)) in itertools.combinations(enumerate(keys), 2):
        pairs.setdefault(relation(one, two), []).append(float(similarity[i, j]))
    level = embedder.min_similarity
    assert share(pairs["same"], level) > 0.9
    assert share(pairs["part"], level) > 0.85
    assert share(pairs["size"], level) < 0.2
    assert share(pairs["colour"], level) < 0.02
    assert share(pairs["place"], level) < 0.05
    assert share(pairs["object and place"], level) < 0.02


def test_the_prompt_that_covers_most_is_rendered_first() -> None:
    asked = [made("a", X, ball=X), made("ab", X, ball=X, field=Y), made("b", X, field=Y), made("c", X, ship=Z)]
    cover = choose_donors(asked, 0.9)
    assert cover.chosen == [1, 3]
    assert cover.gains == [3, 1]
    assert (cover.covered, cover.total) == (4, 4)


def test_of_equal_gains_the_first_in_the_file_is_taken() -> None:
    assert choose_donors([made("a", X, ball=X), made("b", X, ball=X)], 0.9).chosen == [0]


def test_the_limit_and_the_budget_end_the_choice() -> None:
    asked = [made(str(n), X, **{f"thing{n}": row}) for n, row in enumerate((X, Y, Z))]
    assert choose_donors(asked, 0.9, limit=2).chosen == [0, 1]
    assert choose_donors(asked, 0.9, limit=2, budget_entries=1).chosen == [0]
    assert choose_donors(asked, 0.9, limit=0).covered == 0
    assert choose_donors(asked, 0.9, limit=2).covered == 2


def test_what_is_cached_already_covers_for_free() -> None:
    asked = [made("a", X, ball=X), made("b", X, field=Y)]
    cover = choose_donors(asked, 0.9, already=[made("cached", Z, round_ball=X)])
    assert cover.chosen == [1]
    assert cover.covered == 2


def test_a_prompt_without_entities_is_covered_by_its_like() -> None:
    asked = [made("a", X), made("b", at(0.95)), made("c", Y)]
    assert choose_donors(asked, 0.9, min_prompt_similarity=0.9).chosen == [0, 2]
    assert choose_donors(asked, 0.9).chosen == [0, 1, 2]
    assert choose_donors([], 0.9).chosen == []


def test_who_must_cover_more_covers_fewer() -> None:
    asked = [made("both", X, ball=X, field=Y), made("ball", X, ball=X), made("field", X, field=Y)]
    assert choose_donors(asked, 0.9).covered == choose_donors(asked, 0.9, min_coverage=1.0).covered == 3
    assert choose_donors(asked, 0.9).chosen == [0]
    assert choose_donors(asked[1:], 0.9, min_coverage=1.0).chosen == [0, 1]
    assert choose_donors([asked[1], asked[0]], 0.9, min_coverage=0.6).chosen == [1]
    assert choose_donors([asked[1], asked[0]], 0.9, limit=1, already=[asked[2]], min_coverage=0.5).covered == 2


def test_the_choice_is_what_the_retriever_then_finds(store: LatentStore, embedder: Embedder, put: Put) -> None:
    rng = np.random.default_rng(2)
    meanings = understand([caption(scene, rng)[0] for scene in itertools.islice(scenes(9), 80)], embedder)
    cover = choose_donors(meanings, embedder.min_similarity, limit=6, min_prompt_similarity=embedder.min_prompt_similarity)
    for chosen in cover.chosen:
        put(meanings[chosen])
    retriever = Retriever(store, embedder)
    hits = {i for i, meaning in enumerate(meanings) if retriever.find(SPACE, meaning).donor}
    assert len(hits | set(cover.chosen)) == cover.covered == sum(cover.gains)


def test_three_thousand_prompts_are_chosen_from_in_seconds() -> None:
    rng = np.random.default_rng(0)
    kinds = rng.standard_normal((6000, 128)).astype(np.float32)
    asked = [
        made(str(n), kinds[n], **{f"kind{k}": kinds[k] for k in rng.zipf(1.3, 4).clip(max=5999).tolist()}) for n in range(3000)
    ]
    began = time.perf_counter()
    cover = choose_donors(asked, 0.9, limit=500)
    assert time.perf_counter() - began < 30
    assert cover.gains == sorted(cover.gains, reverse=True)
