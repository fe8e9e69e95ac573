"""Check the boundaries of this repository, beyond general linters. Run by ``make lint``; prints each breach.

- imports point down: ring, subsystem, serving, core; hearts import no ring, and nothing imports the benchmarks;
- within a package, files import each other in no circle, and its rooms (folders and files at its top) only those below
  them, in the order that its README shows;
- calls that Linux or POSIX alone has (fork, pidfd, memfd, eventfd, affinity, /proc, ...) stand in ``mlsys_core.posix``;
- there is no top-level ``mlsys`` package or distribution (the name is taken on the package index);
- no lock file carries an address;
- no Python file is over 500 lines, and no file over a megabyte;
- the commands README.md shows exist: ``mlsys`` commands, ``make`` targets, and files below the repository.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
MAX_BYTES = 1_000_000
SUBSYSTEMS = ("mlsys_nimble", "mlsys_orca", "mlsys_windtunnel", "mlsys_batchmaker", "mlsys_dvabatch")
LEVELS = ("mlsys_core", "mlsys_serving", SUBSYSTEMS)  # hearts, from the bottom up; all other distributions are the ring
BENCHMARKS = "mlsys_bench"  # measures all of them, and is installed for development only
SOURCES = r"(packages/\w+|plugins/[\w-]+|benchmarks)/src/(mlsys_\w+)/"

# Calls and constants of Linux or POSIX, by module; signals' names are left out, since they do nothing by themselves.
SYSTEM_CALLS = {
    "os": r"p?fork(pty)?|pidfd_\w+|memfd_\w+|eventfd\w*|[EM]FD_\w+|sched_\w+|setsid|[sg]etpgid|killpg|getppid|waitpid"
    r"|WIF\w+|WEXITSTATUS|WTERMSIG|WNOHANG|register_at_fork|get[eu]*[ug]id|pread|pwrite|fdatasync|statvfs|O_DIRECTORY"
    r"|O_NOCTTY|posix_\w+",
    "signal": r"pidfd_\w+|pthread_\w+|sig(timed)?wait\w*|setitimer|ITIMER_\w+",
    "socket": r"AF_UNIX|SOCK_SEQPACKET|send_fds|recv_fds|SO_PEERCRED",
}
SYSTEM_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"}
SYSTEM_OWNER = "packages/core/src/mlsys_core/posix/"
SYSTEM_APART = (
    "packages/orca/src/mlsys_orca/text/template_worker.py",  # a program of its own, which can import nothing of ours
    "packages/orca/src/mlsys_orca/parallel/",  # a divided model is refused before any of it where processes need Linux
)


def tracked_files(root: Path) -> list[Path]:
    """Return the files git tracks or would track below ``root``."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [root / name for name in output.split("\0") if name and (root / name).is_file()]


def imported_modules(source: str) -> set[str]:
    """Return the top-level names of all modules that ``source`` imports, lazy references included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(\w+)(\.\w+)*:\w+(\.\w+)*", node.value)
            if match:
                names.add(match[1])
    return names


def level_of(module: str) -> int:
    """Return the level of a module of ours: core 0, serving 1, subsystems 2, the ring 3, the benchmarks 4.

    Example:
        >>> [level_of(name) for name in ("mlsys_core", "mlsys_orca", "mlsys_score", "mlsys_bench")]
        [0, 2, 3, 4]
    """
    if module == BENCHMARKS:
        return 4
    return next((number for number, names in enumerate(LEVELS) if module == names or module in names), 3)


def check_imports(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield imports of a distribution that stands beside or above: core, serving, subsystems, ring, benchmarks."""
    for file in files:
        match = re.match(SOURCES, file.relative_to(root).as_posix())
        if file.suffix == ".py" and match and "template" not in file.parts:
            own = match[2]
            for module in sorted(name for name in imported_modules(file.read_text()) if name.startswith("mlsys_")):
                if module != own and level_of(module) >= level_of(own):
                    yield f"{file.relative_to(root)}: {own} imports {module}, which stands beside or above it"


def own_imports(file: Path, module: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules of its package that a file imports when it runs, type checkers' imports left out."""
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            pending.append(node)
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                joined = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module for name in joined]
            yield from (name for name in names if name in modules and name != module)


def rooms_of(readme: str) -> list[str]:
    """Return the rooms that a package's README lists, from the top down."""
    block = re.search(r"## Rooms\n.*?```text\n(.*?)```", readme, flags=re.S)
    return [line.split()[0] for line in block[1].splitlines()] if block else []


