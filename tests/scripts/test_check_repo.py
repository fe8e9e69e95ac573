"""The repository check itself: each kind of breach is found, and this repository has none."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_repo", ROOT / "scripts" / "check_repo.py")
check_repo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_repo)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "README.md").write_text("```bash\nmake demo\n```\n")
    (tmp_path / "Makefile").write_text("demo: setup  ## x\nsetup:\n\ttrue\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "packages/orca/src/mlsys_orca/a.py",
            "import mlsys_nimble.planning.streams",
            "mlsys_orca imports mlsys_nimble",
        ),
        (
            "packages/core/src/mlsys_core/a.py",
            "def f():\n    from mlsys_orca import x",
            "mlsys_core imports mlsys_orca",
        ),
        ("packages/core/src/mlsys_core/a.py", "X = 'mlsys_orca.cli.main:app'", "mlsys_core imports mlsys_orca"),
        (
            "plugins/dvabatch/src/mlsys_dvabatch/a.py",
            "import os\ndef f():\n    return os.fork()",
            "a.py:3: os.fork stands in",
        ),
        (
            "packages/orca/src/mlsys_orca/a.py",
            "import socket\nX = socket.SOCK_SEQPACKET",
            "socket.SOCK_SEQPACKET stands",
        ),
        ("packages/orca/src/mlsys_orca/a.py", "import fcntl", "fcntl stands in mlsys_core.posix alone"),
        ("packages/orca/src/mlsys_orca/a.py", "ctypes.CDLL(None).prctl(1)", "prctl stands in mlsys_core.posix alone"),
        ("packages/nimble/src/mlsys_nimble/a.py", "open('/proc/self/status')", "/proc/self/status stands in"),
        ("packages/all/src/mlsys/__init__.py", "", "no package may be called mlsys"),
        ("packages/all/pyproject.toml", '[project]\nname = "mlsys"', "no distribution may be called mlsys"),
        ("requirements/x.lock", "--index-url x", "a lock carries no address"),
        ("requirements/dev.lock", "a @ https" + "://somewhere/a.whl", "a lock carries no address"),
        ("packages/core/src/mlsys_core/long.py", "x = 1\n" * 501, "501 lines"),
        ("README.md", "```bash\nmake dance\n```", "no such make target: dance"),
        ("README.md", "```bash\nmlsys plugins dance --hard\n```", "no such command"),
        ("README.md", "```bash\nmlsys dance now\n```", "no such command"),
        ("README.md", "```bash\npython scripts/none.py\n```", "no such file"),
    ],
)
def test_each_breach_is_found(tree: Path, name: str, text: str, says: str):
    write(tree, name, text)
    found = list(check_repo.breaches(tree))
    assert [breach for breach in found if says in breach], found


def test_a_file_of_more_than_a_megabyte_is_found(tree: Path):
    write(tree, "left.data", "0" * 1_000_001)
    assert any("left.data: 1000001 bytes" in breach for breach in check_repo.breaches(tree))


def test_circles_of_files_and_imports_that_point_upward_are_found(tree: Path):
    folder = "packages/orca/src/mlsys_orca"
    write(tree, "packages/orca/README.md", "## Rooms\n\n```text\na  above\nb  below\n```\n")
    write(tree, f"{folder}/a/one.py", "def f():\n    from mlsys_orca.a import two")
    write(tree, f"{folder}/a/two.py", "import mlsys_orca.a.one\nimport mlsys_orca.b.three")
    write(tree, f"{folder}/b/three.py", "")
    write(tree, f"{folder}/b/four.py", "from mlsys_orca.a.two import x")
    found = [breach for breach in check_repo.breaches(tree) if "mlsys_orca" in breach]
    assert found == [
        "mlsys_orca: files know each other in a circle: "
        "mlsys_orca.a.one -> mlsys_orca.a.two, mlsys_orca.a.two -> mlsys_orca.a.one",
        "mlsys_orca.b.four imports mlsys_orca.a.two, which packages/orca/README.md shows above it",
    ]


def test_a_readme_that_lacks_a_room_is_found(tree: Path):
    write(tree, "packages/orca/README.md", "## Rooms\n\n```text\na  above\n```\n")
    write(tree, "packages/orca/src/mlsys_orca/a.py", "")
    write(tree, "packages/orca/src/mlsys_orca/b/one.py", "")
    assert "packages/orca/README.md: its rooms are not the package's: b" in check_repo.breaches(tree)


def test_imports_for_type_checkers_make_a_circle_too(tree: Path):
    folder = "packages/orca/src/mlsys_orca"
    write(tree, f"{folder}/one.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlsys_orca.two")
    write(tree, f"{folder}/two.py", "import mlsys_orca.one")
    assert [breach for breach in check_repo.breaches(tree) if "know each other in a circle" in breach]


def test_rooms_inside_a_room_have_an_order_too(tree: Path):
    folder = "packages/serving/src/mlsys_serving/http"
    write(tree, "packages/serving/README.md", "## Rooms\n\n```text\nhttp  base\n  app  factory\n  keys  access\n```\n")
    write(tree, f"{folder}/app.py", "import mlsys_serving.http.keys")
    write(tree, f"{folder}/keys.py", "")
    assert not [breach for breach in check_repo.breaches(tree) if "mlsys_serving" in breach]
    write(tree, f"{folder}/app.py", "")
    write(tree, f"{folder}/keys.py", "import mlsys_serving.http.app")
    write(tree, f"{folder}/more.py", "")
    found = [breach for breach in check_repo.breaches(tree) if "serving" in breach]
    assert found == [
        "packages/serving/README.md: the rooms in http are not the package's: more",
        "mlsys_serving.http.keys imports mlsys_serving.http.app, which packages/serving/README.md shows above it",
    ]


@pytest.mark.parametrize(
    ("folder", "imported"),
    [
        ("packages/orca/src/mlsys_orca", "mlsys_score"),
        ("packages/serving/src/mlsys_serving", "mlsys_orca"),
        ("packages/core/src/mlsys_core", "mlsys_serving"),
        ("plugins/score/src/mlsys_score", "mlsys_encoders"),
        ("plugins/score/src/mlsys_score", "mlsys_bench"),
    ],
)
def test_hearts_import_no_ring_and_nothing_imports_upward(tree: Path, folder: str, imported: str):
    write(tree, f"{folder}/a.py", f"import {imported}.b")
    own = folder.rpartition("/")[2]
    assert [breach for breach in check_repo.breaches(tree) if f"{own} imports {imported}" in breach]
    write(tree, f"{folder}/a.py", "import mlsys_core.errors" if own != "mlsys_core" else "")
    assert not [breach for breach in check_repo.breaches(tree) if "imports" in breach]


def test_a_clean_tree_passes(tree: Path):
    write(
        tree,
        "packages/orca/src/mlsys_orca/a.py",
        "from mlsys_core.errors import MlsysError\nX = 'mlsys_orca.cli.main:app'",
    )
    write(tree, "README.md", "```bash\nmake demo && mlsys doctor\nFOO=1 mlsys plugins list | head\n```")
    assert list(check_repo.breaches(tree)) == []
