"""The procedural world: what it holds, that it repeats, and that words and pictures agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from chai_cli.embedded.captions import caption, full_caption, unknown_words, vocabulary
from chai_cli.embedded.paint import paint, paint_with_cover
from chai_cli.embedded.world import ATTRIBUTES, BACKGROUNDS, Scene, Thing, held_out, left_to_right, scenes


def test_the_world_is_as_rich_as_promised() -> None:
    counts = {name: len(values) for name, values in ATTRIBUTES.items()}
    assert counts["background"] >= 8
    assert counts["shape"] >= 7
    assert counts["colour"] >= 8
    assert counts["size"] == 2
    assert counts["motion"] >= 8
    drawn = list(islice(scenes(3), 400))
    assert sum(len(scene.things) == 2 for scene in drawn) >= 100


def test_same_seed_same_scenes_and_clips() -> None:
    first, second = next(scenes(5)), next(scenes(5))
    assert first == second
    assert (paint(first) == paint(second)).all()
    assert not (paint(first) == paint(replace(first, seed=first.seed + 2))).all()


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_clips_move_and_vary_with_the_seed(background: str) -> None:
    thing = Thing("star", "red", "large", "right")
    clips = [paint(Scene(background, (thing,), seed)).astype(int) for seed in (1, 2)]
    assert clips[0].shape == (17, 64, 64, 3)
    assert np.abs(clips[0][0] - clips[0][-1]).mean() > 3
    assert np.abs(clips[0] - clips[1]).mean() > 5


def centres(scene: Scene, index: int = 0) -> np.ndarray:
    """Centre of an object in each frame, [T, 2] as x, y."""
    cover = paint_with_cover(scene)[1][index]
    mass = cover.sum((1, 2))
    columns, rows = np.arange(64), np.arange(64)
    return np.stack([(cover.sum(1) * columns).sum(1) / mass, (cover.sum(2) * rows).sum(1) / mass], 1)


@pytest.mark.parametrize(("motion", "axis", "sign"), [("left", 0, -1), ("right", 0, 1), ("rise", 1, -1), ("fall", 1, 1)])
def test_motions_go_where_their_words_say(motion: str, axis: int, sign: int) -> None:
    for seed in range(1, 6):
        moved = centres(Scene("snow", (Thing("ball", "red", "small", motion),), seed))
        assert sign * (moved[-1] - moved[0])[axis] > 10


def test_large_covers_more_than_small_for_every_shape() -> None:
    for shape in ATTRIBUTES["shape"]:
        areas = {
            size: [paint_with_cover(Scene("snow", (Thing(shape, "red", size, "rise"),), s))[1][0, 8].sum() for s in range(1, 6)]
            for size in ATTRIBUTES["size"]
        }
        assert min(areas["large"]) > 1.3 * max(areas["small"])


def test_first_of_two_stands_to_the_left() -> None:
    for scene in islice(scenes(9, things=2), 10):
        assert len(left_to_right(scene)) == 2
        assert centres(scene, 0)[:, 0].mean() < centres(scene, 1)[:, 0].mean()


def test_held_out_combinations_stay_out_of_training() -> None:
    for scene in islice(scenes(1), 500):
        assert not any(held_out(scene.background, thing) for thing in scene.things)
    for scene in islice(scenes(1, held=True), 50):
        assert all(held_out(scene.background, thing) for thing in scene.things)


def test_captions_vary_and_name_what_they_say_they_name() -> None:
    scene = Scene("sunset", (Thing("ball", "red", "large", "bounce"),), 1)
    rng = np.random.default_rng(0)
    texts = [caption(scene, rng) for _ in range(200)]
    assert len({text for text, _ in texts}) > 100
    assert any("size" not in kept[0] for _, kept in texts)
    for text, kept in texts:
        named = any(word in text.lower() for word in ("red", "crimson", "scarlet"))
        assert named == ("colour" in kept[0])
    assert full_caption(scene) == "a large red ball bounces at sunset"


def test_every_word_of_every_caption_is_known() -> None:
    rng = np.random.default_rng(1)
    for scene in islice(scenes(4), 500):
        assert unknown_words(caption(scene, rng)[0]) == []
    assert len(vocabulary()) > 100


def test_unknown_words_are_named_once_in_order() -> None:
    assert unknown_words("A Dragon and a red ball, dragon's café; RED") == ["dragon", "dragon's", "café"]
