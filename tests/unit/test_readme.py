"""What the README tells to type exists, and what it shows is valid."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import offload
from offload.config import read_config

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "README.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("bash")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--") and word != "--help"}


def check_script(words: list[str]) -> None:
    script = next(word for word in words if word.endswith(".py"))
    source = (REPOSITORY / script).read_text()
    unknown = {flag for flag in flags_of(words[words.index(script) :]) if f'"{flag}"' not in source}
    assert not unknown, f"{script} has no {unknown}"


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_names_what_is_there(words, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    match words:
        case ["make", target, *rest]:
            assert f"\n{target}:" in MAKEFILE
            if target == "train":
                check_script(["examples/train_lm.py", *shlex.split(" ".join(rest).removeprefix("ARGS="))])
        case [".venv/bin/python", "-c", code]:
            exec(compile(code, "README.md", "exec"), {})
        case [".venv/bin/python" | ".venv/bin/torchrun", *rest]:
            check_script(rest)
        case [".venv/bin/offload", command, *_]:
            assert (REPOSITORY / f"offload/cli/{command}.py").exists()
        case ["pip", "install", "."]:
            assert (REPOSITORY / "setup.py").exists()
        case _:
            pytest.fail("nothing here knows this command: say how to check it")


@pytest.mark.parametrize("text", blocks("json"))
def test_a_config_is_valid(text):
    assert read_config(json.loads(text), probe_storage=False).uses_nvme


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_uses_only_what_is_exported(text):
    names = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "offload"
    }
    assert names and names <= set(offload.__all__)


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (REPOSITORY / target).exists(), target