def check_rooms(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield circles of imports among a package's files, imports that point upward, and rooms its README lacks."""
    packages: dict[tuple[str, str], dict[str, Path]] = {}
    for file in files:
        match = re.match(SOURCES + r"(.*)\.py$", file.relative_to(root).as_posix())
        if match and "template" not in file.parts:
            name = ".".join([match[2], *match[3].split("/")]).removesuffix(".__init__")
            packages.setdefault((match[1], match[2]), {})[name] = file
    for (folder, package), modules in packages.items():
        readme = root / folder / "README.md"
        listed = rooms_of(readme.read_text() if readme.is_file() else "")
        rooms = {name.split(".")[1] for name in modules if "." in name} - {"_plugin", "__main__"}
        if listed and set(listed) != rooms:
            yield f"{folder}/README.md: its rooms are not the package's: {', '.join(sorted(set(listed) ^ rooms))}"
            continue
        imports: nx.DiGraph[str] = nx.DiGraph()
        for module, file in modules.items():
            imports.add_edges_from((module, imported) for imported in own_imports(file, module, set(modules)))
        for circle in nx.strongly_connected_components(imports):
            if len(circle) > 1:
                edges = ", ".join(f"{one} -> {other}" for one, other in sorted(imports.subgraph(circle).edges))
                yield f"{package}: files import each other in a circle: {edges}"
        order_of = {f"{package}.{room}": number for number, room in enumerate(listed)}
        for one, other in sorted(imports.edges):
            above, below = (order_of.get(".".join(name.split(".")[:2])) for name in (one, other))
            if above is not None and below is not None and above > below:
                yield f"{one} imports {other}, which {folder}/README.md shows above it"


def check_system_calls(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield calls of one system in modules that should run on any, development's benchmarks left out."""
    for file in files:
        path = file.relative_to(root).as_posix()
        match = re.match(SOURCES, path)
        if file.suffix != ".py" or not match or match[2] == BENCHMARKS or "template" in file.parts:
            continue
        if not path.startswith((SYSTEM_OWNER, *SYSTEM_APART)):
            for number, call in system_calls(file.read_text()):
                yield f"{path}:{number}: {call} stands in mlsys_core.posix alone: call it there"


def system_calls(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of what one system alone has in a module's text.

    Example:
        >>> list(system_calls("hasattr(os, 'fork') and os.fork()"))
        [(1, 'os.fork')]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr == "prctl" or re.fullmatch(SYSTEM_CALLS.get(owner, "-"), node.attr):
                yield node.lineno, f"{owner}.{node.attr}".lstrip(".")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            names = [getattr(node, "module", None) or alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names if name in SYSTEM_MODULES and not level)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"/(proc|sys|dev)(/[\w./{}*-]*)+", str(node.value)):
            yield node.lineno, str(node.value)


def check_names(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield packages or distributions called plain ``mlsys``."""
    for file in files:
        if "/src/mlsys/" in file.as_posix() or file == root / "mlsys" / "__init__.py":
            yield f"{file.relative_to(root)}: no package may be called mlsys (the name is taken)"
        if file.name == "pyproject.toml":
            name = tomllib.loads(file.read_text()).get("project", {}).get("name")
            if name == "mlsys":
                yield f"{file.relative_to(root)}: no distribution may be called mlsys (the name is taken)"


def check_locks(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield addresses in lock files, which tie them to one index."""
    for file in files:
        if file.suffix == ".lock" or (file.parent.name == "requirements" or file.name == "requirements.txt"):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if re.search(r"://|--(extra-)?index-url|--find-links", line):
                    yield f"{file.relative_to(root)}:{number}: a lock carries no address"


def check_length(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield files that are too long or too large."""
    for file in files:
        if file.suffix == ".py" and (length := len(file.read_text().splitlines())) > MAX_LINES:
            yield f"{file.relative_to(root)}: {length} lines, over {MAX_LINES}: make it two rooms"
        if (size := file.stat().st_size) > MAX_BYTES:
            yield f"{file.relative_to(root)}: {size} bytes, over {MAX_BYTES}: every clone would carry it for good"


def readme_commands(text: str) -> Iterator[str]:
    """Yield commands in the fenced blocks of a Markdown text, without prompts and comments."""
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.S):
        for line in block.splitlines():
            for command in re.split(r"&&|\|", line.removeprefix("$ ").partition(" #")[0]):
                if command.strip():
                    yield command.strip()


def make_targets(text: str) -> set[str]:
    """Return the targets of a Makefile."""
    return {name for line in re.findall(r"^([\w -]+):(?!=)", text, flags=re.M) for name in line.split()}


def check_readme(root: Path) -> Iterator[str]:
    """Yield commands that README.md shows and that do not exist."""
    from mlsys_core.cli.main import run

    targets = make_targets((root / "Makefile").read_text())
    commands = list(readme_commands((root / "README.md").read_text()))
    made = {f"{command.split()[3]}-command" for command in commands if command.startswith("mlsys plugins new ")}
    for command in commands:
        words = [word for word in command.split() if "=" not in word or word.startswith("-")]
        if words[0] == "make":
            missing = [word for word in words[1:] if word not in targets]
            if missing:
                yield f"README.md: '{command}': no such make target: {', '.join(missing)}"
        elif words[0] == "mlsys":
            path = []
            for word in words[1:3]:
                if not re.fullmatch(r"[a-z][a-z-]*", word):
                    break
                path.append(word)
            if path[:1] and path[0] in made:  # the command of the plugin that the README has just written
                continue
            if run_quietly(run, [*path, "--help"]) != 0:
                yield f"README.md: '{command}': no such command"
        for word in words:
            if (
                re.match(r"(examples|scripts|benchmarks|docs|packages|plugins|tests)/", word)
                and not (root / word).exists()
            ):
                yield f"README.md: '{command}': no such file {word}"


def run_quietly(run: object, arguments: list[str]) -> int:
    """Return the exit code of ``mlsys ARGUMENTS``, its output dropped."""
    import contextlib
    import io

    assert callable(run)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(run(arguments))


def breaches(root: Path) -> Iterator[str]:
    """Yield all breaches in the tree below ``root``."""
    files = tracked_files(root)
    yield from check_imports(root, files)
    yield from check_rooms(root, files)
    yield from check_system_calls(root, files)
    yield from check_names(root, files)
    yield from check_locks(root, files)
    yield from check_length(root, files)
    yield from check_readme(root)


def main() -> int:
    """Print all breaches; return exit code 1 if there are any."""
    found = list(breaches(ROOT))
    for breach in found:
        print(breach, file=sys.stderr)
    print(f"check_repo: {len(found)} breaches" if found else "check_repo: the boundaries hold")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
