"""Files of WindTunnel: fitted pipelines, translated folders, exported programs' descriptions, journals, checkpoints."""

# ruff: noqa: E501 - lists of words

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.fuzz.target import Case, Input, Target, read_archive, read_folder, write_archive, write_folder


def _pipeline() -> Any:
    import numpy as np
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    rng = np.random.default_rng(0)
    x = np.column_stack([rng.standard_normal((30, 2)), rng.integers(0, 3, 30)])
    columns = make_column_transformer((StandardScaler(), [0, 1]), (OneHotEncoder(), [2]))
    return make_pipeline(columns, RandomForestClassifier(2, max_depth=2, random_state=0)).fit(x, x[:, 0] > 0)


def skops_file(folder: Path) -> Case:
    """Fitted pipelines in skops files: what each states, and their arrays."""
    import skops.io
    from mlsys_windtunnel.parse.load import load_estimator

    skops.io.dump(_pipeline(), folder / "seed.skops")
    seed = read_archive(folder / "seed.skops")

    def parse(made: Input) -> None:
        load_estimator(write_archive(made, folder / "made.skops"))

    words = ("os", "system", "__class__", "__module__", "__loader__", "ObjectNode", "FunctionNode", "TypeNode", "ReduceNode",
             "subprocess", "Popen", "numpy", "ndarray", "builtins", "eval", "file", "content", "type", "__id__")  # fmt: skip
    return Case([seed], parse, words)


def artifact(folder: Path) -> Case:
    """Translated folders: the graph, whose checksum of the tensors is made right again, and the tensors."""
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.artifact import GRAPH_FILE, TENSORS_FILE, load, save

    save(translate(_pipeline()), folder / "seed")
    work = folder / "made"

    def parse(made: Input) -> None:
        assert isinstance(made, dict)
        files = dict(made)
        try:
            graph = json.loads(files[GRAPH_FILE])
            graph["sha256"] = hashlib.sha256(files[TENSORS_FILE]).hexdigest()
            files[GRAPH_FILE] = json.dumps(graph).encode("ascii")
        except (KeyError, ValueError, TypeError, RecursionError):
            pass
        load(write_folder(files, work))

    words = ("mlsys_windtunnel.modules.network:Network", "os:system", "torch.nn.modules.linear:Linear", "builtins:eval", "tensor", "items",
             "float64", "object", "dtype", "shape", "name", "class", "type", "state", "trees")  # fmt: skip
    return Case([read_folder(folder / "seed")], parse, words)


def description(folder: Path) -> Case:
    """The host's part that stands beside a program in ``.pt2`` and ONNX files."""
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export import exported, program

    module = translate(_pipeline())
    seed = program.describe(module, program.Answers(module, ["predict", "predict_proba"]).names).encode()

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        exported.restore(made.decode(errors="replace"), lambda table: [table], Path("x.pt2"))

    return Case([seed], parse, ("os:system", "frontend", "classes", "float64", "answers", "flat", "outputs", "predict"))


def journal(folder: Path) -> Case:
    """Journals of experiments, which a restart goes on with."""
    from dataclasses import asdict

    from mlsys_bench.windtunnel.experiments.data import Sizes
    from mlsys_bench.windtunnel.experiments.suite import Result, Setting, open_journal

    setting = Setting(Sizes(9, 9, 9), 3, 4)
    lines = [{"setting": asdict(setting)}, asdict(Result("a", 0.5, 0.25, 1.0, 10, {"epoch": 2}))]
    path = folder / "journal.jsonl"

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        path.write_bytes(made)
        open_journal(path, setting)

    seed = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return Case([seed], parse, ("setting", "cell", "score", "null"))


def checkpoint(folder: Path) -> Case:
    """Checkpoints of fine-tuning."""
    import torch
    from mlsys_windtunnel.finetune import checkpoint as module

    content = {"fingerprint": "x", "a": torch.ones(3), "b": [1, 2.5, "c"]}
    torch.save(content, folder / module.FILE)
    seed = (folder / module.FILE).read_bytes()

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        module.load(made, folder, "x")

    def known(made: Input) -> None:
        from mlsys_core.errors import InvalidInputError

        try:
            parse(made)
        except InvalidInputError:
            if made != seed:  # which lacks most fields: what is looked for is in reading it
                raise

    return Case([seed], known, ("cposix\nsystem\n", "c__builtin__\neval\n", "torch._utils", "_rebuild_tensor_v2"))


TARGETS = (
    Target("skops", skops_file, share=1),
    Target("artifact", artifact, share=1),
    Target("pt2-description", description, share=2),
    Target("journal", journal, share=20),
    Target("checkpoint", checkpoint, share=2),
)
