"""Data-parallel training over a cluster's nodes: equal to one process, and to itself when a node is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightgbm import LGBMClassifier
from mlsys_core.errors import MlsysError
from mlsys_windtunnel import fine_tune, translate
from mlsys_windtunnel.finetune import checkpoint
from mlsys_windtunnel.finetune.launch_ray import on_cluster
from mlsys_windtunnel.finetune.processes import WorkerLostError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 4))
Y = (X[:, 0] + X[:, 3] ** 2 + RNG.normal(0, 0.5, 400) > 1).astype(int)
SOURCE = make_pipeline(StandardScaler(), LGBMClassifier(n_estimators=5, num_leaves=9, verbose=-1, n_jobs=1))
pytestmark = pytest.mark.xdist_group("ray")  # two clusters never run side by side: the second would join the first
MEMORY_NBYTES = 80 << 20  # of each node's object store


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each: two workers never share one. The test and the first process run on the first node."""
    from ray.cluster_utils import Cluster

    before = set(_ray_processes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": MEMORY_NBYTES},
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY_NBYTES)
        cluster.wait_for_nodes()
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    deadline = time.monotonic() + 30
    while left := set(_ray_processes()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _ray_processes() -> list[tuple[int, str]]:
    """Process ids and names of Ray's processes that descend from this one's session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, IndexError, ValueError):
            continue
        is_of_ray = name.startswith("ray::") or name.endswith(("raylet", "gcs_server"))
        if is_of_ray and (session == os.getsid(0) or f"{os.getpid()}" in name):
            found.append((int(folder.name), name))
    return found


def tuned(**changes: Any) -> Any:
    module = translate(SOURCE.fit(X[:200], Y[:200]))
    options = {"epochs": 3, "batch_size": 64, "level": "L4", "lr": 0.01, "n_threads": 1, "min_gain_se": 0, **changes}
    return fine_tune(module, X[:200], Y[:200], eval_set=(X[200:], Y[200:]), **options)


def _children(process_id: int) -> list[Path]:
    """Folders in /proc of a process's children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process_id:
                found.append(folder)
    return found


def test_two_nodes_come_to_what_one_process_does(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tuned()
    undisturbed = tuned(n_processes=3, launcher="ray")
    np.testing.assert_allclose(undisturbed.module.predict_proba(X), one.module.predict_proba(X), atol=2e-4)
    assert undisturbed.history[-1]["train_loss"] == pytest.approx(one.history[-1]["train_loss"], rel=1e-4)

    save, nodes = checkpoint.save, list(cluster.worker_nodes)

    def lose_a_node(*args: Any) -> None:
        """Save, and the first time end the second node with its worker, which would see only within a second."""
        save(*args)
        if nodes:
            raylet = nodes[0].all_processes["raylet"][0].process
            workers = [each for each in _children(raylet.pid) if "ray::work" in (each / "cmdline").read_text()]
            assert workers
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            while any(each.exists() for each in workers):
                time.sleep(0.05)
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY_NBYTES)

    monkeypatch.setattr(checkpoint, "save", lose_a_node)
    with pytest.warns(UserWarning, match="a training worker is lost.*goes on from its last checkpoint"):
        survived = tuned(n_processes=3, launcher="ray", checkpoint_dir=tmp_path)
    assert not nodes
    for name, value in undisturbed.module.state_dict().items():
        assert np.array_equal(value.numpy(), survived.module.state_dict()[name].numpy()), name
    assert [each["epoch"] for each in survived.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("ends", ["killed", "failed"])
def test_a_worker_that_does_not_come_ends_the_others(cluster: Any, ends: str, tmp_path: Path) -> None:
    del cluster
    file = tmp_path / "process-id"

    def work(job: Any, address: Any, rank: int, num_threads: int) -> None:  # local, so Ray sends its code
        if rank == 2:
            file.with_suffix(".new").write_text(f"{os.getpid()}")
            file.with_suffix(".new").rename(file)
            time.sleep(600)
        while not file.exists():
            time.sleep(0.01)
        if ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no gloo on this node")

    kind, message = (
        (WorkerLostError, "a training worker is lost") if ends == "killed" else (MlsysError, "process failed: no gloo")
    )
    with pytest.raises(kind, match=message), on_cluster(work, None, 3):
        pytest.fail("the training began without its worker")
    while Path("/proc", file.read_text()).exists():
        time.sleep(0.05)


def test_a_cluster_without_room_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlsys_windtunnel.finetune.launch_ray.ROOM_TIMEOUT_S", 1.0)
    with pytest.raises(MlsysError, match="no 7 free cores for 7 workers"):
        tuned(n_processes=8, launcher="ray")


def test_without_a_cluster_one_is_started_and_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "train.py")]
    environment = {**os.environ, "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "not connected"


PROGRAM = """
import numpy as np, ray
from mlsys_windtunnel import fine_tune, translate
from sklearn.linear_model import LogisticRegression
x = np.random.default_rng(0).normal(size=(64, 3)); y = (x[:, 0] > 0).astype(int)
fine_tune(translate(LogisticRegression().fit(x, y)), x, y, epochs=1, n_processes=2, launcher="ray")
print("connected" if ray.is_initialized() else "not connected")
"""
