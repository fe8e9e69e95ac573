"""The planner: whatever it decides can be replayed, and it decides as one would by hand."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.planning.planner import Assignment, Job, assign, candidates
from mlsys_nimble.planning.storage import ancestors


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, 14))):
        needed = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        seconds = draw(st.sampled_from([1e-6, 2e-5, 5e-4]))
        jobs.append(Job(seconds, draw(st.sampled_from([1, 2, 7, 64])), tuple(sorted(needed))))
    return jobs


def replay(assignment: Assignment, jobs: list[Job]) -> dict[tuple[int, int], int]:
    """Run the lists as the executor does, the last worker that can first; when each piece began."""
    done = [0] * len(assignment.lists)
    begun: dict[tuple[int, int], int] = {}
    for moment in range(sum(map(len, assignment.lists))):
        for worker in reversed(range(len(done))):
            if done[worker] == len(assignment.lists[worker]):
                continue
            piece = assignment.lists[worker][done[worker]]
            if all(done[other] >= count for other, count in piece.waits):
                begun[piece.job, piece.part] = moment
                done[worker] += 1
                break
        else:
            raise AssertionError(f"all workers wait: {done}")
    return begun


@given(job_lists(), st.integers(1, 4))
def test_every_unit_runs_once_and_nothing_deadlocks(jobs: list[Job], num_workers: int) -> None:
    for assignment in candidates(jobs, num_workers):
        begun = replay(assignment, jobs)
        for index, job in enumerate(jobs):
            ranges = sorted(
                piece.units(job.units) for pieces in assignment.lists for piece in pieces if piece.job == index
            )
            assert ranges[0][0] == 0
            assert ranges[-1][1] == job.units
            assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
        assert len(begun) == sum(map(len, assignment.lists))


Spot = tuple[int, int]  # worker, position on its list


def surely_before(assignment: Assignment, spot: Spot, known: dict[Spot, frozenset[Spot]]) -> frozenset[Spot]:
    """From the definitions: a piece has seen its own list so far and what that waited for, and what those had seen."""
    if spot not in known:
        worker, position = spot
        found: set[Spot] = set()
        own = [(worker, position - 1)] if position else []
        waits = [(other, count - 1) for other, count in assignment.lists[worker][position].waits]
        for earlier in own + waits:
            found |= {earlier} | surely_before(assignment, earlier, known)
        known[spot] = frozenset(found)
    return known[spot]


@given(job_lists(), st.integers(2, 4))
def test_waits_cover_every_dependency(jobs: list[Job], num_workers: int) -> None:
    for assignment in candidates(jobs, num_workers):
        known: dict[Spot, frozenset[Spot]] = {}
        spots: dict[int, set[Spot]] = {}
        for worker, pieces in enumerate(assignment.lists):
            for position, piece in enumerate(pieces):
                spots.setdefault(piece.job, set()).add((worker, position))
        for worker, pieces in enumerate(assignment.lists):
            for position, piece in enumerate(pieces):
                for needed in jobs[piece.job].dependencies:
                    assert spots[needed] <= surely_before(assignment, (worker, position), known)


def test_a_chain_is_cut_and_branches_run_side_by_side() -> None:
    chain = [Job(1e-3, 64, () if i == 0 else (i - 1,)) for i in range(4)]
    best = candidates(chain, 2)[0]
    assert all(piece.num_parts == 2 for pieces in best.lists for piece in pieces)
    branches = [Job(1e-3, 64, ()), Job(1e-3, 64, (0,)), Job(1e-3, 64, ()), Job(1e-3, 64, (2,))]
    beside = assign(branches, 2, slack=1.0)
    assert [[piece.job for piece in pieces] for pieces in beside.lists] == [[0, 1], [2, 3]]
    assert beside.num_waits == 0


def test_indivisible_jobs_run_whole_and_one_stream_cuts_all_else() -> None:
    jobs = [Job(1e-3, 1, ()), Job(1e-3, 8, (0,))]
    [only] = candidates(jobs, 2, use_multi_stream=False)
    assert [len(pieces) for pieces in only.lists] == [2, 1]
    assert only.lists[1][0].waits == ((0, 1),)


def test_ancestors_are_transitive() -> None:
    assert ancestors([(), (0,), (1,), ()]) == [0, 0b1, 0b11, 0]
