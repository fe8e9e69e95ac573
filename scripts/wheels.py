"""Build wheels and sdists of all distributions into dist/, with native kernels compiled inside. Run by ``make wheels``.

A distribution with kernels gives one wheel for each platform: the Python of its plain wheel, and beside each C++ source
a folder ``_built`` with one library for each level. Its sdist, and a wheel built from that, hold sources alone: they
compile at first use. Zig's C++ compiler (package ``ziglang``, Clang inside) builds for every platform against an old
glibc, and links its C++ runtime statically, so that a library needs nothing but glibc. What was compiled is kept in
build/kernels and compiled again only when a source, an option or the compiler changes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.native.levels import INCLUDE, Level, Recipe, levels_of, recipe
from mlsys_core.native.loader import Kernel
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import KernelSpec
from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = tuple(sorted(str(file.parent.relative_to(ROOT)) for file in ROOT.glob("p*/*/pyproject.toml")))
GLIBC = "2.28"  # torch's wheels need it


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform that wheels with kernels are built for."""

    family: str  # as platform.machine() says it

    @property
    def tag(self) -> str:
        """The platform's tag in wheels' names."""
        return f"manylinux_{GLIBC.replace('.', '_')}_{self.family}"

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels that libraries are shipped for; on x86-64 none without AVX2, where torch itself is slow."""
        return tuple(level for level in levels_of(self.family) if level.name != "x86-64")


PLATFORMS = (Platform("x86_64"), Platform("aarch64"))


def options_for_zig(options: Iterable[str]) -> list[str]:
    """Return a recipe's options as Zig spells them: one ``-mcpu`` with all extensions.

    Example:
        >>> options_for_zig(["-O3", "-march=x86-64-v4", "-mavx512bf16", "-mamx-tile"])
        ['-O3', '-mcpu=x86_64_v4+avx512bf16+amx_tile']
    """
    others, cpu, extensions = [], "", []
    for option in options:
        if option.startswith("-march="):
            named = option.removeprefix("-march=")
            cpu = {"armv8-a": "generic"}.get(named, named.replace("-", "_"))
        elif option.startswith(("-mavx", "-mamx")):
            extensions.append(option.removeprefix("-m").replace("-", "_"))
        else:
            others.append(option)
    return [*others, f"-mcpu={'+'.join((cpu, *extensions))}"]


def zig() -> list[str]:
    """Return the command of Zig's C++ compiler; ends the script where it is not installed."""
    try:
        import ziglang
    except ImportError:
        sys.exit("wheels: the package ziglang is not installed: pip install -r requirements/wheels.txt")
    return [str(Path(ziglang.__file__).with_name("zig")), "c++"]


def built(wanted: Recipe, platform: Platform, command: Sequence[str], version: str, kept: Path) -> Path:
    """Return the library of a recipe for a platform: from ``kept``, else compiled and put there."""
    digest = hashlib.sha256(f"{version} {platform.tag}".encode()).hexdigest()[:8]
    library = kept / f"{wanted.stem}{wanted.level.name}-{digest}.so"
    if library.is_file():
        return library
    print(f"compiling {wanted.source.name} for {platform.family}, {wanted.level.name}", flush=True)
    target = f"{platform.family}-linux-gnu.{GLIBC}"
    made = library.with_suffix(".part")
    options = [*options_for_zig(wanted.options), "-s", f"-I{INCLUDE}"]
    subprocess.run([*command, "-target", target, *options, str(wanted.source), "-o", str(made)], check=True)
    made.replace(library)
    return library


def add_libraries(plain: Path, folder: Path, platform: Platform, libraries: dict[str, Path]) -> Path:
    """Write a wheel for ``platform`` from a plain one: its files, and ``libraries`` by their paths within it."""
    name = "-".join((*plain.stem.split("-")[:2], "py3-none", platform.tag)) + ".whl"
    with WheelFile(plain) as source, WheelFile(folder / name, "w") as wheel:
        for entry in source.infolist():
            if entry.filename == source.record_path:
                continue
            data = source.read(entry.filename)
            if entry.filename == f"{source.dist_info_path}/WHEEL":
                data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
                data = data.replace(b"Tag: py3-none-any", f"Tag: py3-none-{platform.tag}".encode())
            wheel.writestr(entry, data)
        for path, library in sorted(libraries.items()):
            wheel.write(library, path)
    return folder / name


def build_all(out: Path, platforms: Sequence[Platform], jobs: int) -> None:
    """Build every distribution: an sdist, and a wheel, or one for each platform where there are kernels."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    kept = ROOT / "build" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    registry = installed_plugins().registry
    kernels: list[Kernel] = [registry.load(KernelSpec, spec.name) for spec in registry.all(KernelSpec)]
    command = zig()
    version = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout

    wanted = [
        (
            platform,
            recipe(
                kernel.source,
                level,
                flags=kernel.flags,
                headers=kernel.headers,
                machine=f"Linux {platform.family}",
            ),
        )
        for platform in platforms
        for kernel in kernels
        for level in platform.levels
    ]
    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(lambda each: built(each[1], each[0], command, version, kept), wanted))
    for name in DISTRIBUTIONS:
        source = ROOT / name / "src"
        with tempfile.TemporaryDirectory() as work:
            build = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", work, str(ROOT / name)]
            subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
            (plain,) = Path(work).glob("*.whl")
            (sdist,) = Path(work).glob("*.tar.gz")
            shutil.copy(sdist, out)
            found = [plain] if not any(each.source.is_relative_to(source) for _, each in wanted) else []
            for platform in platforms if not found else ():
                libraries = {
                    each.shipped.relative_to(source).as_posix(): library
                    for (target, each), library in zip(wanted, made, strict=True)
                    if target == platform and each.source.is_relative_to(source)
                }
                found.append(add_libraries(plain, Path(work), platform, libraries))
            for wheel in found:
                shutil.copy(wheel, out)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")


def main() -> None:
    """Build into ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--platform", action="append", choices=[each.family for each in PLATFORMS], help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    arguments = parser.parse_args()
    chosen = [each for each in PLATFORMS if not arguments.platform or each.family in arguments.platform]
    build_all(arguments.out, chosen, arguments.jobs)


if __name__ == "__main__":
    main()
