import pytest
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.memory import SlotBudget


def test_reservations_add_up_to_the_budget_and_no_further() -> None:
    budget = SlotBudget(10)
    assert budget.try_reserve("a", 6)
    assert not budget.try_reserve("b", 5)
    assert (budget.reserved, budget.available) == (6, 4)
    assert "b" not in budget
    assert budget.try_reserve("c", 4)
    assert (budget.reserved, budget.available) == (10, 0)


def test_release_gives_all_slots_back() -> None:
    budget = SlotBudget(10)
    budget.try_reserve("a", 6)
    assert budget.release("a") == 6
    assert "a" not in budget
    assert budget.try_reserve("a", 10)


def test_reserving_twice_is_refused_and_changes_nothing() -> None:
    budget = SlotBudget(10)
    budget.try_reserve("a", 2)
    with pytest.raises(MemoryPlanError, match="'a' has 2 slots reserved already"):
        budget.try_reserve("a", 3)
    assert budget.reserved == 2


def test_releasing_an_unknown_owner_is_refused() -> None:
    budget = SlotBudget(10)
    budget.try_reserve("a", 2)
    budget.release("a")
    with pytest.raises(MemoryPlanError, match="'a' has no slots to release"):
        budget.release("a")
    assert budget.reserved == 0


def test_more_than_there_will_ever_be_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(MemoryPlanError, match="wants 11 slots, of 10 in all"):
        SlotBudget(10).try_reserve("a", 11)


@pytest.mark.parametrize("n", [0, -1])
def test_nonsense_numbers_are_refused(n: int) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        SlotBudget(n)
    with pytest.raises(InvalidInputError, match="at least 1"):
        SlotBudget(10).try_reserve("a", n)
