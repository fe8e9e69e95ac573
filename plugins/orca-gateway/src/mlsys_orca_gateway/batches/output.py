"""The output and error files of a batch that ends: its results in the order of its input."""

from __future__ import annotations

from collections.abc import Iterator

from mlsys_serving.http.json_body import parse_json

from mlsys_orca_gateway.batches.files import FileStore, KeptFile
from mlsys_orca_gateway.batches.lines import Plan, missing_line, request_id_of
from mlsys_orca_gateway.batches.store import RunningBatch

_WHY = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


def write_output(
    running: RunningBatch, files: FileStore, plan: Plan, status: str
) -> tuple[KeptFile | None, KeptFile | None]:
    """Write the files of a batch; from any thread. Done twice it writes the same files again.

    Args:
        running: The batch, all of whose requests have ended that will.
        files: Where they go; they are not yet made known there.
        plan: Places of its requests, for those that did not run.
        status: How it ends.

    Returns:
        The output file and the error file; None where it would be empty.

    Raises:
        LogUnavailableError: the disk is full.
    """
    kept, total = running.kept, running.kept.batch.request_counts.total
    failed = [index for index in range(total) if running.done.get(index, True)]
    done = [index for index in range(total) if not running.done.get(index, True)]

    def text(indices: list[int]) -> Iterator[bytes]:
        for index in indices:
            yield (running.line(index) if index in running.done else missing(index)) + b"\n"

    def missing(index: int) -> bytes:
        with files.path(kept.batch.input_file_id).open("rb") as source:
            source.seek(plan.starts[index])
            value = parse_json(source.read(plan.stops[index] - plan.starts[index]))
        return missing_line(request_id_of(kept.batch.id, index), value["custom_id"], *_WHY[status])

    def write(name: str, indices: list[int]) -> KeptFile | None:
        if not indices:
            return None
        return files.write(
            text(indices),
            filename=f"{kept.batch.id}_{name}.jsonl",
            purpose="batch_output",
            owner=kept.owner,
            file_id=f"file-{kept.batch.id.removeprefix('batch_')}-{name}",
            keep_s=kept.output_keep_s,
        )

    return write("output", done), write("error", failed)
