"""Ray Serve runs Orca and answers; KubeRay's manifests have its resources' fields, and name each other's parts."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import yaml
from mlsys_core.cli.main import build_app
from mlsys_core.plugins import installed_plugins
from mlsys_ray.plan import plan_seats
from typer.main import get_command

ROOT = Path(__file__).parents[2]
RAY = ROOT / "deploy" / "ray"
MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in sorted(RAY.glob("*.yaml"))}
# Fields of ray.io/v1, from KubeRay's types; those of a list are required.
CLUSTER = {"headGroupSpec": True, "workerGroupSpecs": False, "rayVersion": False}
CLUSTER |= dict.fromkeys(("enableInTreeAutoscaling", "autoscalerOptions", "headServiceAnnotations", "suspend"), False)
HEAD = {"rayStartParams": True, "template": True}
HEAD |= dict.fromkeys(("serviceType", "headService", "enableIngress"), False)
GROUP = dict.fromkeys(("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"), True)
GROUP |= dict.fromkeys(("replicas", "numOfHosts", "scaleStrategy"), False)
AUTOSCALER = dict.fromkeys(
    ("resources", "image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "securityContext"), False
) | dict.fromkeys(("idleTimeoutSeconds", "upscalingMode"), False)
SPECS = {
    "RayService": {"serveConfigV2": True, "rayClusterConfig": True},
    "RayJob": {"entrypoint": True, "rayClusterSpec": True, "shutdownAfterJobFinishes": False},
}


def check(found: dict[str, Any], fields: dict[str, bool]) -> None:
    assert found.keys() <= fields.keys()
    assert {name for name, is_required in fields.items() if is_required} <= found.keys()


def cluster_of(name: str) -> dict[str, Any]:
    spec = MANIFESTS[name][0]["spec"]
    cluster: dict[str, Any] = spec.get("rayClusterConfig") or spec["rayClusterSpec"]
    return cluster


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_the_fields_of_its_resource(name: str) -> None:
    resource = MANIFESTS[name][0]
    assert resource["apiVersion"] == "ray.io/v1"
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,40}", resource["metadata"]["name"])
    check(resource["spec"], SPECS[resource["kind"]])
    cluster = cluster_of(name)
    check(cluster, CLUSTER)
    check(cluster["headGroupSpec"], HEAD)
    check(cluster.get("autoscalerOptions", {}), AUTOSCALER)
    for group in cluster["workerGroupSpecs"]:
        check(group, GROUP)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            assert f"-t {container['image']} deploy/ray" in (RAY / "Dockerfile").read_text()
    version = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "dev.lock").read_text(), re.MULTILINE)
    assert version is not None
    assert cluster["rayVersion"] == version[1]
    assert f"ray[default,serve]=={version[1]}" in (RAY / "Dockerfile").read_text()


def test_the_job_s_command_is_one_of_ours_and_fits_its_pods() -> None:
    spec = MANIFESTS["rayjob"][0]["spec"]
    program, *words = shlex.split(spec["entrypoint"])
    assert program == "mlsys"
    root: Any = get_command(build_app(installed_plugins()))
    _, group, _ = root.resolve_command(root.make_context("mlsys", ["orca"], resilient_parsing=True), ["orca"])
    serve = group.commands["serve"]
    given = serve.make_context("serve", words[2:]).params
    assert words[:2] == ["orca", "serve"]
    assert given["executor"] == "ray"
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    cores = {f"pod {index}": int(container["resources"]["requests"]["cpu"]) for index in range(workers["replicas"])}
    plan = plan_seats(
        tensor_parallel=given["tensor_parallel"],
        pipeline_parallel=given["pipeline_parallel"],
        num_replicas=given["replicas"],
        num_threads=given["threads"],
        cores=cores | {"head": int(spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"])},
    )
    assert len(set(plan.nodes)) == len(cores) - 1  # a pod each, and one is spare
    service = MANIFESTS["rayjob"][1]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    (port,) = [each for each in head["spec"]["containers"][0]["ports"] if each["name"] == "http"]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert port["containerPort"] == given["port"]


def test_serve_s_configuration_is_one_of_serve_s() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray Serve's own requirements are not installed")
    text = MANIFESTS["rayservice"][0]["spec"]["serveConfigV2"]
    (application,) = schema.ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    module, _, attribute = application.import_path.partition(":")
    assert (RAY / f"{module}.py").exists()
    assert attribute == "app"
    assert "COPY orca_serve.py /opt/mlsys/ray/" in (RAY / "Dockerfile").read_text()
    assert "PYTHONPATH=/opt/mlsys/ray" in (RAY / "Dockerfile").read_text()
    (group,) = cluster_of("rayservice")["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    assert int(container["resources"]["requests"]["cpu"]) >= application.args["threads"]  # a replica fits a pod
    assert group["maxReplicas"] >= application.args["max_replicas"]
    assert application.args["model"].startswith(container["volumeMounts"][0]["mountPath"])


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray Serve on a cluster of its own, and its port."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
    serve = pytest.importorskip("ray.serve", reason="Ray Serve's own requirements are not installed")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield serve, port
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_deployment_answers_under_ray_serve(serve: Any, tmp_path: Path) -> None:
    conftest = loaded("orca_conftest", ROOT / "tests" / "orca" / "conftest.py")
    model = conftest.write_gguf(tmp_path / "tiny.gguf", conftest.tiny_metadata(), conftest.tiny_tensors())
    module = loaded("orca_serve", RAY / "orca_serve.py")
    cloudpickle.register_pickle_by_value(module)  # an image has it on its path
    running, port = serve
    running.run(module.app({"model": str(model), "threads": 1, "kv_tokens": 256}), name="orca", route_prefix="/")
    found = running.status().applications["orca"].deployments["Orca"]
    assert found.replica_states == {"RUNNING": 1}
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    from mlsys_orca import LLM

    with LLM(model, threads=1, kv_tokens=256) as llm:
        expected = llm.generate([[1, 2, 3]], max_tokens=4)[0].text
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["text"] == expected
