"""No code of the packages loads, evaluates or imports what a file says, but for the few exceptions named here."""

# ruff: noqa: E501 - a list of names

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = {
    "pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "joblib.load", "dill.load", "dill.loads",
    "cloudpickle.load", "cloudpickle.loads", "yaml.load", "yaml.unsafe_load", "eval", "exec", "torch.export.load",
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "np.load", "numpy.load", "pd.read_pickle", "os.system",
    "torch.hub.load", "skops.io.load", "sympify", "runpy.run_path",
}  # fmt: skip
# Place and call -> why it may be there.
ALLOWED = {
    ("core/src/mlsys_core/pt2/program.py", "torch.export.load"): "--trust-code",
    ("windtunnel/src/mlsys_windtunnel/parse/load.py", "joblib.load"): "--trust-code",
    ("windtunnel/src/mlsys_windtunnel/parse/load.py", "skops.io.load"): "types of an allow list, or --trust-code",
    ("windtunnel/src/mlsys_windtunnel/finetune/checkpoint.py", "torch.load"): "weights_only",
    ("batchmaker/src/mlsys_batchmaker/models/speaker.py", "torch.load"): "weights_only",
    ("batchmaker/src/mlsys_batchmaker/models/g2p.py", "np.load"): "allow_pickle=False",
    ("nimble/src/mlsys_nimble/backends/cuda/functions.py", "exec"): "source that this module printed",
}
KEYWORDS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def _sources() -> list[Path]:
    return sorted(path for folder in ("packages", "plugins") for path in (ROOT / folder).glob("*/src/**/*.py"))


@functools.cache
def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_functions_that_run_files_are_called_nowhere_else():
    found: set[tuple[str, str]] = set()
    for path in _sources():
        where = path.relative_to(ROOT).as_posix().partition("/")[2]
        for name, call in _calls(path):
            if name in CALLS:
                found.add((where, name))
                keyword, value = KEYWORDS.get(name, (None, None))
                given = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
                assert keyword is None or given.get(keyword) is value, f"{where}: {name} without {keyword}={value}"
    assert found == set(ALLOWED)


def test_code_of_model_folders_is_never_trusted():
    loaders = 0
    for path in _sources():
        for name, call in _calls(path):
            given = {each.arg: getattr(each.value, "value", None) for each in call.keywords}
            assert given.get("trust_remote_code") is not True, f"{path}: {name}"
            if name.endswith((".from_pretrained", "from_pretrained")):
                loaders += 1
                assert given.get("trust_remote_code") is False, f"{path}: {name} without trust_remote_code=False"
                assert given.get("local_files_only") is True, f"{path}: {name} without local_files_only=True"
    assert loaders >= 3
