from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from chai_cli.embed import EMBEDDED, Embedder, load_embedder
from chai_cli.errors import ChaiError


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(str(EMBEDDED))


@pytest.fixture(scope="module")
def random_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text side of ViT-B-32 with random weights, two of its layers, beside a token image side."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    config = open_clip.get_model_config("ViT-B-32")
    config["vision_cfg"] |= {"layers": 1, "width": 64, "head_width": 32}
    config["text_cfg"]["layers"] = 2
    torch.manual_seed(0)
    model = open_clip.CLIP(**config)
    folder = tmp_path_factory.mktemp("clip")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    save_file({name: value.half() for name, value in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    return folder


def copied(folder: Path) -> Path:
    shutil.copytree(EMBEDDED, folder)
    return folder


def test_rows_are_unit_vectors_of_the_tower(embedder: Embedder) -> None:
    rows = embedder.embed(["red ball", "snowy field"])
    assert rows.shape == (2, embedder.width)
    assert rows.dtype == np.float32
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert embedder.embed([]).shape == (0, embedder.width)
    assert embedder.embed_prompts([], []).shape == (0, embedder.width)


def test_synonyms_are_closer_than_other_things(embedder: Embedder) -> None:
    ball, sphere, star, cube = embedder.embed(["red ball", "crimson sphere", "blue star", "green ring"])
    assert ball @ sphere > 0.9 > max(ball @ star, ball @ cube)


def test_neighbours_in_a_batch_change_no_more_than_the_last_bits() -> None:
    texts = ["red ball", "a small blue ring on a green meadow", "snow", "", *(f"star {n}" for n in range(16))]
    together, apart = load_embedder(str(EMBEDDED)), load_embedder(str(EMBEDDED))
    alone = np.stack([apart.embed_prompt(text, ("x",)) for text in texts])
    assert np.abs(together.embed_prompts(texts, [("x",)] * len(texts)) - alone).max() < 1e-5


def test_a_repeated_text_keeps_its_bits(embedder: Embedder) -> None:
    once = embedder.embed(["red ball"])
    again = embedder.embed(["blue star", "red ball", "red ball"])
    assert np.array_equal(again[1], once[0])
    assert np.array_equal(again[2], once[0])


def test_a_long_prompt_is_laid_into_windows_that_fit_and_lose_no_word(embedder: Embedder) -> None:
    prompt = " ".join(f"a small red ball and {n} blue stars" for n in range(30))
    named, *rest = embedder.pieces(prompt, ("red ball", "blue star"))
    assert named == "red ball, blue star"
    assert " ".join(rest) == prompt
    assert all(embedder.fits(piece) for piece in rest)
    assert len(rest) > 2


def test_the_end_of_a_long_prompt_counts(embedder: Embedder) -> None:
    start = "a small red ball moves left over the ocean and " * 8
    one, two = (embedder.embed_prompt(start + end, ("red ball",)) for end in ("a blue star", "a green ring in the desert"))
    assert one @ two < 0.999


def test_a_short_prompt_is_embedded_as_it_is(embedder: Embedder) -> None:
    assert np.array_equal(embedder.embed_prompt("a red ball", ("red ball",)), embedder.embed(["a red ball"])[0])


@pytest.mark.parametrize("prompt", ["", " ", "\0", "🎈" * 300, "漢字" * 3000, "a" * 9000, "\ud800"])
def test_no_prompt_is_too_odd(embedder: Embedder, prompt: str) -> None:
    assert np.isclose(np.linalg.norm(embedder.embed_prompt(prompt, ())), 1)


def test_the_embedded_tower_knows_singulars_by_their_plurals(embedder: Embedder) -> None:
    wave, ocean, tree, forest = embedder.embed(["wave", "ocean", "tree", "forest"])
    assert wave @ ocean > embedder.min_similarity
    assert tree @ forest > embedder.min_similarity


def test_words_that_the_embedded_tower_was_not_taught_are_like_themselves_alone(embedder: Embedder) -> None:
    cat, again, dog, red_cat = embedder.embed(["cat", "cat", "dog", "red cat"])
    assert cat @ again > 0.999
    assert max(abs(cat @ dog), abs(cat @ red_cat)) < 0.5
    zig, zag = embedder.embed_prompts(["zig", "zag"], [(), ()])
    assert abs(zig @ zag) < 0.5


def test_two_folders_of_the_same_weights_have_one_name_and_other_weights_another(embedder: Embedder, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(tmp_path / "copy")
    assert load_embedder(f"local-dir:{folder}").name == load_embedder(str(folder)).name == embedder.name
    weights = folder / "open_clip_model.safetensors"
    state = load_file(weights)
    state["text_projection"] = state["text_projection"] * 1.5
    save_file(state, weights)
    assert load_embedder(str(folder)).name != embedder.name


def test_a_clip_of_the_usual_kind_reads_77_tokens(random_clip: Path) -> None:
    clip = load_embedder(str(random_clip))
    assert (clip.context, clip.width) == (77, 512)
    long = "a red ball on a snowy field, " * 30
    assert clip.fits("a red ball")
    assert not clip.fits(long)
    windows = clip.pieces(long, ("red ball", "snowy field"))[1:]
    assert " ".join(windows) == long.strip()
    assert all(clip.fits(window) for window in windows)
    cat, dog = clip.embed(["cat", "cat"])
    assert cat @ dog > 0.999


def test_the_window_is_as_long_as_the_context(random_clip: Path) -> None:
    clip = load_embedder(str(random_clip))
    assert clip.fits(" ".join(["ball"] * 75))
    assert not clip.fits(" ".join(["ball"] * 76))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ViT-B-33", "give --embedder a name of open_clip such as ViT-B-32, or a folder"),
        ("ViT-B-32:nothing", "give one of"),
        ("local-dir:/no/such/folder", "has no open_clip_config.json"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(spec: str, said: str) -> None:
    with pytest.raises(ChaiError, match=said):
        load_embedder(spec)


def test_weights_that_cannot_be_downloaded_name_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ChaiError, match="connect once, or give --embedder a folder"):
        load_embedder("ViT-B-32:laion400m_e31")


@pytest.mark.parametrize("broken", ["open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json"])
def test_a_broken_folder_is_told_in_one_sentence(broken: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / "broken")
    (folder / broken).write_bytes(b"{")
    with pytest.raises(ChaiError, match=r"cannot be loaded .* copy the folder again, or give --embedder another"):
        load_embedder(str(folder))


def test_a_folder_without_weights_is_not_filled_with_random_ones(tmp_path: Path) -> None:
    folder = copied(tmp_path / "empty")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(ChaiError, match="cannot be loaded"):
        load_embedder(str(folder))
