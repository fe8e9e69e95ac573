"""The server inside the wheel of PyTriton, alone, on a model repository for its python backend.

    .peers/pytriton/bin/python benchmarks/peers/pytriton/tritonserver.py MODELS WORK 18000 18001 [OPTION ...]

``WORK`` is an empty folder for a copy of the backend beside the stub of this Python. The process becomes the server:
SIGTERM ends it. The stub needs the shared library of this very Python, which Debian's has.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def serve(models: Path, work: Path, http_port: int, grpc_port: int, options: list[str]) -> None:
    """Become the server."""
    packages = Path(sysconfig.get_path("purelib"))
    home = packages / "pytriton" / "tritonserver"
    backend, version = work / "backends" / "python", f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(home / "backends" / "python", backend)
    shutil.copy2(home / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    libraries = [
        packages / "nvidia_pytriton.libs",
        Path(sysconfig.get_config_var("LIBDIR")),
        Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or ""),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # whose packages models use
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
    }
    command = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={models}",
        f"--backend-directory={work / 'backends'}",
        f"--cache-directory={home / 'caches'}",
        "--allow-metrics=false",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        *options,
    ]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
