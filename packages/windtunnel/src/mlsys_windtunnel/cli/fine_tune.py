"""``mlsys windtunnel fine-tune``: a fitted pipeline, trained further as a whole and written as a module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.cli.options import Device, TrustPickles
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_windtunnel.module import WindTunnelModule


def fine_tune(
    pipeline_file: Annotated[
        Path, typer.Argument(metavar="PIPE", help="A fitted pipeline (.skops, .joblib, .pkl), or a translated folder.")
    ],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Training rows: csv or parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the trained module is written.")],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="The column of labels or numbers.")],
    evaluate: Annotated[
        Path | None, typer.Option("--eval", metavar="DATA", help="Rows to choose the best epoch by; else a tenth.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="What of trees is trained: L1 leaves, L2 thresholds, L3 features, L4 paths too.")
    ] = "L2",
    init: Annotated[
        str, typer.Option(help="Start at the source's answers (residual), its parameters (source), or anew (random).")
    ] = "residual",
    gate: Annotated[str, typer.Option(help="How a leaf is chosen: softmax, or the paper's tanh.")] = "softmax",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a step.")] = 1024,
    loss: Annotated[
        str, typer.Option(help="log_loss, hinge, focal; squared_error, absolute_error, huber, poisson.")
    ] = "auto",
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without a better score.")
    ] = None,
    min_gain_se: Annotated[
        float, typer.Option(min=0, help="Keep an epoch only where it gains more than so many standard errors.")
    ] = 1.0,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the state after each epoch; the same command resumes it.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each process.")] = None,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Of shuffling and the hold-out.")] = 0,
    trust_code: TrustPickles = False,
) -> None:
    """Train a fitted pipeline further, as one network: encoders, scalers, trees and models together.

    An epoch is kept only where its gain on the rows that the best epoch is chosen by is sure (--min-gain-se); else the
    result is the source itself. The folder can be predicted with, exported and trained further. Under torchrun the
    processes share each batch, and the first writes.

    Example: mlsys windtunnel fine-tune churn.skops january.parquet --target churned --eval february.parquet -o tuned

    Example: mlsys windtunnel fine-tune churn.joblib january.csv --target churned -o tuned --trust-code --epochs 5
    """
    from mlsys_windtunnel.backends.soft.options import SoftOptions
    from mlsys_windtunnel.cli.data import check_table_path, read_table
    from mlsys_windtunnel.export.artifact import refuse_fallbacks, save
    from mlsys_windtunnel.finetune.choose import splits_of
    from mlsys_windtunnel.finetune.losses import is_classifier, row_loss
    from mlsys_windtunnel.finetune.options import TrainingOptions
    from mlsys_windtunnel.finetune.processes import joined
    from mlsys_windtunnel.finetune.tune import fine_tune as tune
    from mlsys_windtunnel.finetune.tune import head_of
    from sklearn.utils import _safe_indexing

    for path in (data, evaluate):
        if path is not None:
            check_table_path(path)
    if output.exists() and not output.is_dir():
        raise InvalidInputError(f"{output} is a file; -o names a folder")
    soft = SoftOptions(level=level, gate=gate, init=init)  # type: ignore[arg-type]  # the options check it
    options = TrainingOptions(
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        loss=loss,
        patience=patience,
        min_gain_se=min_gain_se,
        checkpoint_dir=checkpoint_dir,
        n_threads=threads,
        device=device,
        random_state=seed,
        verbose=True,
    )
    module = loaded_module(pipeline_file, trust_code=trust_code)
    refuse_fallbacks(module.frontend, "train with fine_tune() and pickle its result")
    head = head_of(module)
    row_loss(loss, head)
    x, y = split(read_table(data), target, data, module)
    held_out: tuple[Any, Any] | None
    if evaluate is not None:
        held_out = split(read_table(evaluate), target, evaluate, module)
    else:
        held_out = None
        for train_rows, eval_rows in splits_of(
            x, y, cv=None, groups=None, fraction=0.1, seed=seed, is_classifier=is_classifier(head)
        ):
            held_out = (_safe_indexing(x, eval_rows), _safe_indexing(y, eval_rows))
            x, y = _safe_indexing(x, train_rows), _safe_indexing(y, train_rows)
    with joined() as processes:
        result = tune(module, x, y, eval_set=held_out, soft=soft, options=options)
    if not processes.is_first:
        return
    for epoch in result.history:
        loss_text = f"training loss {epoch['train_loss']:.5f}" if epoch["epoch"] else "before training".ljust(21)
        score = f"{result.metric} {epoch['valid_score']:.5f}" if held_out is not None else ""
        typer.echo(f"epoch {epoch['epoch']:2.0f}  {loss_text}  {score}  {epoch['seconds']:.1f} s")
    kept = (
        "the source itself, which no epoch was surely better than"
        if not result.best_epoch
        else f"epoch {result.best_epoch}"
    )
    save(result.module, output)
    typer.echo(f"wrote {output}: {kept} ({result.metric} {result.best_score:.5f})")


def loaded_module(path: Path, *, trust_code: bool) -> WindTunnelModule:
    """Return the module of a folder, or the translation of a fitted pipeline's file."""
    from mlsys_windtunnel.cli.data import load_pipeline
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.export.artifact import load

    return load(path) if path.is_dir() else load_pipeline(path, trust_code=trust_code, then=translate)


def split(frame: Any, target: str, path: Path, module: WindTunnelModule) -> tuple[Any, Any]:
    """Split a table into rows as the module takes them, and the targets."""
    if target not in frame.columns:
        raise InvalidInputError(f"{path} has no column {target!r}; it has {list(frame.columns)}")
    rows, columns = frame.drop(columns=target), module.frontend.columns
    missing = [name for name in columns or () if name not in rows.columns]
    if missing:
        raise InvalidInputError(f"{path} lacks the columns {missing}; it has {list(rows.columns)}")
    return (rows[list(columns)] if columns is not None else rows.to_numpy()), frame[target].to_numpy()
