"""The three servers as their users start them: a command, a certificate, keys, models that this folder writes."""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.certificates import Certificates, make_certificates

ROOT = Path(__file__).parents[3]
KINDS = ("orca", "batchmaker", "dvabatch")
KEY = "the-oracles-key"


@dataclass(slots=True)
class Running:
    """A server that takes requests."""

    kind: str
    url: str  # https://127.0.0.1:PORT
    grpc: str | None  # 127.0.0.1:PORT
    files: Certificates
    log: list[str] = field(default_factory=list)  # all that it has printed so far

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of HTTPS."""
        host, _, port = self.url.removeprefix("https://").partition(":")
        return host, int(port)

    def context(self) -> ssl.SSLContext:
        """Return a context that trusts the server's authority."""
        return ssl.create_default_context(cafile=str(self.files.ca))


@contextmanager
def running(kind: str, folder: Path, *options: str) -> Iterator[Running]:
    """Start ``mlsys KIND serve`` on a tiny model with a key and TLS; end it by SIGTERM and see that it drains."""
    files = make_certificates(folder)
    keys = folder / "keys"
    keys.write_text(f"# of the oracle\n{KEY}\n")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "mlsys_core", kind, "serve", *_MODELS[kind](folder), "--port", "0"]
    command += ["--api-key-file", str(keys), "--tls-certificate", str(files.server), "--tls-key", str(files.server_key)]
    command += ["--drain-timeout-s", "5", *options]
    if kind != "orca":
        command += ["--grpc-port", "0", "--model-control"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                said.append(line)
                text = "".join(said)
                found = re.search(r"https://127\.0\.0\.1:\d+", text)
                grpc = re.search(r"gRPC on (127\.0\.0\.1:\d+)", text)
                if found and (grpc or kind == "orca"):
                    break
            else:
                raise RuntimeError(f"mlsys {kind} serve did not start:\n{''.join(said)}")
            server = Running(kind, found[0], None if grpc is None else grpc[1], files, said)
            reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
            reader.start()
            yield server
        finally:
            process.terminate()
            code = process.wait()
        reader.join()
        if code not in (0, 1):  # 1: a request was cut at the end of the drain
            raise RuntimeError(f"mlsys {kind} serve ended with {code}:\n{''.join(said[-40:])}")


def _orca(folder: Path) -> list[str]:
    conftest = _module(ROOT / "tests" / "orca" / "conftest.py")
    path = conftest.write_gguf(folder / "tiny.gguf", conftest.tiny_metadata(), conftest.tiny_tensors())
    return [str(path), "--name", "tiny", "--threads", "1", "--max-model-len", "96", "--dtype", "fp32"]


def _batchmaker(folder: Path) -> list[str]:
    from mlsys_batchmaker.models.sequence import lstm_model
    from mlsys_batchmaker.models.store import save_model

    save_model(lstm_model(num_words=6, hidden_size=8), folder / "models" / "tiny")
    return [str(folder / "models"), "--compiler", "eager"]


def _dvabatch(folder: Path) -> list[str]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.randn(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "tiny.pt2")
    return [str(folder / "tiny.pt2"), "--policy", "zero", "--threads", "1"]


_MODELS = {"orca": _orca, "batchmaker": _batchmaker, "dvabatch": _dvabatch}


def _module(path: Path):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
