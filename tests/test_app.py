"""The command line itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["gen", "--help"], ["models", "--help"], ["show", "--help"], ["stats", "--help"], ["cache", "warm", "--help"]],
)
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; from chai_cli.app import app\ntry: app({arguments!r})\nexcept SystemExit: print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "False"


def test_help_answers_quickly() -> None:
    """0.3 s is what it takes on an idle machine; CPU seconds, best of three, leave room for a busy or slow one."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "chai_cli", "gen", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 1.0


def test_help_has_examples(chai: Callable[..., Result]) -> None:
    assert "chai gen samples/prompts.txt --out videos" in chai("gen", "--help").output


def test_models_lists_what_is_known(chai: Callable[..., Result]) -> None:
    rows = [json.loads(line) for line in chai("models", "--json").stdout.splitlines()]
    assert [row["name"] for row in rows] == [
        "embedded",
        "embedded-opensora",
        "wan2.1-t2v-1.3b",
        "wan2.1-t2v-14b",
        "opensora-1.2",
    ]
    assert rows[0]["on_disk"]
    assert "wan2.1-t2v-14b" in chai("models").stdout


def test_version(chai: Callable[..., Result]) -> None:
    assert chai("--version").stdout.startswith("chai 0.")


def test_main_prints_one_sentence_for_users_errors() -> None:
    process = subprocess.run([sys.executable, "-m", "chai_cli", "show", "/none.mp4"], capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "chai: there is no file /none.mp4\n"


def test_a_torchvision_that_does_not_fit_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import chai_cli.app as app

    def fail(cause: str) -> None:
        try:
            raise RuntimeError(cause)
        except RuntimeError as error:
            raise ImportError("Could not import module 'PreTrainedModel'") from error

    monkeypatch.setattr(app, "collect", lambda command: fail("operator torchvision::nms does not exist"))
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == 2
    assert "install both from one place" in capsys.readouterr().err
    monkeypatch.setattr(app, "collect", lambda command: fail("something else"))
    with pytest.raises(ImportError):
        app.main()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gen x --model wan", {"wan2.1-t2v-1.3b", "wan2.1-t2v-14b"}),
        ("cache warm x --model ./som", {"./some/"}),
        ("gen x --method ni", {"nirvana", "nirvana+chai"}),
        ("gen x --cache-policy lf", {"lfu"}),
        ("gen x --resolution 4", {"480p"}),
        ("cache warm x --duration ", {"2s", "4s", "8s", "16s"}),
        ("cache ev", {"evict"}),
    ],
)
def test_the_shell_completes(typed: str, offered: set[str], tmp_path: Path) -> None:
    """As bash asks for it, see `chai --show-completion bash`."""
    (tmp_path / "some").mkdir()
    words = f"chai {typed}"
    asked = {"_CHAI_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", "import sys; sys.argv = ['chai']; from chai_cli.app import main; main()"]
    made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **asked}, cwd=tmp_path)
    assert set(made.stdout.split()) == offered, made.stderr
