"""Defaults from the environment and from files, and what counts most."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

from chai_cli.app import app
from chai_cli.config import PATHS, Setting, collect, commands, default_map, longest, options, unknown_variables
from chai_cli.errors import ChaiError

COMMAND = typer.main.get_command(app)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the project's file and the user's, and stands in a folder below the project's."""
    monkeypatch.setattr("chai_cli.config.user_file", lambda: tmp_path / "user.toml")
    (tmp_path / "project" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "below")

    def files(project: str = "", user: str = "") -> None:
        (tmp_path / "project" / "chai.toml").write_text(project)
        (tmp_path / "user.toml").write_text(user)

    return files


def of(command: str) -> dict[str, Setting]:
    return {one.option: one for one in collect(COMMAND) if one.command == command}


def test_a_key_at_the_top_is_for_every_command_that_has_the_option(write: Callable[..., None], tmp_path: Path) -> None:
    write("model = 'wan2.1-t2v-1.3b'\nseed = 7\n")
    assert {command for command in ("gen", "cache warm", "bench", "stats", "cache ls") if "model" in of(command)} == {
        "gen",
        "cache warm",
        "bench",
    }
    assert of("gen")["seed"] == Setting("gen", "seed", "seed", "7", str(tmp_path / "project" / "chai.toml"))


def test_a_table_is_for_one_command_and_counts_more_than_the_top(write: Callable[..., None]) -> None:
    write("steps = 9\n[gen]\nnum_inference_steps = 3\nquiet = true\nlora = ['a', 'b']\n[cache.warm]\nlimit = 2\n")
    gen = of("gen")
    assert (gen["num-inference-steps"].value, gen["quiet"].value, gen["lora"].value) == ("3", "true", ["a", "b"])
    assert of("bench")["num-inference-steps"].value == "9"
    assert of("cache warm")["limit"].value == "2"
    assert "limit" not in gen


def test_a_table_of_a_group_is_for_all_its_commands(write: Callable[..., None]) -> None:
    write("[cache]\ntenant = 'anna'\nlimit = 5\n[cache.warm]\nlimit = 2\n")
    assert of("cache warm")["tenant"].value == "anna"
    assert (of("cache warm")["limit"].value, of("cache ls")["limit"].value) == ("2", "5")
    assert "tenant" not in of("gen")


