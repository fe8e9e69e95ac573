"""Every ``mlsys`` command of the README and the docs is one that there is, with options that it has."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.cli.main import build_app
from mlsys_core.errors import DeviceError
from mlsys_core.plugins import installed_plugins
from typer.main import get_command

from tests.docs.blocks import ROOT, SHELLS, Block, blocks_of, pages
from tests.docs.commands import commands, omissions, run_all

ROOT_COMMAND = get_command(build_app(installed_plugins()))
OF_PLUGINS = {"demo-command", "greet", "quiet"}  # what a page's own example brings; that page runs whole


def commands_of(block: Block) -> list[tuple[int, list[str]]]:
    """Return the lines of the page and the words of each ``mlsys`` command, redirections left out."""
    found = []
    text = block.text.replace("\\\n", "  ")
    for number, line in enumerate(text.split("\n")):
        for part in re.split(r"&&|\|(?!\|)|;", re.sub(r"(^|\s)#.*", "", line)):
            words = re.sub(r"\s\d?>{1,2}\s*\S+|\s<\s*\S+|\s&$", " ", part).strip().removeprefix("$ ")
            if re.match(r"([A-Z_]+=\S* )*mlsys ", words):
                found.append((block.line + number, shlex.split(words[words.index("mlsys ") :])))
    return found


COMMANDS = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}:{line}")
    for page in pages()
    for block in blocks_of(page.read_text(encoding="utf-8"))
    if block.language in SHELLS
    for line, words in commands_of(block)
]


def parse(command: Any, name: str, words: list[str], parent: Any = None) -> None:
    """Have a command read its arguments, and those of the commands below it; nothing runs."""
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        if not left and command.invoke_without_command:
            return
        below, sub, rest = command.resolve_command(context, left)
        parse(sub, below, rest, context)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_docs_is_one_that_there_is(words: list[str]) -> None:
    if OF_PLUGINS & {*words} or words[1:3] == ["serve", "demo"] or "--help" in words:
        return
    with suppress(DeviceError):  # this machine has no such device, which is found after all options were read
        parse(ROOT_COMMAND, "mlsys", words[1:])


def test_a_wrong_option_is_found() -> None:
    block = Block("bash", "x=1 # mlsys\nmlsys orca serve MODEL --no-such-option 3 > out.txt\n", 1)
    ((line, words),) = commands_of(block)
    assert (line, words[-2:]) == (2, ["--no-such-option", "3"])
    with pytest.raises(Exception, match="No such option"):
        parse(ROOT_COMMAND, "mlsys", words[1:])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_copied_has_no_prompt(page: Any) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language in SHELLS:
            assert not re.search(r"^\$ ", block.text, re.MULTILINE), f"line {block.line}"


@pytest.mark.timeout(1200)
def test_the_commands_of_reference_pages_run(tmp_path: Path, mlsys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally = run_all(tmp_path, mlsys)
    with capsys.disabled():
        print("\ncommands of README and the reference pages:")
        for name, count in tally.most_common():
            print(f"{count:4}  {name}")


def test_what_is_not_run_is_on_a_page() -> None:
    found = commands()
    for omission in omissions():
        assert any(omission.covers(command) for command in found), f"not_run.txt: {omission.prefix!r} is no command"
        assert omission.reason


def test_commands_are_read_over_lines_and_without_comments() -> None:
    texts = [command.text for command in commands() if command.page == "docs/dvabatch-embeddings.md"]
    assert texts[0] == "mlsys dvabatch serve all-minilm-l6-v2"
    assert texts[2].startswith("curl -s localhost:8000/v1/rerank")
    assert "top_n" in texts[2]


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("p*/*/src/**/*.py"))
    rows = re.findall(
        r"^\| ([^|]*)\|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    assert len(messages) >= 4
    for message in messages:
        for part in re.split(r"\.\.\.|15", message):
            assert part.strip(" ()") in code or message.startswith("All connection"), part
