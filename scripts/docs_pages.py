"""Pages of the reference that are written from the code while the site is built: a hook of mkdocs.

Commands come from their own parsers, settings from the comments of :class:`mlsys_core.config.Settings`, errors from
their classes, metrics from the calls that make them. So none of these pages can be out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mlsys_core import config, errors
from mlsys_core.cli.lazy_group import load_command
from mlsys_core.plugins import LoadedPlugins, installed_plugins
from mlsys_core.plugins.specs import CommandSpec

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mlsys-core": "packages/core/src",
    "mlsys-serving": "packages/serving/src",
    "mlsys-orca": "packages/orca/src",
    "mlsys-nimble": "packages/nimble/src",
    "mlsys-windtunnel": "packages/windtunnel/src",
    "mlsys-batchmaker": "plugins/batchmaker/src",
    "mlsys-dvabatch": "plugins/dvabatch/src",
    "mlsys-encoders": "plugins/encoders/src",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the written pages to the site's files; mkdocs calls it."""
    for name, text in written_pages(installed_plugins()).items():
        files.append(File.generated(config, name, content=text))
    return files


def written_pages(plugins: LoadedPlugins) -> dict[str, str]:
    """Return the text of each page by its path below the site's root."""
    named = sorted(plugins.registry.all(CommandSpec), key=lambda spec: spec.name)
    specs = [spec for spec in named if " " not in spec.name]  # the others are on the page of their first word
    commands = {spec.name: load_command(spec, plugins.registry) for spec in specs}
    pages = {f"reference/cli/{name}.md": command_page(name, command) for name, command in commands.items()}
    lines = ["# Commands", "", "| command | does |", "| --- | --- |"]
    lines += [f"| [`mlsys {spec.name}`](cli/{spec.name}.md) | {cell(spec.help)} |" for spec in specs]
    pages["reference/commands.md"] = "\n".join([*lines, "", EXITS])
    pages["reference/settings.md"] = settings_page()
    pages["reference/errors.md"] = errors_page()
    pages["reference/metrics.md"] = metrics_page()
    pages["decisions.md"] = decisions_page(ROOT / "docs" / "adr")
    return pages


EXITS = """\
Exit codes: 0 done, 1 failed, 2 wrong arguments or input, 130 interrupted.
Each command explains itself: `mlsys COMMAND --help`.
"""