def test_paths_of_a_project_count_from_its_folder(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAI_CACHE")
    write(
        "cache = 'kept'\nmodel = './tiny'\n[gen]\nout = '../videos'\nlora = ['./style', 'org/style']\n",
        "[bench]\nout = 'here'\n",
    )
    gen, project = of("gen"), tmp_path / "project"
    assert [gen[name].value for name in ("cache", "model", "out")] == [
        str(project / "kept"),
        str(project / "tiny"),
        str(tmp_path / "videos"),
    ]
    assert gen["lora"].value == [str(project / "style"), "org/style"]
    assert of("bench")["out"].value == "here"  # the user's own file is in no folder of work
    write("cache = '~/kept'\nmodel = 'embedded'\n", "[bench]\nout = '~/bench'\n")
    assert of("bench")["out"].value == str(Path.home() / "bench")
    assert (of("gen")["cache"].value, of("gen")["model"].value) == (str(Path.home() / "kept"), "embedded")


def test_every_option_that_is_a_path_is_known_as_one() -> None:
    found = set()
    for _, command in commands(COMMAND):
        hints = get_type_hints(inspect.unwrap(command.callback))
        found |= {longest(param) for param in options(command).values() if "Path" in str(hints[param.name])}
    assert found == PATHS


def test_the_environment_counts_more_than_the_project_and_that_more_than_the_user(
    write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("seed = 2\nfps = 2\n", "seed = 3\nfps = 3\nheight = 3\n")
    monkeypatch.setenv("CHAI_SEED", "1")
    gen = of("gen")
    assert [gen[name].value for name in ("seed", "fps", "height")] == ["1", "2", "3"]
    assert gen["seed"].source == "CHAI_SEED"


def test_every_name_of_an_option_works(write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    write("steps = 4\n")
    assert of("gen")["num-inference-steps"].value == "4"
    monkeypatch.setenv("CHAI_STEPS", "5")
    assert of("gen")["num-inference-steps"].value == "5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepps = 3", "no command has an option 'stepps'; did you mean 'steps'?"),
        ("[gem]\nsteps = 3", "there is no command 'gem'; did you mean 'gen'?"),
        ("[stats]\nsteps = 3", "stats has no option 'steps'"),
        ("steps = 'many'", "num-inference-steps is 'many': "),
        ("scheduler = 'magic'", "scheduler is 'magic': "),
        ("steps = [1, 2]", "num-inference-steps is one value, not [1, 2]"),
        ("steps = = 3", "is no TOML"),
        ("limit = 0", "limit is '0': "),
        ("[gen]\nnotify = 'rm -r x'", "notify runs a command and may not come from a project"),
        ("[cache]\nlimits = 3", "cache has no option 'limits'; did you mean 'limit'?"),
        ("[cache]\nyes = true", "yes would be for every cache command; put it under the one that is meant"),
        ("overwrite = true", "overwrite would be for every command; put it under the one that is meant"),
        ("[gen]\nno-galery = true", "did you mean 'no-gallery'?"),
    ],
)
def test_what_cannot_be_is_told_with_its_file(write: Callable[..., None], text: str, said: str) -> None:
    write(text)
    with pytest.raises(ChaiError) as caught:
        collect(COMMAND)
    assert "chai.toml" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_user_may_be_notified_and_flags_have_two_names(write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    write("[gen]\nno-metadata = true\nlora = 'my style.safetensors'\n", "notify = 'true'\n")
    monkeypatch.setenv("CHAI_NO_GALLERY", "1")
    gen = of("gen")
    assert (gen["metadata"].value, gen["gallery"].value, gen["notify"].value) == ("false", "false", "true")
    assert gen["lora"].value == ["my style.safetensors"]
    monkeypatch.setenv("CHAI_OVERWRITE", "1")
    with pytest.raises(ChaiError, match="CHAI_OVERWRITE would be for every command"):
        collect(COMMAND)


@pytest.mark.parametrize("command", [("--help",), ("--version",), ("config",), ("doctor", "--no-render"), ("stats",)])
def test_a_broken_file_does_not_stop_what_helps_to_find_it(write: Callable[..., None], command: tuple[str, ...]) -> None:
    write("stepps = 3\n")
    made = subprocess.run([sys.executable, "-m", "chai_cli", *command], capture_output=True, text=True)
    assert made.returncode == {"config": 2, "doctor": 1, "stats": 2}.get(command[0], 0), made.stderr
    assert ("did you mean 'steps'" in made.stdout + made.stderr) == (not command[0].startswith("-"))
    assert "Traceback" not in made.stderr


def test_a_variable_that_cannot_be_is_told(write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    monkeypatch.setenv("CHAI_FPS", "fast")
    with pytest.raises(ChaiError, match="CHAI_FPS is 'fast': "):
        collect(COMMAND)


def test_the_command_line_counts_most(write: Callable[..., None], tmp_path: Path) -> None:
    write("[models]\njson = true\n[gen]\nlimit = 1\ndry-run = true\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red ball\na blue star\na green ring\n")

    def run(*options: str) -> str:
        command = [
            sys.executable,
            "-m",
            "chai_cli",
            "gen",
            str(prompts),
            "--out",
            str(tmp_path / "out"),
            "--no-cache",
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "1 to render" in run()
    assert "2 to render" in run("--limit", "2")


def test_config_shows_what_is_set_and_where_it_is_from(write: Callable[..., None], tmp_path: Path) -> None:
    write("[gen]\nseed = 5\n")
    command = [sys.executable, "-m", "chai_cli", "config"]
    row = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout.splitlines()[0])
    assert (row["command"], row["option"], row["value"]) == ("gen", "seed", "5")
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "project" / "chai.toml") in said
    assert "--seed" in said


def test_config_names_variables_that_are_none(write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    monkeypatch.setenv("CHAI_MODLE", "x")
    monkeypatch.setenv("CHAI_RUN_EXIT", "0")
    assert unknown_variables(COMMAND) == ["CHAI_MODLE is no option of chai; did you mean CHAI_MODEL?"]


def test_the_map_is_by_command_and_parameter() -> None:
    made = default_map([Setting("cache warm", "limit", "limit", "2", "x"), Setting("gen", "steps", "steps", "3", "x")])
    assert made == {"cache": {"warm": {"limit": "2"}}, "gen": {"steps": "3"}}
