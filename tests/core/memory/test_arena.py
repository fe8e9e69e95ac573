import subprocess
import sys

import pytest
import torch
from mlsys_core.errors import DeviceError, InvalidInputError, MemoryPlanError
from mlsys_core.memory import Arena, Lifetime, plan_offsets

Ints = tuple[int, ...]

TWO_IN_TURN = plan_offsets([Lifetime(64, 0, 1), Lifetime(64, 1, 2)])  # they share their bytes
TWO_AT_ONCE = plan_offsets([Lifetime(64, 0, 2), Lifetime(64, 0, 2)])


def test_views_lie_at_the_planned_offsets_in_one_allocation() -> None:
    plan = plan_offsets([Lifetime(100, 0, 2), Lifetime(60, 1, 3), Lifetime(200, 2, 4)])
    with Arena(plan) as arena:
        base = arena.buffer.data_ptr()
        views = [arena.view(i, torch.uint8, (plan.nbytes[i],)) for i in range(3)]
        assert [view.data_ptr() - base for view in views] == list(plan.offsets)
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1
        assert arena.buffer.shape == (plan.peak_nbytes,) == (arena.nbytes,)


def test_tensors_alive_together_do_not_touch_each_other() -> None:
    with Arena(TWO_AT_ONCE) as arena:
        a, b = (arena.view(i, torch.float32, (4, 4)) for i in range(2))
        a.fill_(1.0)
        b.fill_(2.0)
        assert (a == 1.0).all()
        assert (b == 2.0).all()


def test_the_same_view_is_the_same_memory() -> None:
    with Arena(64) as arena:
        arena.view(0, torch.int32, (16,)).fill_(7)
        assert (arena.view(0, torch.int32, (4, 4)) == 7).all()


@pytest.mark.parametrize("alignment", [1, 64, 256, 4096])
def test_the_base_is_aligned(alignment: int) -> None:
    plan = plan_offsets([Lifetime(100, 0, 1), Lifetime(100, 0, 1)], alignment)
    with Arena(plan) as arena:
        assert arena.buffer.data_ptr() % max(alignment, 64) == 0
        assert all(arena.view(i, torch.uint8, (100,)).data_ptr() % alignment == 0 for i in range(2))


def test_strided_views() -> None:
    with Arena(64, poison=True) as arena:
        columns = arena.view(0, torch.float32, (3, 4), strides=(1, 4))
        columns.copy_(torch.arange(12.0).reshape(3, 4))
        assert columns.stride() == (1, 4)
        flat = arena.view(0, torch.float32, (16,))
        assert flat[:3].tolist() == [0.0, 4.0, 8.0]
        assert flat[3].isnan()  # the padding between columns was never written


def test_scalar_and_empty_views() -> None:
    with Arena(plan_offsets([Lifetime(0, 0, 1), Lifetime(8, 0, 1)])) as arena:
        assert arena.view(0, torch.float32, (0, 5)).shape == (0, 5)
        assert arena.view(1, torch.float64, ()).fill_(2.0).item() == 2.0


def test_a_region_of_odd_size_holds_whole_elements() -> None:
    with Arena(10) as arena:
        assert arena.view(0, torch.float32, (2,)).shape == (2,)
        with pytest.raises(MemoryPlanError, match=r"has 10 bytes and a view .* needs 12"):
            arena.view(0, torch.float32, (3,))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((17,), None), ((4, 4), (5, 1)), ((2,), (16,))],
    ids=["contiguous", "padded rows", "far apart"],
)
def test_a_view_larger_than_its_tensor_is_refused(shape: Ints, strides: Ints | None) -> None:
    with Arena(TWO_AT_ONCE) as arena, pytest.raises(MemoryPlanError, match="needs"):
        arena.view(0, torch.float32, shape, strides)


def test_an_offset_that_does_not_suit_the_dtype_is_refused() -> None:
    plan = plan_offsets([Lifetime(6, 0, 1), Lifetime(6, 0, 1)], alignment=2)
    assert sorted(plan.offsets) == [0, 6]
    misaligned = plan.offsets.index(6)
    with Arena(plan) as arena:
        with pytest.raises(MemoryPlanError, match="alignment of at least 4, not 2"):
            arena.view(misaligned, torch.float32, (1,))
        assert arena.view(misaligned, torch.float16, (2,)).data_ptr() % 2 == 0


