"""Files of core: traces, workloads, results, profiles, exported programs; and what the command line parses."""

# ruff: noqa: E501 - lists of words

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.target import Case, Input, Target, read_archive, read_folder, write_archive, write_folder


def _file(folder: Path, name: str, read: Callable[[Path], Any]) -> Callable[[Input], None]:
    """Return a parser of a file with the bytes of an input."""
    path = folder / name

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        path.write_bytes(made)
        read(path)

    return parse


def _recording() -> Any:
    from mlsys_core.profiling import Recorder

    recorder = Recorder()
    with recorder.span("load", model="tiny", sizes=[1, 2.5, None]), recorder.span("read"):
        recorder.instant("found", at="é")
    recorder.count("waiting", 3)
    return recorder


def chrome_trace(folder: Path) -> Case:
    """Traces in Chrome's format, which Perfetto and torch write, too."""
    from mlsys_core.profiling.chrome_trace import parse_trace, write_trace

    write_trace(_recording().recording(), folder / "trace.json")
    seed = (folder / "trace.json").read_bytes()
    other = json.dumps(
        [
            {"ph": "B", "name": "a", "ts": 1, "pid": 1, "tid": 2},
            {"ph": "X", "name": "b", "ts": 1.5, "dur": 2, "pid": "one", "tid": 2, "args": {"x": 1}},
            {"ph": "E", "ts": 9, "pid": 1, "tid": 2},
            {"ph": "C", "name": "c", "ts": 3, "pid": 1, "args": {"v": 2}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "main"}},
        ]
    ).encode()

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        parse_trace(made, "fuzz")

    return Case([seed, other], parse, ("ph", "ts", "dur", "X", "B", "E", "M", "i", "C", "s", "f", "process_name"))


def profile_table(folder: Path) -> Case:
    """Profiles in the cache: a damaged one is measured again."""
    from mlsys_core.profiling import measure
    from mlsys_core.profiling.profile_table import ProfileCache, ProfileKey

    cache, key = ProfileCache(folder), ProfileKey.of("cpu", {"torch": "2"}, "square")
    cache.put(key, measure(["a", "b"], [1, 2, 4], run=lambda unit, size: sum(range(size))))
    seed = cache.path(key).read_bytes()
    return Case([seed], _file(folder, cache.path(key).name, lambda path: cache.get(key)), ("key", "table", "units"))


def workload_trace(folder: Path) -> Case:
    """Traces of requests, a JSON line each."""
    from mlsys_bench.workload.parse import parse_arrivals, parse_lengths
    from mlsys_bench.workload.trace import make_trace, read_trace, write_trace

    lengths = parse_lengths("uniform:1:9")
    made = make_trace(parse_arrivals("poisson", rate=5.0), prompts=lengths, outputs=lengths, num_items=5, seed=0)
    write_trace(made, folder / "seed.jsonl")
    words = ("arrival_s", "num_input_tokens", "prompt", "extra", "arrivals", "ClosedLoop")

    def read(path: Path) -> None:
        trace = read_trace(path)
        _ = trace.closed_loop

    return Case([(folder / "seed.jsonl").read_bytes()], _file(folder, "trace.jsonl", read), words)


def command_line(folder: Path) -> Case:
    """Arrivals, lengths, bounds and shapes, as options give them."""
    from mlsys_bench.workload.parse import parse_arrivals, parse_bounds, parse_lengths
    from mlsys_dvabatch.cli.explain import parse_shape

    parsers: dict[str, Callable[[str], Any]] = {
        "arrivals": lambda text: parse_arrivals(text, rate=2.0),
        "lengths": parse_lengths,
        "bounds": parse_bounds,
        "shape": parse_shape,
    }
    seeds: list[Input] = [
        json.dumps([kind, text]).encode()
        for kind, text in (
            ("arrivals", "poisson"), ("arrivals", "constant"), ("arrivals", "closed:4:0.1"),
            ("arrivals", "stepping:1@2,3@4"), ("lengths", "uniform:1:9"), ("lengths", "lognormal:10:0.5"),
            ("lengths", "5"), ("bounds", "ttft=200ms"), ("shape", "3,224,224"),
        )
    ]  # fmt: skip

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        try:
            kind, text = json.loads(made)
            text.encode()
            parser = parsers[kind]
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return
        parser(text)

    def known(made: Input) -> None:
        from mlsys_core.errors import MlsysError

        try:
            parse(made)
        except MlsysError:
            return

    return Case(seeds, known, ("poisson:", "1e999", "nan", "-1", ":", ",", "@", "=", "file:/etc/passwd", "1" * 5000))


