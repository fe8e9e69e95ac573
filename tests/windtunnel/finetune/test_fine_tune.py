"""Fine-tuning: epoch 0 is the source, runs resume bit for bit, processes add up to one, streams are like tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import fine_tune, translate
from mlsys_windtunnel.estimators import FactorizationMachineClassifier, MatrixFactorizationRegressor
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.train import Trainer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 4)) * [1, 10, 0.01, 1] + [0, 100, 0, 0]
Y = (X[:, 0] + 0.1 * (X[:, 1] - 100) + X[:, 3] ** 2 + RNG.normal(0, 0.5, 400) > 1).astype(int)
LIGHT = {"n_estimators": 5, "num_leaves": 9, "verbose": -1, "n_jobs": 1}
SOURCE = make_pipeline(StandardScaler(), LGBMClassifier(**LIGHT)).fit(X[:200], Y[:200])
MODULE = translate(SOURCE)
EVALUATION = (X[200:], Y[200:])


def tuned(module: Any = MODULE, **changes: Any) -> Any:
    changes = {"epochs": 2, "batch_size": 64, "eval_set": EVALUATION, **changes}
    return fine_tune(module, X[:200], Y[:200], **changes)


@given(
    level=st.sampled_from(["L1", "L2", "L3", "L4"]),
    gate=st.sampled_from(["softmax", "tanh"]),
    temperature=st.floats(0.01, 3),
    kind=st.sampled_from(["boosted", "three classes", "forest", "regression"]),
)
@settings(max_examples=20)
def test_epoch_0_is_the_source(level: str, gate: str, temperature: float, kind: str) -> None:
    source = KINDS[kind]
    module = translate(source)
    result = fine_tune(
        module,
        X,
        source.predict(X),
        epochs=1,
        lr=1e-12,
        level=level,
        gate=gate,
        temperature=temperature,
        weight_decay=0,
    )
    joined = Tunable.of(result.module)
    assert joined is not None
    method = "predict" if kind == "regression" else "predict_proba"
    expected = getattr(source, method)(X)
    start = Tunable(joined.frontend, joined.start, joined.exact, joined.start).module()
    np.testing.assert_allclose(getattr(start, method)(X), expected, rtol=0, atol=3e-6 if kind == "forest" else 1e-12)
    np.testing.assert_allclose(getattr(result.module, method)(X), expected, rtol=0, atol=1e-4)


KINDS = {
    "boosted": LGBMClassifier(**LIGHT).fit(X, Y),
    "three classes": LGBMClassifier(**LIGHT).fit(X, Y + (X[:, 2] > 0)),
    "forest": RandomForestClassifier(4, max_leaf_nodes=9, random_state=0).fit(X, Y),
    "regression": LGBMRegressor(**LIGHT, objective="poisson").fit(X, Y + 0.5),
}


@pytest.mark.parametrize("start", [{"init": "residual"}, {"init": "source", "temperature": 3.0}], ids=["exact", "soft"])
def test_the_source_is_kept_where_training_only_harms(start: dict[str, Any]) -> None:
    result = fine_tune(MODULE, X[:200], 1 - Y[:200], eval_set=EVALUATION, epochs=2, lr=0.05, **start)
    assert result.best_epoch == 0
    assert result.best_score == pytest.approx(roc_auc_score(Y[200:], MODULE.predict_proba(X[200:])[:, 1]), abs=1e-3)
    np.testing.assert_array_equal(result.module.predict_proba(X), MODULE.predict_proba(X))


def test_training_gets_better_and_leaves_the_module_as_it_is() -> None:
    before = {name: value.clone() for name, value in MODULE.state_dict().items()}
    result = tuned(level="L4", epochs=8, lr=0.01)
    assert result.best_epoch > 0
    assert result.best_score > result.history[0]["valid_score"] + 0.005
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]
    assert all(torch.equal(value, before[name]) for name, value in MODULE.state_dict().items())


def test_leaf_values_have_a_decay_of_their_own() -> None:
    """Nothing but decay: a rate so low that gradients do not count, a decay so high that it does."""
    options = {"eval_set": None, "init": "source", "schedule": "constant", "lr": 1e-9}
    start, decayed = (
        dict(tuned(level="L4", **options, **more).module.network.named_parameters())
        for more in ({}, {"leaf_decay": 5e7})
    )
    assert any(name.endswith(".leaf") for name in start)
    for name, value in start.items():
        shrunk = 0.95 ** (2 * 4) if name.endswith(".leaf") else 1.0  # two epochs of four steps
        torch.testing.assert_close(decayed[name], value * shrunk, rtol=1e-4, atol=1e-6)


def test_a_trained_module_is_saved_loaded_and_trained_further(tmp_path: Path) -> None:
    first = tuned(level="L4", epochs=3, lr=0.01)
    loaded = load(save(first.module, tmp_path / "tuned"))
    np.testing.assert_array_equal(loaded.predict_proba(X), first.module.predict_proba(X))
    second = tuned(loaded, epochs=3, lr=0.01)
    assert second.history[0]["valid_score"] == pytest.approx(first.best_score)
    assert Tunable.of(second.module).exact is not None


def test_a_trained_module_is_exported(tmp_path: Path) -> None:
    module = tuned(level="L4", eval_set=None).module
    export_pt2(module, tmp_path / "tuned.pt2", methods=["predict_proba"])
    exported = load_pt2(tmp_path / "tuned.pt2")
    np.testing.assert_allclose(exported.predict_proba(X), module.predict_proba(X), atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "dropout": 0.2, "level": "L4"}])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    changes = {**changes, "eval_set": None}  # so that the last epoch is kept
    whole = tuned(epochs=4, **changes)
    epoch = Trainer._epoch

    def interrupted(self: Trainer, progress: Any) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt
        epoch(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuned(epochs=4, checkpoint_dir=tmp_path, **changes)
    torch.manual_seed(123)
    resumed = tuned(epochs=4, checkpoint_dir=tmp_path, **changes)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name
    assert whole.best_epoch == resumed.best_epoch == 4
    losses = [[entry["train_loss"] for entry in run.history[1:]] for run in (whole, resumed)]
    assert losses[0] == losses[1]


def _interrupted_at(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = Trainer._step

    def step(self: Trainer, batch: Any, factor: float) -> tuple[float, float]:
        done = go_on(self, batch, factor)
        if self.epochs_begun == epoch:
            raise KeyboardInterrupt
        return done

    def begin(self: Trainer, progress: Any) -> None:
        self.epochs_begun = progress.epoch + 1
        epoch_of(self, progress)

    epoch_of = Trainer._epoch
    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(Trainer, "_epoch", begin)


@pytest.mark.parametrize("evaluation", [EVALUATION, None])
def test_what_was_best_is_kept_after_an_interrupt(evaluation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"schedule": "constant", "min_gain_se": 0.0, "eval_set": evaluation}
    whole = tuned(epochs=2, **options)
    _interrupted_at(3, monkeypatch)
    with pytest.warns(UserWarning, match="interrupted in epoch 3: the best so far is kept"):
        cut = tuned(epochs=5, **options)
    assert (cut.best_epoch, len(cut.history)) == (whole.best_epoch, 3)
    np.testing.assert_array_equal(cut.module.predict_proba(X), whole.module.predict_proba(X))


def test_an_interrupt_before_the_first_epoch_keeps_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    _interrupted_at(1, monkeypatch)
    with pytest.warns(UserWarning, match="interrupted in epoch 1"):
        cut = tuned(eval_set=None)
    assert cut.best_epoch == 0
    np.testing.assert_allclose(cut.module.predict_proba(X), SOURCE.predict_proba(X), atol=1e-6)


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "is_shown"), [(None, True, True), (None, False, False), (False, True, False)]
)
def test_progress_is_shown_in_a_terminal(
    verbose: bool | None, is_terminal: bool, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    tuned(verbose=verbose, epochs=1)
    assert ("fine-tuning" in capsys.readouterr().err) == is_shown


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    tuned(epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(InvalidInputError, match="another run"):
        tuned(epochs=1, lr=0.5, checkpoint_dir=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        tuned(epochs=1, checkpoint_dir=tmp_path)


PROGRAM = """if True:
    import os, sys, time
    import numpy as np
    from mlsys_windtunnel import fine_tune
    from mlsys_windtunnel.export.artifact import load
    from mlsys_windtunnel.finetune.processes import Processes

    folder, add, seen = sys.argv[1], Processes.add_gradients, []

    def add_or_die(self, parameters):
        seen.append(1)
        if len(seen) == 9 and self.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)  # in the second epoch
        add(self, parameters)

    Processes.add_gradients = add_or_die
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        time.sleep(2)  # the other one finds no address that was this one's before
    data = np.load(f"{folder}/rows.npz")
    tuned = fine_tune(load(f"{folder}/module"), data["x"], data["y"], level="L4", epochs=2, lr=0.01, batch_size=50,
                      n_threads=1, checkpoint_dir=f"{folder}/state")
    if os.environ["RANK"] == "0":
        np.savez(f"{folder}/result.npz", proba=tuned.module.predict_proba(data["x"]))
