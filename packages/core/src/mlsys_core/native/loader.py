"""Load a kernel: as it came in the wheel, else from the cache, else compiled and kept."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, KernelUnavailableError
from mlsys_core.native.compiler import Compiler, find_compiler
from mlsys_core.native.levels import INCLUDE, NATIVE, Recipe, builds, executable_levels, level_named, recipe
from mlsys_core.native.store import Store, temporary_store, trusted_store, warn_once
from mlsys_core.posix.machine import is_loaded

_log = logging.getLogger(__name__)

_further_flags: tuple[str, ...] = ()  # set by compiled_with alone


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's source and options, named once: :meth:`load` loads it, ``mlsys build`` and wheels compile it ahead.

    Attributes:
        source: A C++17 file.
        headers: The files that it includes, beside the core's own.
        flags: Options after the usual ones.
        compile_s: Seconds that it takes to compile on a quiet core, for the line that says so.
    """

    source: Path
    headers: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    compile_s: int = 3

    def load(self, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
        """Load this kernel into the process; see :func:`load_kernel`.

        Args:
            flags: Further options: a test may ask for another machine's paths.
        """
        return load_kernel(
            self.source,
            cache_dir=settings().cache_dir,
            flags=(*self.flags, *flags),
            headers=self.headers,
            compile_s=self.compile_s,
        )


def load_kernel(
    source: Path, *, cache_dir: Path, flags: tuple[str, ...] = (), headers: Sequence[Path] = (), compile_s: int = 3
) -> ctypes.CDLL:
    """Load the library of ``source``: the wheel's if it fits, else the cache's, else compile it.

    The level, the sanitizer and the compiler are those of :class:`~mlsys_core.config.Settings`. At level ``native`` the
    wheel's library for the highest level that this processor executes serves. Without a compiler (or with one that
    fails) a library by any other is taken from the cache, also one for a lower level.

    Args:
        source: A C++17 file.
        cache_dir: Where libraries are kept, below ``native/``; safe for several processes at once. If it cannot be
            written, or others could write to it, a temporary folder serves this process, and a warning says so.
        flags: Added to the usual ones and to the level's.
        headers: The files that ``source`` includes: it is compiled again when one of them changes, or one of the
            core's own (:data:`INCLUDE`).
        compile_s: Seconds that it takes to compile, for the line that says so.

    Raises:
        KernelUnavailableError: there is no C++ compiler, or it refuses the file, and the cache has no library.
        InvalidInputError: the level or the sanitizer of the settings is unknown, or cannot be used here.
    """
    chosen = settings()
    flags = (*flags, *_further_flags, *sanitizer_flags(chosen.sanitizer))
    level = level_named(chosen.kernel_level)
    wanted = recipe(source, level, flags=flags, headers=headers)

    def equivalent() -> list[Recipe]:  # for machines that cannot compile; each reads all sources
        others = reversed(executable_levels()) if level == NATIVE else ()
        return [wanted, *(recipe(source, each, flags=flags, headers=headers) for each in others)]

    if wanted.shipped.parent.is_dir() and (shipped := _shipped(equivalent())):
        return shipped
    store = trusted_store(cache_dir / "native")
    try:
        return _load_compiled(wanted, find_compiler(chosen.compiler), store, compile_s)
    except KernelUnavailableError as error:
        found = _found_of_any_compiler(equivalent(), store)
        if found is None:
            where = f"{cache_dir / 'native'} holds no {source.stem} for this processor"
            raise KernelUnavailableError(f"{error}; {where}") from None
        return found


def _shipped(recipes: Sequence[Recipe]) -> ctypes.CDLL | None:
    """Return the wheel's library for the highest level, if one fits. It is trusted as the Python beside it is."""
    return next((loaded for each in recipes if each.shipped.is_file() and (loaded := _loaded(each.shipped))), None)


def _load_compiled(wanted: Recipe, compiler: Compiler, store: Store | None, compile_s: int) -> ctypes.CDLL:
    name = wanted.name(compiler.version)
    if store and (library := store.find(name)) and (loaded := _loaded(library)):
        return loaded
    for candidate in (store, None):
        folder = (candidate or temporary_store()).folder
        try:
            with Store(folder).alone(name) as work:  # another process may have built it meanwhile
                library = Store(folder).find(name)
                loaded = _loaded(library) if library else None
                loaded = loaded or _loaded(_build(wanted, compiler, Store(folder), work / name, compile_s))
        except OSError as error:
            warn_once(
                f"compiled kernels cannot be kept in {folder} ({error.strerror or error}), so each process compiles "
                "its own; set MLSYS_CACHE_DIR to a folder that you can write to"
            )
            continue
        if loaded:
            return loaded
    raise KernelUnavailableError(f"{wanted.source.name} was compiled and cannot be loaded; a warning above says why")


def _build(wanted: Recipe, compiler: Compiler, store: Store, built: Path, compile_s: int) -> Path:
    name = wanted.name(compiler.version)
    _raise_again(name)
    _say(f"compiling {wanted.source.name} for this processor (once, about {compile_s} s)")
    try:
        compiler.compile(wanted.source, built, [*wanted.options, f"-I{INCLUDE}"])
    except KernelUnavailableError as error:
        _failures[name] = str(error)
        raise
    return store.keep(built, {"compiler": compiler.version.splitlines()[0], "options": " ".join(wanted.options)})


def _say(message: str) -> None:
    """Log ``message``; in a process that has not set logging up, print it to stderr: a wait is never unexplained."""
    _log.info("%s", message)
    if not logging.getLogger().handlers and not _log.isEnabledFor(logging.INFO):
        print(f"mlsys: {message}", file=sys.stderr, flush=True)


_failures: dict[str, str] = {}  # by library: a compiler that refused a file, or hung, is not asked again


def _raise_again(name: str) -> None:
    if name in _failures:
        raise KernelUnavailableError(_failures[name])


def _found_of_any_compiler(recipes: Sequence[Recipe], store: Store | None) -> ctypes.CDLL | None:
    if store is None:
        return None
    libraries = (library for each in recipes if (library := store.find_any(each.stem)))
    return next((loaded for library in libraries if (loaded := _loaded(library))), None)


def _loaded(library: Path) -> ctypes.CDLL | None:
    """Load a library with a checked hash; return None, with a warning, if the system refuses it."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a newer C++ runtime than this machine's, a folder mounted noexec
        warn_once(f"{library} cannot be loaded: {error}")
        return None


_warned: set[str] = set()


def warn_without_kernels(what: str, instead: str, why: Exception) -> None:
    """Log, once in a process, that ``what`` runs without native kernels: what that costs, and how to mend it.

    Args:
        what: A part of mlsys: "Nimble".
        instead: The slower path that it takes, and its cost: "torch's operators run".
        why: The :class:`~mlsys_core.errors.KernelUnavailableError`, whose message has the next step.
    """
    if what in _warned:
        return
    _warned.add(what)
    _log.warning("%s: %s, which is slower, for want of native kernels: %s", what, instead, why)


# By name: flags, and the runtime that must be in the process before anything else.
_SANITIZERS = {
    "address": (("-fsanitize=address",), "libasan.so"),
    "undefined": (("-fsanitize=undefined,float-cast-overflow",), None),
    "thread": (("-fsanitize=thread",), "libtsan.so"),
}
_READABLE = ("-O1", "-g", "-fno-omit-frame-pointer")  # so that a report names lines


def sanitizer_flags(names: str | None) -> tuple[str, ...]:
    """Return the flags that build a kernel with sanitizers.

    Args:
        names: One of them, or two with a comma between; None: no sanitizer.

    Raises:
        InvalidInputError: a name is unknown, two exclude each other, or a runtime was not preloaded.
    """
    if names is None:
        return ()
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in _SANITIZERS:
            raise InvalidInputError(
                f"MLSYS_SANITIZE is {names!r}; it may be {', '.join(_SANITIZERS)}, or two of them with a comma between"
            )
        runtime = _SANITIZERS[name][1]
        if runtime and not _is_in_process(runtime):  # it would end the process as the kernel is loaded
            raise InvalidInputError(
                f"MLSYS_SANITIZE={names} needs its runtime before anything else: "
                f"LD_PRELOAD=$(c++ -print-file-name={runtime}), or run make sanitize"
            )
    if {"address", "thread"} <= set(chosen):
        raise InvalidInputError("MLSYS_SANITIZE: address and thread exclude each other; use one process for each")
    return (*_READABLE, *(flag for name in chosen for flag in _SANITIZERS[name][0]))


@cache
def _is_in_process(runtime: str) -> bool:
    return is_loaded(runtime)


def builds_to_test() -> dict[str, tuple[str, ...]]:
    """Return the builds that kernels' tests run in this process: all levels, or with a sanitizer the chosen one."""
    chosen = settings()
    found = builds(chosen.kernel_level)
    return {chosen.kernel_level: ()} if chosen.sanitizer else found


@contextmanager
def compiled_with(flags: tuple[str, ...], *cached: Callable[..., Any]) -> Iterator[None]:
    """Compile kernels with further flags while this is open.

    Args:
        flags: One build of :func:`builds_to_test`.
        cached: Functions with a ``functools`` cache that keep what was loaded; they forget it now, and at the end.

    Example:
        >>> with compiled_with(("-march=x86-64",)):
        ...     pass
    """
    global _further_flags
    before, _further_flags = _further_flags, flags
    try:
        for function in cached:
            function.cache_clear()  # type: ignore[attr-defined]
        yield
    finally:
        _further_flags = before
        for function in cached:
            function.cache_clear()  # type: ignore[attr-defined]
