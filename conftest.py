"""Settings of every test: none is decided by the clock. pytest's own timeout ends what hangs."""

import functools
import gc
import inspect
import os
import ssl
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as httpx_transports
import pytest
from hypothesis import Phase, settings
from mlsys_core.collector import collect_as_usual, collect_seldom
from mlsys_core.memory.pages import return_freed_memory
from mlsys_core.native.loader import builds_to_test

collect_seldom()  # until all tests are imported: what imports make stays

# httpx gives up after five seconds by default: on a busy machine that decides tests which are not about time.
_patience = inspect.signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = None


# Each client of httpx, and each `httpx.get`, reads the machine's certificates: 25 ms of a processor. Here once.
_new_ssl_context = httpx_transports.create_ssl_context
_machines_ssl_context = functools.cache(_new_ssl_context)


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    given = verify is not True or cert is not None
    return _new_ssl_context(verify, cert, trust_env) if given else _machines_ssl_context(trust_env=trust_env)


httpx_transports.create_ssl_context = _ssl_context

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that wants a hub brings its own

# The same examples for everybody: a run says something of the change. `--hypothesis-profile=random` looks further.
settings.register_profile("mlsys", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
# For `make mutants`: a failure is enough, its smallest form is not wanted; thousands of runs have few examples each.
settings.register_profile(
    "mutants", deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True, max_examples=25
)
MOST_CASES, MOST_EXAMPLES = 5, 10  # of one test, under --quick; @pytest.mark.quick_cases(n) sets fewer or more cases
LARGE_GRID = 24  # cases of one test, above which --pairs and --grids choose
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=MOST_EXAMPLES)
settings.load_profile("mlsys")
STATM, GROWTH = Path("/proc/self/statm"), 300 << 20  # a process's pages; bytes
_OWN_SETTINGS = "_hypothesis_internal_use_settings"  # where @settings keeps them; it may not be applied twice


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick`` (``make test`` gives it), ``--pairs`` (``make test-all``) and ``--grids`` (``make oracles``)."""
    parser.addoption(
        "--quick",
        action="store_true",
        help="few cases of large grids, few examples of properties, and none of the tests in tests/slow.txt",
    )
    parser.addoption("--keep-slow", action="store_true", help="with --quick: the tests in tests/slow.txt as well")
    parser.addoption("--pairs", action="store_true", help="of large grids the cases that cover all pairs of values")
    parser.addoption("--grids", action="store_true", help="nothing but the large grids, every case of them")


def pytest_configure(config: pytest.Config) -> None:
    """Choose hypothesis's profile."""
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what ``--quick``, ``--pairs`` or ``--grids`` chooses."""
    if config.getoption("--quick"):
        _keep_quick(config, items)
    elif config.getoption("--pairs") or config.getoption("--grids"):
        _keep_pairs(config, items, only_grids=config.getoption("--grids"))
    if hasattr(config, "workerinput"):
        _in_order_of_time(config, items)


def _in_order_of_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with a slow test first and examples in docstrings last: workers then end at about the same time."""
    files = {item: item.nodeid.partition("::")[0] for item in items}
    slow = {name.partition("::")[0] for name in _slow_tests(config)}
    slow |= {files[item] for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.nodeid.startswith("packages/") - (files[item] in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to workers where ``--dist loadgroup`` keeps groups together."""
    from tests.by_file import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None


def _keep_quick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep few cases of a parametrised test, which cover pairs of its values, and no slow test."""
    from tests.representatives import representatives, values_by_axis

    if not config.getoption("--keep-slow"):
        _leave_out_slow(config, items)
    dropped: set[pytest.Item] = set()
    for cases in _cases_by_test(items).values():
        marker = cases[0].get_closest_marker("quick_cases")
        most = marker.args[0] if marker else MOST_CASES
        own = _of_this_machine(cases)
        kept = representatives([values_by_axis(case) for case in own], most)
        dropped |= set(cases) - {own[index] for index in kept}
    _drop(config, items, dropped)
    for item in items:
        _bound_examples(item)


def _keep_pairs(config: pytest.Config, items: list[pytest.Item], *, only_grids: bool) -> None:
    """Keep the cases of large grids that cover all pairs of values, or ``some_cases``; or drop all but large grids."""
    from tests.representatives import representatives, values_by_axis

    unneeded: set[pytest.Item] = set()
    large: set[pytest.Item] = set()
    for cases in _cases_by_test(items).values():
        values = [values_by_axis(case) for case in cases]
        marker = cases[0].get_closest_marker("some_cases")
        if not marker and (len(cases) <= LARGE_GRID or len(values[0]) < 2):
            continue
        kept = representatives(values, marker.args[0] if marker else len(cases) - 1)
        if len(kept) < len(cases) - 1:
            unneeded |= set(cases) - {cases[index] for index in kept}
            large.update(cases)
    _drop(config, items, set(items) - large if only_grids else unneeded)


def _drop(config: pytest.Config, items: list[pytest.Item], dropped: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _cases_by_test(items: list[pytest.Item]) -> dict[str, list[Any]]:
    grids: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            grids.setdefault(_name(item), []).append(item)
    return grids


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run where the tests of a group would not stay on one worker: their clusters and ports would meet."""
    collect_as_usual()
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("this xdist keeps no groups under this pytest: take pytest<9.2")


def _leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what tests/slow.txt lists, unless the command line names it."""
    listed = _slow_tests(config)
    named = "\n".join(config.args)
    slow = {item for item in items if (name := _name(item)) in listed and name not in named}
    _drop(config, items, slow)


def _slow_tests(config: pytest.Config) -> set[str]:
    return set((config.rootpath / "tests" / "slow.txt").read_text().splitlines())


def _name(item: pytest.Item) -> str:
    """Return a test's name without its case and, behind ``@``, its group."""
    return item.nodeid.partition("[")[0].partition("@")[0]


@functools.cache
def _other_builds() -> frozenset[str]:
    return frozenset(builds_to_test()) - {"native"}


def _of_this_machine(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases without builds of the kernels for other instruction sets, which compile for a minute."""
    others = _other_builds()
    texts = [{value for value in case.callspec.params.values() if isinstance(value, str)} for case in cases]
    return [case for case, own in zip(cases, texts, strict=True) if not own & others] or cases


def _bound_examples(item: pytest.Item) -> None:
    """Reduce the examples of a property that sets a larger number itself: its settings override the profile."""
    function = inspect.unwrap(getattr(item, "obj", item), stop=lambda each: hasattr(each, _OWN_SETTINGS))
    for owner, name in ((function, _OWN_SETTINGS), (getattr(item, "cls", None), "settings")):
        own = getattr(owner, name, None)
        if isinstance(own, settings) and own.max_examples > MOST_EXAMPLES:
            setattr(getattr(owner, "__func__", owner), name, settings(own, max_examples=MOST_EXAMPLES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ``make test-peers`` a test that skips itself has failed: what it needs should be installed."""
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Likewise a file."""
    return _required((yield))


def _required(report: Any) -> Any:
    if report.skipped and os.environ.get("MLSYS_REQUIRE_PEERS") == "1":
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, and MLSYS_REQUIRE_PEERS=1 forbids it: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure at once, on standard error: a run that is cut off has no list of them at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)


def pytest_runtest_setup() -> None:
    """Keep the operators of ONNX's exporter, which each export reads from sources again: half of its 0.8 s."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")
    if exporter is not None and "onnxscript._framework_apis.torch_2_5" in sys.modules:
        apis = exporter.onnxscript_apis
        if not hasattr(apis.get_torchlib_ops, "cache_info"):
            apis.get_torchlib_ops = functools.cache(apis.get_torchlib_ops)


_resident = {"bytes": 0}  # when memory was last given back


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files give back what a worker has grown by: it runs thousands, and torch keeps what it compiled."""
    if nextitem is None or nextitem.path == item.path or not STATM.exists():
        return
    now = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if now > _resident["bytes"] + GROWTH:
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        gc.collect()
        return_freed_memory()
        _resident["bytes"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Forget what ``mlsys_*`` functions remember: mutmut forks a process in which all tests have run already."""
    if session.config.getoption("--hypothesis-profile", None) == "mutants":
        gc.unfreeze()
        for each in gc.get_objects():
            if isinstance(each, functools._lru_cache_wrapper) and str(each.__module__).startswith("mlsys_"):
                each.cache_clear()
