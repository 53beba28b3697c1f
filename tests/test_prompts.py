"""Prompt files: every format, every nuisance."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chai_cli.errors import ChaiError
from chai_cli.prompts import Settings, read_prompts, slug


def read(tmp_path: Path, content: bytes | str, suffix: str = ".txt"):
    file = tmp_path / f"prompts{suffix}"
    file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return read_prompts(str(file), Settings(seed=5))


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_txt_skips_blank_and_comment_lines_with_any_line_ending(tmp_path: Path, ending: str, bom: bytes) -> None:
    text = ending.join(["# note", "a red ball", "", "  # indented note", "  a star  ", ""])
    requests, bad = read(tmp_path, bom + text.encode())
    assert [(r.index, r.line, r.prompt) for r in requests] == [(1, 2, "a red ball"), (2, 5, "a star")]
    assert not bad


def test_utf16_with_bom_is_read(tmp_path: Path) -> None:
    requests, _ = read(tmp_path, "un ballon rouge é\n".encode("utf-16"))
    assert requests[0].prompt == "un ballon rouge é"


def test_other_encodings_are_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match=r"not UTF-8 text \(line 2\)"):
        read(tmp_path, b"fine\ncaf\xe9\n")


def test_jsonl_overrides_and_bad_lines_by_number(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "seed": 3, "guidance_scale": 2.5, "id": "x"}',
        "{not json",
        '{"prompt": "b", "seed": "many"}',
        '{"prompt": "b", "sede": 1}',
        '{"seed": 1}',
        '"just text"',
        "[1]",
        '{"prompt": "c", "height": 64.5}',
        '{"prompt": "c", "num_inference_steps": 0}',
        '{"prompt": "c", "seed": 1e400}',
        '{"prompt": "c", "seed": true}',
        '{"prompt": "d", "width": "64"}',
    ]
    requests, bad = read(tmp_path, "\n".join(lines), ".jsonl")
    assert [(r.index, r.prompt, r.settings.seed) for r in requests] == [(1, "a", 3), (6, "just text", 5), (12, "d", 5)]
    assert requests[0].settings.guidance_scale == 2.5
    assert requests[0].name == "0001-x"
    assert requests[2].settings.width == 64
    assert [b.line for b in bad] == [2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert "seed must be a whole number" in bad[1].why
    assert "unknown field 'sede'" in bad[2].why


def test_csv_with_quotes_and_empty_cells(tmp_path: Path) -> None:
    text = 'prompt,seed\n"a ball, red",7\n"two\nlines",\nc,1,2\n'
    requests, bad = read(tmp_path, text, ".csv")
    assert [(r.prompt, r.settings.seed) for r in requests] == [("a ball, red", 7), ("two\nlines", 5)]
    assert bad[0].why == "more cells than columns"


def test_csv_without_a_prompt_column_says_which_it_has(tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match="no column named prompt; its columns are text, seed"):
        read(tmp_path, "text,seed\na,1\n", ".csv")


def test_csv_with_an_unknown_column_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ChaiError, match="a column 'sede' that chai does not know; it knows prompt, id"):
        read(tmp_path, "prompt,sede\na,1\nb,2\n", ".csv")


@pytest.mark.parametrize("source", ["missing.txt", "."])
def test_unreadable_sources_are_one_sentence(tmp_path: Path, source: str) -> None:
    with pytest.raises(ChaiError, match=r"give a \.txt, \.jsonl or \.csv file"):
        read_prompts(str(tmp_path / source), Settings())


def test_names_are_unique_for_equal_prompts(tmp_path: Path) -> None:
    requests, _ = read(tmp_path, "same\nsame\nsame\n")
    assert [r.name for r in requests] == ["0001-same", "0002-same", "0003-same"]


def test_a_hundred_thousand_lines(tmp_path: Path) -> None:
    requests, _ = read(tmp_path, "a red ball\n" * 100_000)
    assert len({r.name for r in requests}) == 100_000


@given(st.text())
def test_slugs_are_safe_on_every_file_system(text: str) -> None:
    name = slug(text)
    assert 1 <= len(name) <= 60
    assert len(f"123456-{name}.latents.safetensors".encode("utf-8", "surrogatepass")) < 255
    assert not set(name) & set('/\\:*?"<>|\0. ')
    assert name == slug(text)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8))
def test_any_text_file_gives_a_request_or_nothing_for_each_line(lines: list[str]) -> None:
    from chai_cli.prompts import lines_of, rows_of

    text = "\n".join(lines)
    prompts = [row["prompt"] for _, _, row in rows_of(text, ".txt") if isinstance(row, dict)]
    assert prompts == [line for _, line in lines_of(text) if line.strip() and not line.lstrip().startswith("#")]


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_jsonl_and_csv_round_trip_any_prompt(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("round")
    (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    expected = [p.strip().encode("utf-8", "replace").decode() for p in prompts]
    assert [r.prompt for r in read_prompts(str(folder / "p.jsonl"), Settings())[0]] == expected
    plain = [p.encode("utf-8", "ignore").decode().replace("\0", "").replace("\r", " ") for p in prompts]
    plain = [p for p in plain if p.strip()]
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["prompt"], *([p] for p in plain)])
    (folder / "p.csv").write_text(buffer.getvalue(), "utf-8", newline="")
    assert [r.prompt for r in read_prompts(str(folder / "p.csv"), Settings())[0]] == [p.strip() for p in plain]


@given(st.binary(max_size=200), st.sampled_from([".txt", ".jsonl", ".csv"]))
def test_any_bytes_give_requests_bad_lines_or_one_sentence(tmp_path_factory, content: bytes, suffix: str) -> None:
    file = tmp_path_factory.getbasetemp() / f"any{suffix}"
    file.write_bytes(content)
    try:
        requests, bad = read_prompts(str(file), Settings())
    except ChaiError:
        return
    indices = [x.index for x in (*requests, *bad)]
    assert len(set(indices)) == len(indices)


def test_a_line_without_a_prompt_names_what_may_have_been_meant(tmp_path: Path) -> None:
    _, bad = read(tmp_path, '{"promt": "a"}\n{"seed": 1}', ".jsonl")
    assert [one.why for one in bad] == ["no prompt in this line, but an unknown field 'promt'", "no prompt in this line"]