"""


def test_two_processes_of_which_one_is_lost_come_to_what_one_does(tmp_path: Path) -> None:
    one = fine_tune(MODULE, X, Y, level="L4", epochs=2, lr=0.01, batch_size=50, n_threads=1)
    save(MODULE, tmp_path / "module")
    np.savez(tmp_path / "rows.npz", x=X, y=Y)
    (tmp_path / "program.py").write_text(PROGRAM)
    run = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    command = [sys.executable, "-m", *run.split(), str(tmp_path / "program.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exitcode  : 3" in done.stderr or "exitcode: 3" in done.stderr, "one was lost"
    proba = np.load(tmp_path / "result.npz")["proba"]
    np.testing.assert_allclose(proba, one.module.predict_proba(X), atol=2e-4)
    assert np.abs(one.module.predict_proba(X) - MODULE.predict_proba(X)).max() > 0.01


@pytest.mark.parametrize(
    "source",
    [
        make_pipeline(StandardScaler(), LogisticRegression()),
        make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=20, random_state=0)),
        make_pipeline(StandardScaler(), FactorizationMachineClassifier(max_iter=10, random_state=0)),
        make_pipeline(StandardScaler(), LinearSVC()),
    ],
    ids=lambda pipeline: type(pipeline[-1]).__name__,
)
def test_models_without_trees_are_trained_as_they_are(source: Any) -> None:
    module = translate(source.fit(X[:60], Y[:60]))
    result = fine_tune(module, X, Y, epochs=10, lr=0.01, batch_size=50)
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]
    assert result.module.predict(X).shape == (400,)


def test_ratings_are_fine_tuned() -> None:
    ids = np.array([[user, item] for user in range(12) for item in range(9)])
    ratings = np.sin(ids[:, 0]) * np.cos(ids[:, 1]) + ids[:, 0] * 0.1
    module = translate(MatrixFactorizationRegressor(3, max_iter=5, random_state=0).fit(ids, ratings))
    result = fine_tune(module, ids, ratings, epochs=20, lr=0.02, batch_size=27, init="source")
    assert result.history[-1]["train_loss"] < 0.7 * result.history[1]["train_loss"]


def test_another_objective_changes_what_is_learnt() -> None:
    """The second scenario of section 5.2.4: a loss of one's own, here one that only punishes missed positives."""

    def missed(margin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return target * torch.nn.functional.softplus(-margin[:, 0])

    result = fine_tune(MODULE, X, Y, loss=missed, epochs=10, lr=0.02, metric="accuracy")
    assert result.module.predict(X).mean() > SOURCE.predict(X).mean()


def test_weights_of_rows_move_predictions() -> None:
    heavy = tuned(sample_weight=np.where(Y[:200] == 1, 30.0, 1.0), epochs=6, lr=0.02, eval_set=None)
    assert heavy.module.predict(X).mean() > SOURCE.predict(X).mean()


def test_patience_stops_early() -> None:
    result = fine_tune(MODULE, X[:200], 1 - Y[:200], eval_set=EVALUATION, epochs=50, lr=0.05, patience=2)
    assert len(result.history) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"lr": -1.0}, "lr"),
        ({"ema": 1.5}, "ema"),
        ({"nonsense": 1}, "no option nonsense"),
        ({"sample_weight": [1.0]}, "sample_weight"),
        ({"loss": "poisson"}, "log_loss"),
        ({"metric": "r2"}, "roc_auc"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_before_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tuned(**changes)


def test_labels_that_the_source_does_not_know_are_named() -> None:
    with pytest.raises(InvalidInputError, match="7"):
        fine_tune(MODULE, X, np.where(Y == 1, 7, 0))
