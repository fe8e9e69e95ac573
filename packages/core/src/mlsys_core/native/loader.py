"""Load a kernel from its source file: from the cache if it is there, else compiled and kept."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.config import Settings, settings
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native.compiler import Compiler, find_compiler
from mlsys_core.native.levels import NATIVE, cpu_flags, executable_levels, level_named
from mlsys_core.native.sanitizers import flags_of
from mlsys_core.native.store import Store, temporary_store, trusted_store, warn_once

_log = logging.getLogger(__name__)

INCLUDE = Path(__file__).parents[1] / "include"  # headers for any kernel, as <mlsys/vec.h>
# No fast-math: kernels promise the comparisons and sums of their sources. Contraction would fuse a*b+c.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
further_flags: tuple[str, ...] = ()  # set by mlsys_core.native.testing alone


def load_kernel(
    source: Path, *, cache_dir: Path, flags: tuple[str, ...] = (), headers: Sequence[Path] = ()
) -> ctypes.CDLL:
    """Compile ``source`` unless that was done before, and load it.

    The level, the sanitizer and the compiler are those of :class:`~mlsys_core.config.Settings`. Without a compiler
    (or with one that fails) a library by any other is taken from the cache, also one for a lower level.

    Args:
        source: A C++17 file.
        cache_dir: Where libraries are kept, below ``native/``; safe for several processes at once. If it cannot be
            written, or others could write to it, a temporary folder serves this process, and a warning says so.
        flags: Added to :data:`FLAGS` and to the level's.
        headers: The files that ``source`` includes: it is compiled again when one of them changes, or one of the
            core's own (:data:`INCLUDE`).

    Raises:
        KernelUnavailableError: there is no C++ compiler, or it refuses the file, and the cache has no library.
        InvalidInputError: the level or the sanitizer of the settings is unknown, or cannot be used here.
    """
    chosen = settings()
    recipes = _recipes(source, flags, headers, chosen)
    store = trusted_store(cache_dir / "native")
    try:
        return _load_compiled(recipes[0], find_compiler(chosen.compiler), store)
    except KernelUnavailableError as error:
        found = _found_of_any_compiler(recipes, store)
        if found is None:
            where = f"{cache_dir / 'native'} holds no {source.stem} for this processor"
            raise KernelUnavailableError(f"{error}; {where}") from None
        return found


@dataclass(frozen=True, slots=True)
class _Recipe:
    """All inputs of a library's build, except for the compiler."""

    source: Path
    options: tuple[str, ...]
    key: str  # names sources, options, and the processor where the options leave it open

    @property
    def stem(self) -> str:
        """Beginning of the names of this recipe's libraries, for any compiler."""
        return f"{self.source.stem}-{self.key}-"

    def name(self, compiler: Compiler) -> str:
        """Return the name of the library that ``compiler`` builds from this recipe."""
        return f"{self.stem}{hashlib.sha256(compiler.version.encode()).hexdigest()[:8]}.so"


def _recipes(source: Path, flags: tuple[str, ...], headers: Sequence[Path], chosen: Settings) -> list[_Recipe]:
    """Return the recipe to compile, then equivalent ones for machines that cannot compile."""
    level = level_named(chosen.kernel_level)
    others = reversed(executable_levels()) if level == NATIVE else ()
    texts = [file.read_bytes() for file in (source, *headers, *sorted(INCLUDE.rglob("*.h")))]
    found = []
    for each in (level, *others):
        options = (*FLAGS, *each.flags, *flags, *further_flags, *flags_of(chosen.sanitizer))
        machine = f"{platform.system()} {platform.machine()}"
        cpu = (cpu_flags() or platform.processor()) if each == NATIVE else ""
        parts = [*texts, *(part.encode() for part in (*options, machine, cpu))]
        digest = hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts))
        found.append(_Recipe(source, options, digest.hexdigest()[:16]))
    return found


def _load_compiled(recipe: _Recipe, compiler: Compiler, store: Store | None) -> ctypes.CDLL:
    name = recipe.name(compiler)
    if store and (library := store.find(name)) and (loaded := _loaded(library)):
        return loaded
    for candidate in (store, None):
        folder = (candidate or temporary_store()).folder
        try:
            with Store(folder).alone(name) as work:  # another process may have built it meanwhile
                library = Store(folder).find(name)
                loaded = _loaded(library) if library else None
                loaded = loaded or _loaded(_build(recipe, compiler, Store(folder), work / name))
        except OSError as error:
            warn_once(
                f"compiled kernels cannot be kept in {folder} ({error.strerror or error}), so each process compiles "
                "its own; set MLSYS_CACHE_DIR to a folder that you can write to"
            )
            continue
        if loaded:
            return loaded
    raise KernelUnavailableError(f"{recipe.source.name} was compiled and cannot be loaded; a warning above says why")


def _build(recipe: _Recipe, compiler: Compiler, store: Store, built: Path) -> Path:
    _raise_again(recipe.name(compiler))
    try:
        compiler.compile(recipe.source, built, [*recipe.options, f"-I{INCLUDE}"])
    except KernelUnavailableError as error:
        _failures[recipe.name(compiler)] = str(error)
        raise
    return store.keep(built, {"compiler": compiler.version.splitlines()[0], "options": " ".join(recipe.options)})


_failures: dict[str, str] = {}  # by library: a compiler that refused a file, or hung, is not asked again


def _raise_again(name: str) -> None:
    if name in _failures:
        raise KernelUnavailableError(_failures[name])


def _found_of_any_compiler(recipes: Sequence[_Recipe], store: Store | None) -> ctypes.CDLL | None:
    if store is None:
        return None
    for recipe in recipes:
        if (library := store.find_any(recipe.stem)) and (loaded := _loaded(library)):
            return loaded
    return None


def _loaded(library: Path) -> ctypes.CDLL | None:
    """Load a library with a checked hash; return None, with a warning, if the system refuses it."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a newer C++ runtime than this machine's, a folder mounted noexec
        warn_once(f"{library} cannot be loaded: {error}")
        return None


_warned: set[str] = set()


def warn_without_kernels(what: str, instead: str, why: Exception) -> None:
    """Log, once in a process, that ``what`` runs without native kernels.

    Args:
        what: A part of mlsys: "Nimble".
        instead: The slower path that it takes: "torch's operators run".
        why: The :class:`~mlsys_core.errors.KernelUnavailableError`, whose message has the next step.
    """
    if what in _warned:
        return
    _warned.add(what)
    _log.warning("%s: %s, which is slower, for want of native kernels: %s", what, instead, why)