def _program(folder: Path) -> Path:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.linear(x).view(x.shape[0] // 2, 8)}

    torch.manual_seed(0)
    exported = torch.export.export(Net(), (torch.ones(6, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(exported, folder / "net.pt2")
    return folder / "net.pt2"


def pt2_members(folder: Path) -> Case:
    """Exported programs whose JSON or weights were changed; the archive around them is whole."""
    from mlsys_core.pt2.program import load_program

    seed = read_archive(_program(folder))

    def parse(made: Input) -> None:
        load_program(write_archive(made, folder / "made.pt2")).program.module()

    words = ("torch.os.system", "torch.ops.aten.add.Tensor", "Symbol('s0', positive=True, integer=True)", "as_tensor",
             "as_int", "as_expr", "__import__('os').system('exit 1')", "linear.weight", "x", "as_string", "as_graph",
             "Pow(s0, 9)", "L['x'].size()[0] == 2", "as_sym_int", "as_none", "torch.ops.aten.from_file.default")  # fmt: skip
    return Case([seed], parse, words)


def pt2_bytes(folder: Path) -> Case:
    """Exported programs whose bytes were changed."""
    from mlsys_core.pt2.program import load_program

    seed = _program(folder).read_bytes()
    return Case([seed], _file(folder, "made.pt2", load_program), ("PK\x01\x02", "PK\x03\x04", "PK\x05\x06"))


def npz(folder: Path) -> Case:
    """The checkpoint of g2p-en, in its small form."""
    import numpy as np
    from mlsys_batchmaker.models.g2p import g2p_model

    buffer, hidden = io.BytesIO(), 2
    shapes: dict[str, tuple[int, ...]] = {
        "enc_emb": (29, hidden),
        "dec_emb": (74, hidden),
        "fc_w": (74, hidden),
        "fc_b": (74,),
    }
    for side in ("enc", "dec"):
        shapes |= {f"{side}_w_ih": (3 * hidden, hidden), f"{side}_w_hh": (3 * hidden, hidden)}
        shapes |= {f"{side}_b_ih": (3 * hidden,), f"{side}_b_hh": (3 * hidden,)}
    rng = np.random.default_rng(0)
    np.savez(buffer, **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
    seed = read_archive(buffer)

    def parse(made: Input) -> None:
        g2p_model(write_archive(made, folder / "made.npz"), batch_sizes=(1,))

    return Case([seed], parse, ("'descr': '|O'", "(1000000000000,)", "\\x93NUMPY"))


def batchmaker_folder(folder: Path) -> Case:
    """Directories of BatchMaker: manifest, weights, cells."""
    from mlsys_batchmaker.models.sequence import lstm_model
    from mlsys_batchmaker.models.store import load_model, save_model

    save_model(lstm_model(num_words=5, hidden_size=4), folder / "seed")
    files = read_folder(folder / "seed")
    work = folder / "made"

    def parse(made: Input) -> None:
        load_model(write_folder(made, work))

    return Case([files], parse, ("os:system", "sequence", "../../x", "LSTMCell", "float32", "num_words", "hidden_size"))


TARGETS = (
    Target("chrome-trace", chrome_trace, share=20),
    Target("profile-cache", profile_table, share=14),
    Target("workload-trace", workload_trace, share=20),
    Target("options", command_line, share=30),
    Target("pt2-members", pt2_members, share=1),
    Target("pt2-bytes", pt2_bytes, share=1),
    Target("npz", npz, share=1),
    Target("batchmaker-folder", batchmaker_folder, share=1),
)