@pytest.mark.parametrize(("shape", "strides"), [((-1,), None), ((2, 2), (1,)), ((2,), (-1,))])
def test_malformed_shapes_are_refused(shape: Ints, strides: Ints | None) -> None:
    with Arena(64) as arena, pytest.raises(InvalidInputError, match="shape"):
        arena.view(0, torch.uint8, shape, strides)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_the_plan_is_refused(index: int) -> None:
    with Arena(TWO_AT_ONCE) as arena:
        for use in (arena.release, lambda i: arena.view(i, torch.uint8, (1,))):
            with pytest.raises(MemoryPlanError, match=f"no tensor {index} in a plan of 2"):
                use(index)


def test_poison_shows_memory_that_was_never_written() -> None:
    with Arena(64, poison=True) as arena:
        assert arena.view(0, torch.float32, (16,)).isnan().all()
        assert arena.view(0, torch.bfloat16, (32,)).isnan().all()
        assert (arena.view(0, torch.int64, (8,)) == -1).all()


def test_poison_shows_a_read_of_a_released_tensor() -> None:
    with Arena(TWO_IN_TURN, poison=True) as arena:
        first = arena.view(0, torch.float32, (16,)).fill_(1.0)
        arena.release(0)
        assert first.isnan().all()
        arena.view(1, torch.float32, (16,)).fill_(2.0)
        arena.view(0, torch.float32, (16,)).fill_(3.0)  # it may live again


def test_release_poisons_only_its_own_tensor() -> None:
    with Arena(TWO_AT_ONCE, poison=True) as arena:
        other = arena.view(1, torch.float32, (16,)).fill_(2.0)
        arena.release(0)
        assert (other == 2.0).all()


def test_without_poison_release_costs_and_changes_nothing() -> None:
    with Arena(64) as arena:
        view = arena.view(0, torch.float32, (16,)).fill_(1.0)
        arena.release(0)
        assert (view == 1.0).all()


def test_a_forward_pass_through_a_plan_matches_and_a_wrong_lifetime_shows() -> None:
    """Three layers of a chain, each output in the arena, each input released once it is read."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 32, generator=generator) for _ in range(3)]
    x = torch.randn(4, 32, generator=generator)

    def run(lifetimes: list[Lifetime], skip_from: int | None) -> torch.Tensor:
        with Arena(plan_offsets(lifetimes), poison=True) as arena:
            hidden = [arena.view(i, torch.float32, (4, 32)) for i in range(3)]
            for step, weight in enumerate(weights):
                torch.matmul(x if step == 0 else hidden[step - 1], weight, out=hidden[step])
                for i, lifetime in enumerate(lifetimes):
                    if lifetime.end == step + 1 and i != 2:
                        arena.release(i)
            return hidden[2].clone() if skip_from is None else hidden[2] + hidden[skip_from]

    nbytes = 4 * 32 * 4
    chain = [Lifetime(nbytes, 0, 2), Lifetime(nbytes, 1, 3), Lifetime(nbytes, 2, 4)]
    torch.testing.assert_close(run(chain, None), x @ weights[0] @ weights[1] @ weights[2])
    kept = [Lifetime(nbytes, 0, 4), *chain[1:]]
    torch.testing.assert_close(run(kept, 0), x @ weights[0] @ weights[1] @ weights[2] + x @ weights[0])
    with pytest.raises(AssertionError):  # the residual reads tensor 0 after its planned end
        torch.testing.assert_close(run(chain, 0), x @ weights[0] @ weights[1] @ weights[2] + x @ weights[0])


def test_nothing_works_after_close_and_views_left_over_are_poisoned() -> None:
    arena = Arena(64, poison=True)
    view = arena.view(0, torch.float32, (16,)).fill_(1.0)
    arena.close()
    arena.close()
    assert view.isnan().all()
    for use in (lambda: arena.view(0, torch.uint8, (1,)), lambda: arena.release(0), lambda: arena.buffer):
        with pytest.raises(MemoryPlanError, match="closed"):
            use()


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(DeviceError, match=device):
        Arena(64, device)


def test_more_memory_than_there_is_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="cannot make an arena of"):
        Arena(2**60)


@pytest.mark.parametrize("nbytes", [-1, 1.5])
def test_a_size_that_is_none_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidInputError, match="nbytes"):
        Arena(nbytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    with Arena(TWO_AT_ONCE, "cuda", poison=True) as arena:
        a, b = (arena.view(i, torch.float32, (16,)) for i in range(2))
        a.fill_(1.0)
        assert b.isnan().all()
        assert a.sum().item() == 16.0


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, mlsys_core.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
