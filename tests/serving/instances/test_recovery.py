"""The ledger of an instance: nothing is lost or told twice, and who is alone in a crash has caused it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_serving.instances.recovery import Ledger, divided


def test_a_kill_makes_nobody_a_suspect_and_keeps_the_order():
    ledger = Ledger()
    for number in (1, 2, 3):
        ledger.add(number)
    assert ledger.next() == [1, 2, 3]
    ledger.remove(2)
    ledger.add(4)
    assert ledger.died(is_crash=False) == []
    assert ledger.next() == [1, 3, 4]


def test_suspects_run_alone_before_others_and_a_kill_meanwhile_clears_nobody():
    ledger = Ledger()
    for number in (1, 2):
        ledger.add(number)
    ledger.next()
    ledger.add(3)
    ledger.died(is_crash=True)
    assert (ledger.has_suspects, ledger.next(), ledger.next()) == (True, [1], [])
    assert ledger.died(is_crash=False) == []
    assert ledger.next() == [1]
    ledger.remove(1)
    assert ledger.next() == [2]
    assert ledger.died(is_crash=True) == [2]
    assert (ledger.has_suspects, ledger.next(), len(ledger)) == (False, [3], 1)


@settings(max_examples=200, deadline=None)
@given(
    poisons=st.sets(st.integers(0, 15)),
    events=st.lists(st.sampled_from(["add", "next", "finish", "kill", "cancel"]), max_size=80),
)
def test_every_request_ends_once_and_only_poisons_fail(poisons, events):
    ledger, added, ended, failed = Ledger(), 0, [], []

    def crash_if_poisoned() -> None:
        while any(number in poisons for number in ledger.running):
            failed.extend(ledger.died(is_crash=True))
            ledger.next()

    def step(event: str) -> None:
        nonlocal added
        if event == "add" and added < 16:
            ledger.add(added)
            added += 1
        elif event == "next":
            ledger.next()
            crash_if_poisoned()
        elif event == "finish" and ledger.running:
            ended.append(next(iter(ledger.running)))
            ledger.remove(ended[-1])
        elif event == "kill":
            assert ledger.died(is_crash=False) == []
        elif event == "cancel" and ledger.waiting:
            ended.append(ledger.waiting[0])
            ledger.remove(ended[-1])

    for event in [*events, *["next", "finish"] * 40]:
        step(event)
    assert len(ledger) == 0
    assert sorted([*ended, *failed]) == list(range(added))
    assert set(failed) <= poisons


@given(num_cores=st.integers(1, 40), num_instances=st.integers(1, 40))
def test_cores_are_divided_evenly(num_cores, num_instances):
    parts = divided(list(range(num_cores)), num_instances)
    sizes = [len(part) for part in parts]
    assert len(parts) == num_instances
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if num_instances <= num_cores:
        assert sorted(core for part in parts for core in part) == list(range(num_cores))
