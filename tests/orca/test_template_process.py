"""Chat templates that mean harm: bounded memory and processor time, one line each, and the next one renders."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.text.chat_template import ChatTemplate, TemplateProcess, renderer

HI = [{"role": "user", "content": "Hi"}]
LONG = "{% for a in range(99999) %}"
ENDS = "{% endfor %}"
GROW = "{% set ns = namespace(x=[1], y=[1], text='aaaaaaaa') %}{% for a in range(64) %}"
HOSTILE = {
    "a power": "{{ 'a' * 10**10 }}",
    "a power of powers": "{{ 7 ** (10 ** 9) }}",
    "a long list": "{{ [0] * 10**10 }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format by name": "{{ '{:>10000000000}'.format(1) }}",
    "centred": "{{ 'a'.center(10**10) }}",
    "a filter": "{{ 'a'|center(10**10) }}",
    "loops in loops": LONG * 3 + ENDS * 3,
    "text without end": LONG * 2 + "{{ 'a' * 999 }}" + ENDS * 2,
    "doubled": GROW + "{% set ns.text = ns.text ~ ns.text %}" + ENDS + "{{ ns.text }}",
    "lists of lists": GROW + "{% set ns.x = [ns.x, ns.x] %}" + ENDS + "{{ ns.x }}",
    "equal lists": GROW + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}" + ENDS + "{{ ns.x == ns.y }}",
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "lorem ipsum": "{{ lipsum(n=10**7) }}",
    "replaced": "{% set a = 'a' * 10**6 %}{{ a.replace('', a) }}",
    "indented": "{{ 'a\\nb'|indent(10**10) }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "additions": "{{ " + "1+" * 100_000 + "1 }}",
    "a long source": "a" * (1 << 20) + "a",
    "the interpreter": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "a module": "{{ cycler.__init__.__globals__.os.system('touch /tmp/x') }}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "a file": "{% include '/etc/passwd' %}",
    "division": "{{ 1 // 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ChatTemplate(HOSTILE[name]).render(HI)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert ChatTemplate("{{ messages[0].content }}!").render(HI) == "Hi!"
    process = renderer._process
    assert process is not None
    assert psutil.Process(process.pid).memory_info().rss < 1 << 30


def test_a_timeout_says_so() -> None:
    with pytest.raises(InvalidInputError, match="1 s of processor time"):
        ChatTemplate(HOSTILE["loops in loops"]).render(HI)
    with pytest.raises(InvalidInputError, match="MiB of memory"):
        ChatTemplate(HOSTILE["a long list"]).render(HI)


def test_a_process_that_was_ended_is_started_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(HI) == "Hi"
    first = renderer._process.pid
    os.kill(first, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [])
    assert template.render(HI) == "Hi"
    assert renderer._process.pid != first


def test_it_writes_no_file_and_ends_with_its_input(tmp_path: Path) -> None:
    process = TemplateProcess()
    assert process.ask(what="variables", source="{{ a }}{{ messages }}")["variables"] == ["a", "messages"]
    child = process._process
    assert child is not None
    if hasattr(psutil.Process, "rlimit"):
        assert psutil.Process(child.pid).rlimit(psutil.RLIMIT_FSIZE)[0] == 0
    child.stdin.close()
    assert child.wait(60) == 0
    process.close()


def test_many_threads_each_get_their_own_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    wrong: list[str] = []

    def ask(name: str) -> None:
        for number in range(30):
            said = f"{name} {number} " * 50
            if template.render([{"role": "user", "content": said}]) != said:
                wrong.append(said)

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
