"""Write requirements/dev.lock: every package but torch, exact versions with hashes, no index addresses.

Inputs are the ``dependencies`` and ``optional-dependencies`` of all workspace distributions plus ``requirements/dev.in``.
torch is resolved (so that its own requirements are locked) but left out: a local CPU wheel and a public one
differ in hash, so ``make`` installs it in a step of its own. Run by ``make lock``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"


def workspace_requirements() -> list[str]:
    """All third-party requirements the workspace's own distributions declare."""
    requirements: list[str] = []
    for pyproject in sorted(ROOT.glob("p*/*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text())["project"]
        requirements += project["dependencies"]
        for extra in project.get("optional-dependencies", {}).values():
            requirements += extra
    models = (ROOT / "requirements" / "models.in").read_text()
    return sorted({r for r in requirements if not r.startswith("mlsys-") and f"\n{r}==" not in models})


def main() -> int:
    output = ROOT / "requirements" / "dev.lock"
    with tempfile.TemporaryDirectory() as tmp:
        source = Path(tmp) / "all.in"
        dev = (ROOT / "requirements" / "dev.in").read_text()
        source.write_text("\n".join([TORCH, *workspace_requirements(), dev]))
        command = [
            *(sys.executable, "-m", "piptools", "compile", str(source), "--output-file", str(output)),
            *("--generate-hashes", "--unsafe-package", "torch", "--no-emit-index-url", "--no-emit-find-links"),
            *("--no-emit-trusted-host", "--no-header", "--strip-extras", "--no-annotate", "--quiet", "--upgrade"),
        ]
        subprocess.run(command, check=True)
    header = "# Written by scripts/lock.py (make lock). torch is installed before this, in a step of its own.\n"
    lines = [line for line in output.read_text().splitlines() if not line.startswith(("#", "--"))]
    output.write_text(header + "\n".join(lines).strip() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
