import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "serving-loop.md"


def test_the_pages_examples_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    names: dict[str, object] = {"__name__": "page"}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert printed
    assert f"```text\n{printed}```" in text
