"""Check the boundaries of this repository, beyond general linters. Run by ``make lint``; prints each breach.

- imports point down: ring, subsystem, serving, core; hearts import no ring, and nothing imports the benchmarks;
- within a package, files know each other in no circle, imports for type checkers counted, and its rooms (folders and
  files at its top, and those inside a room where the README lists them) import only those below, in its README's order;
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
# Lines of Python; what grows a heart pays by what it makes superfluous.
BUDGETS = {
    "mlsys_core": 12_000,
    "mlsys_serving": 8_500,
    "mlsys_orca": 29_000,
    "mlsys_nimble": 19_000,
    "mlsys_windtunnel": 22_000,
    "mlsys_batchmaker": 9_000,
    "mlsys_dvabatch": 7_000,
}
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


def own_imports(file: Path, module: str, modules: set[str], *, types: bool = True) -> Iterator[str]:
    """Yield the modules of its package that a file imports; without ``types``, those for type checkers left out."""
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)) or types:
            pending += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in joined]
        yield from (name for name in names if name in modules and name != module)


def rooms_of(readme: str) -> dict[str, list[str]]:
    r"""Return the rooms that a package's README lists, from the top down, and those that it lists inside each.

    Example:
        >>> rooms_of("## Rooms\\n```text\\nhttp  the base\\n  app  the factory\\nwatch  events\\n```")
        {'http': ['app'], 'watch': []}
    """
    block = re.search(r"## Rooms\n.*?```text\n(.*?)```", readme, flags=re.S)
    rooms: dict[str, list[str]] = {}
    for line in block[1].splitlines() if block else []:
        if line.startswith(" "):
            rooms[list(rooms)[-1]].append(line.split()[0])
        else:
            rooms[line.split()[0]] = []
    return rooms


def packages_of(root: Path, files: list[Path]) -> dict[tuple[str, str], dict[str, Path]]:
    """Return the Python modules of each package by folder and name, templates left out."""
    packages: dict[tuple[str, str], dict[str, Path]] = {}
    for file in files:
        match = re.match(SOURCES + r"(.*)\.py$", file.relative_to(root).as_posix())
        if match and "template" not in file.parts:
            name = ".".join([match[2], *match[3].split("/")]).removesuffix(".__init__")
            packages.setdefault((match[1], match[2]), {})[name] = file
    return packages


def check_rooms(root: Path, files: list[Path]) -> Iterator[str]:
    """Yield circles of imports among a package's files, imports that point upward, and rooms its README lacks."""
    for (folder, package), modules in packages_of(root, files).items():
        readme = root / folder / "README.md"
        listed = rooms_of(readme.read_text() if readme.is_file() else "")
        names = [name.split(".") for name in modules]
        rooms = {parts[1] for parts in names if len(parts) > 1} - {"_plugin", "__main__"}
        if listed and set(listed) != rooms:
            yield f"{folder}/README.md: its rooms are not the package's: {', '.join(sorted(set(listed) ^ rooms))}"
            continue
        for room, inner in listed.items():
            found = {parts[2] for parts in names if len(parts) > 2 and parts[1] == room}
            if inner and set(inner) != found:
                lacks = ", ".join(sorted(set(inner) ^ found))
                yield f"{folder}/README.md: the rooms in {room} are not the package's: {lacks}"
        imports: nx.DiGraph[str] = nx.DiGraph()
        running: set[tuple[str, str]] = set()
        for module, file in modules.items():
            of_package = "." not in module  # its own __init__ names what it exports, for type checkers
            known = own_imports(file, module, set(modules), types=not of_package)
            imports.add_edges_from((module, imported) for imported in known)
            running |= {(module, imported) for imported in own_imports(file, module, set(modules), types=False)}
        for circle in nx.strongly_connected_components(imports):
            if len(circle) > 1:
                edges = ", ".join(f"{one} -> {other}" for one, other in sorted(imports.subgraph(circle).edges))
                yield f"{package}: files know each other in a circle: {edges}"
        order = {f"{package}.{room}": number for number, room in enumerate(listed)}
        inner_order = {
            f"{package}.{room}.{each}": number for room, inner in listed.items() for number, each in enumerate(inner)
        }
        for one, other in sorted(running):
            for depth, order_of in ((2, order), (3, inner_order)):
                above, below = (".".join(name.split(".")[:depth]) for name in (one, other))
                beside = above.rpartition(".")[0] == below.rpartition(".")[0]
                if beside and above in order_of and below in order_of and order_of[above] > order_of[below]:
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


def sizes(root: Path) -> Iterator[str]:
    """Yield a table: lines and files of Python per distribution, against its budget, and the ways of docs/ways."""
    files = tracked_files(root)
    hearts = 0
    for (_, package), modules in sorted(packages_of(root, files).items(), key=lambda item: level_of(item[0][1])):
        num_lines = sum(len(file.read_text().splitlines()) for file in modules.values())
        budget = f", budget {BUDGETS[package]:,}" if package in BUDGETS else ""
        hearts += num_lines if level_of(package) < 3 else 0
        yield f"{package:26}{num_lines:8,} lines {len(modules):5} files{budget}"
    yield f"{'hearts':26}{hearts:8,} lines, budget {sum(BUDGETS[name] for name in BUDGETS if level_of(name) < 3):,}"
    tests = [file for file in files if file.suffix == ".py" and "tests" in file.relative_to(root).parts]
    yield f"{'tests':26}{sum(len(file.read_text().splitlines()) for file in tests):8,} lines {len(tests):5} files"
    for page in sorted((root / "docs" / "ways").glob("*.md")):
        passed = re.findall(r"^\s*(?:\d+\.|[-*]|\|)\s*`(mlsys_\w+(?:/\w+)*\.py)`", page.read_text(), flags=re.M)
        paths = [path for name in dict.fromkeys(passed) for path in root.glob(f"p*/*/src/{name}")]
        num_lines = sum(len(path.read_text().splitlines()) for path in paths)
        yield f"{'way of a ' + page.stem:26}{num_lines:8,} lines {len(paths):5} files"


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
    for line in sizes(ROOT):
        print(line)
    print(f"check_repo: {len(found)} breaches" if found else "check_repo: the boundaries hold")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
