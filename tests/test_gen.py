"""`chai gen`, line by line of what a batch must do, on a tiny random model of the real classes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from chai_cli.backbones.base import Look, Text
from chai_cli.backbones.wan import WanBackbone
from chai_cli.report import read_rows
from chai_cli.video import read_comment, read_frames
from tests.conftest import DENSE, SMALL, rows_of, videos_of

Gen = Callable[..., Result]
HOSTILE = [
    "a\0b NUL",
    "../../etc/passwd",
    "CON",
    '<script>alert(1)</script> & "quotes" $(reboot) `x`',
    "مربع أحمر يتحرك 🟥 红色的球",
    "=;#\\ [red]not markup[/red] %s {x}",
    "long " * 2000,
    "-- --out /tmp",
    "\u202eright to left",
]


def test_each_prompt_becomes_a_playable_mp4_and_a_row(gen: Gen, tmp_path: Path) -> None:
    result = gen(["a red ball", "# comment", "a blue star"])
    assert result.exit_code == 0, result.output
    assert videos_of(tmp_path / "out") == ["0001-a-red-ball.mp4", "0002-a-blue-star.mp4"]
    rows = rows_of(tmp_path / "out")
    assert [row["prompt"] for row in rows] == ["a red ball", "a blue star"]
    row = rows[0]
    assert {"text", "retrieval", "denoise", "decode", "write", "total"} == set(row["seconds"])
    assert (row["status"], row["steps"], row["model_calls"], row["method"]) == ("done", 2, 4, "dense")
    assert row["peak_memory_mib"] > 0
    assert row["versions"]["diffusers"]
    frames = read_frames(tmp_path / "out" / "0001-a-red-ball.mp4")
    assert frames.shape == (9, 256, 256, 3)
    assert "2 rendered" in result.output


def test_mp4_streams_from_the_first_byte_and_is_yuv420p(gen: Gen, tmp_path: Path) -> None:
    gen(["a red ball"])
    data = (tmp_path / "out" / "0001-a-red-ball.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    import imageio_ffmpeg

    meta = next(imageio_ffmpeg.read_frames(str(tmp_path / "out" / "0001-a-red-ball.mp4")))
    assert meta["pix_fmt"].startswith("yuv420p")
    assert meta["codec"] == "h264"


def test_second_run_skips_everything_without_loading_the_model(
    gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gen(["a", "b"])
    monkeypatch.setattr(WanBackbone, "__init__", lambda *a: pytest.fail("the model was loaded"))
    result = gen(["a", "b"])
    assert result.exit_code == 0
    assert "0 rendered, 2 skipped" in result.output


@pytest.mark.parametrize("change", [("--seed", "9"), ("--width", "96"), ("--steps", "3"), ("--scale", "1"), ("--no-metadata",)])
def test_a_changed_request_renders_again(gen: Gen, tmp_path: Path, change: tuple[str, ...]) -> None:
    gen(["a"])
    before = (tmp_path / "out" / "0001-a.mp4").read_bytes()
    assert "render 0001-a.mp4: replaces the video that is there" in gen(["a"], *change, "--dry-run").output
    result = gen(["a"], *change)
    assert "1 rendered" in result.output
    assert (tmp_path / "out" / "0001-a.mp4").read_bytes() != before


def test_a_new_prompt_renders_alone_and_a_deleted_video_again(gen: Gen, tmp_path: Path) -> None:
    gen(["a", "b"])
    (tmp_path / "out" / "0001-a.mp4").unlink()
    result = gen(["a", "b", "c"])
    assert "2 rendered, 1 skipped" in result.output
    assert len(videos_of(tmp_path / "out")) == 3


@pytest.mark.parametrize("left", [0, 500])
def test_a_video_that_was_cut_off_renders_again(gen: Gen, tmp_path: Path, left: int) -> None:
    gen(["a"])
    file = tmp_path / "out" / "0001-a.mp4"
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert "1 rendered" in gen(["a"]).output
    assert file.read_bytes() == whole


def test_a_lost_report_does_not_lose_the_videos(gen: Gen, tmp_path: Path) -> None:
    gen(["a", "b"])
    (tmp_path / "out" / "report.jsonl").write_text("garbage\n")
    cut = tmp_path / "out" / "0002-b.mp4"
    cut.write_bytes(cut.read_bytes()[:-200])
    assert "1 rendered, 1 skipped" in gen(["a", "b"]).output


def test_a_reader_that_goes_away_is_no_failure(gen: Gen, tiny_folder: Path, tmp_path: Path) -> None:
    gen(["a", "b"])
    command = f"{sys.executable} -m chai_cli gen {tmp_path / 'prompts.txt'} --out {tmp_path / 'out'} --model {tiny_folder}"
    script = f"set -o pipefail; {command} {' '.join(SMALL)} --json | true"
    assert subprocess.run(["bash", "-c", script], capture_output=True).returncode == 0


def test_overwrite_renders_the_same_bytes_again(gen: Gen, tmp_path: Path) -> None:
    gen(["a"])
    before = (tmp_path / "out" / "0001-a.mp4").read_bytes()
    assert "1 rendered" in gen(["a"], "--overwrite").output
    assert (tmp_path / "out" / "0001-a.mp4").read_bytes() == before


def test_same_request_gives_the_same_bytes_wherever_it_stands(gen: Gen, tmp_path: Path) -> None:
    gen(["a red ball", "other", "a red ball"])
    files = [(tmp_path / "out" / name).read_bytes() for name in ("0001-a-red-ball.mp4", "0003-a-red-ball.mp4")]
    assert files[0] == files[1]
    assert files[0] != (tmp_path / "out" / "0002-other.mp4").read_bytes()


def test_hostile_prompts_render_under_sensible_names(gen: Gen, tmp_path: Path) -> None:
    result = gen(HOSTILE)
    assert result.exit_code == 0, result.output
    assert len(videos_of(tmp_path / "out")) == len(HOSTILE)
    assert not (tmp_path / "etc").exists()
    for name, prompt in zip(videos_of(tmp_path / "out"), HOSTILE, strict=True):
        assert read_comment(tmp_path / "out" / name)["prompt"] == prompt.strip()
        assert len(name.encode()) < 200


def test_a_full_disk_is_a_failed_row_that_says_so(gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        log = tmp_path / "out" / ".chai" / "run.log"
        log.unlink()
        log.mkdir()  # the log cannot be written either
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("chai_cli.render.save_file", full)
    result = gen(["a"])
    assert result.exit_code == 1
    assert "is full; free some space and run again" in rows_of(tmp_path / "out")[0]["why"]


def test_json_files_are_pointed_to_jsonl(gen: Gen, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"prompt": "a"}')
    result = gen(tmp_path / "p.json")
    assert result.exit_code == 2
    assert ".jsonl" in result.stderr


def test_a_prompt_longer_than_the_model_reads_is_told(gen: Gen, tmp_path: Path) -> None:
    result = gen(["a red ball", "word " * 1000])
    assert "the end of these prompts does not reach the model: 2 (" in result.stderr
    assert [row["tokens_cut"] > 0 for row in rows_of(tmp_path / "out")] == [False, True]


def test_bad_lines_are_rows_and_the_rest_render(gen: Gen, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{oops\n{"prompt": "b", "height": 60}\n{"prompt": "c"}\n')
    result = gen(file)
    assert result.exit_code == 1
    assert videos_of(tmp_path / "out") == ["0001-a.mp4", "0004-c.mp4"]
    why = {row["index"]: row["why"] for row in rows_of(tmp_path / "out") if row["status"] == "failed"}
    assert why[2].startswith("line 2: not JSON")
    assert why[3] == "height and width must be multiples of 16, not 60 and 64"


def test_a_score_that_the_model_does_not_know_is_a_failed_row(gen: Gen, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a red ball", "aesthetic_score": 6}\n{"prompt": "a blue star"}\n')
    foreseen = gen(file, "--dry-run")
    assert foreseen.exit_code == 1
    assert "has no aesthetic score; leave out aesthetic_score" in foreseen.output.replace("\n", " ")
    for _ in range(2):  # also when all else is there
        assert gen(file).exit_code == 1
        rows = {row["index"]: row["status"] for row in rows_of(tmp_path / "out")}
        assert rows == {1: "failed", 2: "done"}


def test_a_model_that_moved_or_is_called_otherwise_finds_its_videos(
    chai: Callable[..., Result], gen: Gen, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gen(["a"])
    monkeypatch.chdir(tiny_folder.parent)
    moved = chai("gen", tmp_path / "prompts.txt", "--out", tmp_path / "out", "--model", f"./{tiny_folder.name}", *SMALL, *DENSE)
    assert "0 rendered, 1 skipped" in moved.output


def test_one_failure_is_one_row_and_memory_errors_say_what_to_change(
    gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    velocity = WanBackbone.velocity

    def fails(self: WanBackbone, latents: torch.Tensor, *rest: object) -> object:
        if latents.shape[-1] == 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return velocity(self, latents, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(WanBackbone, "velocity", fails)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "width": 96}\n{"prompt": "c"}\n')
    result = gen(file)
    assert result.exit_code == 1
    assert [row["status"] for row in rows_of(tmp_path / "out")] == ["done", "failed", "done"]
    assert "out of memory at 96x64, 9 frames: try --offload model" in rows_of(tmp_path / "out")[1]["why"]
    assert "OutOfMemoryError" in (tmp_path / "out" / ".chai" / "run.log").read_text()


def test_a_failed_decode_is_repeated_without_sampling(gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gen(["a"])
    expected = (tmp_path / "out" / "0001-a.mp4").read_bytes()
    (tmp_path / "out" / "0001-a.mp4").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(WanBackbone, "decode", lambda *a: (_ for _ in ()).throw(MemoryError()))
        assert gen(["a"]).exit_code == 1
    with monkeypatch.context() as patch:
        patch.setattr(WanBackbone, "velocity", lambda *a: pytest.fail("sampled again"))
        assert gen(["a"]).exit_code == 0
    assert (tmp_path / "out" / "0001-a.mp4").read_bytes() == expected
    row = rows_of(tmp_path / "out")[-1]
    assert (row["model_calls"], row["why"]) == (0, "decoded the latents kept from an earlier run")
    assert not list((tmp_path / "out" / ".chai").glob("*.safetensors"))


def test_kept_latents_of_another_request_are_not_used(gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(WanBackbone, "decode", lambda *a: (_ for _ in ()).throw(MemoryError()))
        gen(["a"])
    assert gen(["a"], "--seed", "4").exit_code == 0
    assert rows_of(tmp_path / "out")[-1]["model_calls"] == 4


def test_values_that_are_no_numbers_fail_instead_of_a_black_video(
    gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WanBackbone, "velocity", lambda self, latents, *a: (latents * float("nan"), 1))
    assert gen(["a"]).exit_code == 1
    assert "no numbers" in rows_of(tmp_path / "out")[0]["why"]
    assert not videos_of(tmp_path / "out")


def test_batches_longer_than_one_wave_of_texts_render_in_order(
    gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chai_cli.batch.WAVE", 2)
    assert gen(["a", "b", "a", "c", "d"]).exit_code == 0
    assert [row["prompt"] for row in rows_of(tmp_path / "out")] == ["a", "b", "a", "c", "d"]


def test_a_prompt_the_text_encoder_cannot_take_is_one_row(gen: Gen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = WanBackbone.encode

    def fails(self: WanBackbone, prompt: str, look: Look) -> Text:
        if prompt == "b":
            raise RuntimeError("index out of range\nin self")
        return encode(self, prompt, look)

    monkeypatch.setattr(WanBackbone, "encode", fails)
    assert gen(["a", "b", "c"]).exit_code == 1
    why = {row["prompt"]: row["why"] for row in rows_of(tmp_path / "out")}
    assert why == {"a": "", "b": "RuntimeError: index out of range (see .chai/run.log)", "c": ""}


def test_limit_and_dry_run(gen: Gen, tmp_path: Path) -> None:
    gen(["a"])
    result = gen(["a", "b", "c"], "--limit", "2", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["render 0002-b.mp4", "1 to render, 1 already there, 0 bad lines"]
    assert videos_of(tmp_path / "out") == ["0001-a.mp4"]


def test_dry_run_of_a_huge_file_is_quick_and_writes_nothing(gen: Gen, tmp_path: Path) -> None:
    file = tmp_path / "huge.txt"
    file.write_text("a red ball\n" * 100_000)
    result = gen(file, "--dry-run")
    assert result.stdout.splitlines()[-1] == "100000 to render, 0 already there, 0 bad lines"
    assert not (tmp_path / "out").exists()


def test_json_prints_the_rows_and_nothing_else_to_stdout(gen: Gen, tmp_path: Path) -> None:
    result = gen(["a", "b"], "--json")
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["a", "b"]
    assert [json.loads(line)["status"] for line in gen(["a", "b"], "--json").stdout.splitlines()] == ["skipped"] * 2


def test_quiet_prints_nothing_when_all_is_well(gen: Gen) -> None:
    result = gen(["a"], "--quiet")
    assert result.exit_code == 0
    assert result.output == ""


def test_standard_input(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = chai("gen", "-", "--out", out, "--model", tiny_folder, *SMALL, *DENSE, stdin='{"prompt": "a", "seed": 3}\n')
    assert result.exit_code == 0, result.output
    assert rows_of(out)[0]["seed"] == 3


def test_metadata_repeats_the_video_and_can_be_left_out(chai: Callable[..., Result], gen: Gen, tmp_path: Path) -> None:
    gen(['it\'s a "red" ball $HOME'], "--seed", "3")
    file = tmp_path / "out" / videos_of(tmp_path / "out")[0]
    shown = chai("show", file).stdout
    assert "--seed 3" in shown
    assert "printf" in shown
    assert json.loads(chai("show", file, "--json").stdout)["prompt"] == 'it\'s a "red" ball $HOME'
    gen(['it\'s a "red" ball $HOME'], "--seed", "3", "--no-metadata")
    result = chai("show", file)
    assert result.exit_code == 2
    assert "carries no settings" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "nonsense"), "no model named 'nonsense'"),
        (("--method", "magic"), "no method named 'magic'"),
        (("--device", "cuda:99"), "this machine has no device 'cuda:99'"),
        (("--device", "warp"), "this machine has no device 'warp'"),
        (("--offload", "model", "--device", "cpu"), "needs a GPU"),
        (("--seed", "-1"), "--seed must be between 0 and"),
        (("--num-inference-steps", "0"), "--num-inference-steps must be between 1 and"),
        (("--lora", "/missing.safetensors"), "cannot use --lora /missing.safetensors: there is no file"),
        (("--attention-backend", "telepathy"), "cannot use --attention-backend telepathy"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(gen: Gen, options: tuple[str, ...], said: str) -> None:
    result = gen(["a"], *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_broken_model_folders_are_one_sentence(chai: Callable[..., Result], tiny_folder: Path, tmp_path: Path) -> None:
    import shutil

    prompts = tmp_path / "p.txt"
    prompts.write_text("a")
    empty = tmp_path / "empty"
    empty.mkdir()
    cut = tmp_path / "cut"
    shutil.copytree(tiny_folder, cut)
    weights = next((cut / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    harms = [
        (empty, "no readable model_index.json"),
        (cut, "cannot load"),
        (other, "is a FluxPipeline"),
        (bare, "is not whole"),
    ]
    for folder, said in harms:
        result = chai("gen", prompts, "--out", tmp_path / "out", "--model", folder)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output


def test_unreachable_hub_is_one_sentence(chai: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    prompts = tmp_path / "p.txt"
    prompts.write_text("a")
    result = chai("gen", prompts, "--out", tmp_path / "out", "--model", "wan2.1-t2v-1.3b")
    assert result.exit_code == 2
    assert "cannot download Wan-AI/Wan2.1-T2V-1.3B-Diffusers: the hub cannot be reached" in result.stderr
    assert "Check the connection, or give --model a folder" in result.stderr


def test_a_file_without_prompts_is_wrong_usage(gen: Gen, tmp_path: Path) -> None:
    for content in (b"", b"\n\n# only a comment\n", b"\xef\xbb\xbf"):
        file = tmp_path / "empty.txt"
        file.write_bytes(content)
        result = gen(file)
        assert result.exit_code == 2
        assert "holds no prompts" in result.stderr


def test_a_folder_that_cannot_be_written_is_one_sentence(gen: Gen, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file stands where the folder should be")
    result = gen(["a"])
    assert result.exit_code == 2
    assert "choose another --out" in result.stderr


def test_two_runs_do_not_share_a_folder(gen: Gen, tmp_path: Path) -> None:
    from filelock import FileLock

    gen(["a"])
    with FileLock(tmp_path / "out" / ".chai" / "lock"):
        result = gen(["a", "b"])
    assert result.exit_code == 2
    assert "another chai gen is writing" in result.stderr


def test_a_torn_last_line_of_the_report_is_dropped(gen: Gen, tmp_path: Path) -> None:
    gen(["a"])
    report = tmp_path / "out" / "report.jsonl"
    with report.open("ab") as file:
        file.write(b'{"id": "0002-b", "status": "do')
    assert "1 rendered, 1 skipped" in gen(["a", "b"]).output
    assert [row["prompt"] for row in read_rows(report)] == ["a", "b"]
    assert len(report.read_text().splitlines()) == 2


def test_torn_files_of_a_killed_run_are_cleared(gen: Gen, tmp_path: Path) -> None:
    gen(["a"])
    torn = tmp_path / "out" / ".chai" / "0002-b.part.mp4"
    torn.write_bytes(b"half")
    gen(["a", "b"])
    assert not torn.exists()


@pytest.mark.parametrize("limit", [2500, 20_000])
def test_a_disk_that_takes_no_more_keeps_what_is_there(gen: Gen, tiny_folder: Path, tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands for the full disk: first the report cannot grow, then only videos are too large."""
    gen(["a red ball"])
    before = (tmp_path / "out" / "0001-a-red-ball.mp4").read_bytes()
    prompts = tmp_path / "more.txt"
    prompts.write_text("a red ball\nb\nc\n")
    command = [sys.executable, "-m", "chai_cli", "gen", str(prompts), "--out", str(tmp_path / "out"), *SMALL, *DENSE]
    process = subprocess.run(
        [*command, "--model", str(tiny_folder), "--scale", "16"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert process.returncode in (1, 2), process.stderr
    assert "Traceback" not in process.stderr
    assert "failed" in process.stderr or "free some space" in process.stderr
    assert videos_of(tmp_path / "out") == ["0001-a-red-ball.mp4"]
    assert (tmp_path / "out" / "0001-a-red-ball.mp4").read_bytes() == before
    assert "2 rendered, 1 skipped" in gen(prompts).output


def test_lora_changes_the_video_and_the_fingerprint(gen: Gen, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from diffusers import WanPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = WanPipeline.from_pretrained(tiny_folder)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    WanPipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    gen(["a"])
    plain = (tmp_path / "out" / "0001-a.mp4").read_bytes()
    result = gen(["a"], "--lora", f"{tmp_path / 'lora'}:0.5")
    assert "1 rendered" in result.output, result.output
    assert (tmp_path / "out" / "0001-a.mp4").read_bytes() != plain


def test_rendering_in_bfloat16_and_with_tiles_works(gen: Gen, tmp_path: Path) -> None:
    assert gen(["a"], "--dtype", "bfloat16", "--vae-tiling", "--attention-backend", "native").exit_code == 0