def command_page(name: str, command: Any) -> str:
    """Return the page of a command and of all below it."""
    lines: list[str] = []
    for words, each in below((name,), command):
        lines += [f"{'#' * min(len(words), 3)} mlsys {' '.join(words)}", ""]
        lines += [*_help(each.help or ""), ""]
        rows = [row for parameter in each.params if not getattr(parameter, "hidden", False) for row in _row(parameter)]
        if rows:
            lines += ["| argument or option | value | what it does |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a command and all below it with the words that call each."""
    yield words, command
    for name, each in sorted(getattr(command, "commands", {}).items()):
        if not each.hidden:
            yield from below((*words, name), each)


def _help(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        example = re.match(r"Example: (mlsys .*)", paragraph.replace("\n", " "))
        if example:
            yield f"```bash\n{example[1]}\n```\n"
        else:
            yield escape(paragraph) + "\n"


def _row(parameter: Any) -> Iterator[str]:
    if parameter.name == "help":
        return
    is_argument = parameter.param_type_name == "argument"
    names = parameter.display_name_raw if is_argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    shown = "" if getattr(parameter, "is_bool_flag", False) else parameter.display_type_rich(_Context())
    notes = [parameter.help or ""]
    default = parameter.default
    if parameter.required:
        notes.append("*Required.*")
    elif default not in (None, False, (), []) and not callable(default):
        value = getattr(default, "value", default)
        notes.append(f"Default: `{value}`.")
    value = "`" + str(shown).replace("|", r"\|") + "`" if shown else ""
    yield f"| `{names}` | {value} | {cell(' '.join(notes))} |"


class _Context:
    """Context in which choices are shown as they are."""

    token_normalize_func = None


def settings_page() -> str:
    """Return the page of environment variables."""
    lines = ["# Settings", "", "Environment variables that every command reads, once, at its start.", ""]
    lines += ["| variable | meaning |", "| --- | --- |"]
    for match in re.finditer(r"^ {4}\w+: .*?#\s*(MLSYS_\w+|CXX|OTEL\S+)(.*)$", _source(config.Settings), re.MULTILINE):
        lines.append(f"| `{match[1]}` | {cell(match[2].lstrip(',:= '))} |")
    more = (
        "\nServers take each option from the environment too: `--port` is `MLSYS_ORCA_PORT` for `mlsys orca serve` "
        "and `MLSYS_SERVE_PORT` for every server. Flags go first, then the environment, then the file of `--config`. "
        "[Options of every server](../http.md#options-of-every-server) lists them.\n"
    )
    return "\n".join(lines) + "\n" + more


def errors_page() -> str:
    """Return the page of the errors that are raised on purpose."""
    lines = [
        "# Errors",
        "",
        "All stand in one tree below `mlsys_core.errors.MlsysError`; each message says what to do.",
    ]
    lines += ["", "| class | exit code | meaning |", "| --- | --- | --- |"]
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.MlsysError):
            lines.append(f"| `{kind.__name__}` | {kind.exit_code} | {cell(inspect.getdoc(kind) or '')} |")
    lines += ["", "Status codes of servers: [Orca's errors](../orca-server.md), [the HTTP base](../http.md).", ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """Return the page of Prometheus metrics, read from the calls that make them."""
    lines = ["# Metrics", "", "Every server has them at `/metrics` in Prometheus' text format.", ""]
    for distribution, folder in PACKAGES.items():
        found = {each for path in (ROOT / folder).rglob("*.py") for each in metrics_of(path.read_text())}
        if distribution == "mlsys-batchmaker":
            found |= {(each.name, each.type, each.documentation) for each in _of_batchmaker()}
        if found:
            lines += [f"## {distribution}", "", "| metric | kind | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{name}` | {kind} | {cell(text)} |" for name, kind, text in sorted(found)] + [""]
    return "\n".join(lines)


KINDS = {"Counter": "counter", "Gauge": "gauge", "Histogram": "histogram", "Summary": "summary"}
METHODS = {"_counter": "counter", "_gauge": "gauge", "_histogram": "histogram"}  # of collectors, with a prefix


def metrics_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, kind and help of each metric that a module makes with literal arguments."""
    prefix = re.search(r'^_PREFIX = "(\w+)"$', source, re.MULTILINE)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        kind = KINDS.get(called.removesuffix("MetricFamily")) or METHODS.get(called)
        name, text = node.args[:2]
        if isinstance(name, ast.BinOp):  # _PREFIX + "name"
            name = name.right
        if kind and isinstance(name, ast.Constant) and isinstance(text, ast.Constant):
            begin = prefix[1] if prefix and not str(name.value).startswith("mlsys_") else ""
            yield f"{begin}{name.value!s}", kind, str(text.value)


def _of_batchmaker() -> Iterator[Any]:
    from mlsys_batchmaker.serve.metrics import EngineMetrics, StreamMetrics

    yield from EngineMetrics(lambda: ()).collect()
    yield from StreamMetrics(lambda: ()).collect()


def decisions_page(folder: Path) -> str:
    """Return the list of the decisions in ``folder``."""
    lines = [
        "# Decisions",
        "",
        "A page for each decision that moved a boundary: what was decided, why, what it costs.",
        "",
    ]
    lines += ["| number | decision |", "| ---: | --- |"]
    for path in sorted(folder.glob("*.md")):
        title = re.sub(r"^# (ADR )?(\d+[.:]? *)?", "", path.read_text(encoding="utf-8").splitlines()[0])
        lines.append(f"| {int(path.name[:4])} | [{title[0].upper()}{title[1:]}](adr/{path.name}) |")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text in which nothing is markup: names in capitals and brackets stay as they are."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text)


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(escape(text).replace("|", r"\|").split())


def _source(kind: type) -> str:
    return re.sub(r"\(\s*$", "", inspect.getsource(kind))
