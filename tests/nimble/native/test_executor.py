"""The native executor: what it decided is right whatever it is made of, and survives use."""

from __future__ import annotations

import json
import threading
from math import prod

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.ir.operators import Aten, Concat, Convolution, Copy, Input, Kind, Linear, Permute, Reshape, Slice
from mlsys_nimble.ir.program import Operator, Program, ValueType, check_program
from mlsys_nimble.state.digest import pieces_of
from torch import Tensor

ONE = ((1, 1), ((0, 0), (0, 0)), (1, 1), 1)  # a 1x1 convolution
THREE = ((1, 1), ((1, 1), (1, 1)), (1, 1), 1)  # a 3x3 convolution of the same size


class Sketch:
    """A program in the making."""

    def __init__(self) -> None:
        self.values: list[ValueType] = []
        self.operators: list[Operator] = []
        self.constants: dict[int, Tensor] = {}
        self.inputs: list[int] = []

    def value(self, *shape: int, dtype: str = "float32") -> int:
        self.values.append(ValueType(shape, dtype))
        return len(self.values) - 1

    def input(self, *shape: int, dtype: str = "float32") -> int:
        self.inputs.append(self.value(*shape, dtype=dtype))
        return self.inputs[-1]

    def constant(self, *shape: int) -> int:
        value = self.value(*shape)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(value))
        self.constants[value] = drawn / prod(shape[1:]) ** 0.5  # results stay as large as inputs
        return value

    def add(self, kind: Kind, *inputs: int, shape: tuple[int, ...], dtype: str = "float32") -> int:
        result = self.value(*shape, dtype=dtype)
        self.operators.append(Operator(f"step{result}", kind, inputs, (result,)))
        return result

    def convolution(self, x: int, channels: int, *, size: int = 3) -> int:
        batch, before, *space = self.values[x].shape
        weight, bias = self.constant(channels, before, size, size), self.constant(channels)
        stride, padding, dilation, groups = THREE if size == 3 else ONE
        kind = Convolution(stride, padding, dilation, groups, has_bias=True)
        return self.add(kind, x, weight, bias, shape=(batch, channels, *space))

    def program(self, *outputs: int, mutations: tuple[tuple[int, int], ...] = ()) -> Program:
        made = Program(
            tuple(self.values), tuple(self.operators), tuple(self.inputs), outputs, self.constants, mutations
        )
        check_program(made)
        return made


def inputs_of(program: Program, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    types = [program.values[value] for value in program.inputs]
    return [torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype)) for t in types]


def assert_equal_runs(program: Program, *, times: int = 5, num_threads: int = 2, use_multi_stream: bool = True) -> None:
    executor = NativeExecutor(program, num_threads=num_threads, use_multi_stream=use_multi_stream)
    reference = ReferenceExecutor(program)
    earlier: list[tuple[list[Tensor], list[Tensor]]] = []
    for seed in range(times):
        executor.poison()  # whoever reads what this call has not written gets NaN
        inputs = inputs_of(program, seed)
        earlier.append((executor.run(inputs), reference.run(inputs)))
    for ours, theirs in earlier:  # after all runs: a later call leaves results alone
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def branches(depth: int = 2) -> Program:
    net = Sketch()
    x = net.convolution(net.input(1, 3, 9, 7), 16)
    parts = []
    for width in (8, 5, 16):
        part = x
        for _ in range(depth):
            part = net.convolution(part, width)
        parts.append(part)
    joined = net.add(Concat(1), *parts, shape=(1, 29, 9, 7))
    half = net.add(Slice(1, 8), joined, shape=(1, 21, 9, 7))
    return net.program(net.convolution(half, 4, size=1), joined)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("use_multi_stream", [True, False])
def test_branches_and_a_concatenation_in_place(num_threads: int, use_multi_stream: bool) -> None:
    assert_equal_runs(branches(), num_threads=num_threads, use_multi_stream=use_multi_stream)


def test_a_concatenation_needs_no_task() -> None:
    executor = NativeExecutor(branches(), num_threads=1)
    names = [task.operator for task in executor.trace(inputs_of(branches(), 0))]
    concat = next(op.name for op in executor._program.operators if isinstance(op.kind, Concat))
    assert concat not in names


def test_one_value_twice_in_a_concatenation_and_two_concatenations_of_one() -> None:
    net = Sketch()
    x = net.convolution(net.input(2, 3, 4, 4), 6)
    y = net.convolution(x, 5)
    twice = net.add(Concat(1), x, y, x, shape=(2, 17, 4, 4))
    again = net.add(Concat(1), y, twice, shape=(2, 22, 4, 4))
    assert_equal_runs(net.program(net.convolution(again, 3), net.convolution(twice, 2)))


def test_views_share_memory_and_copies_stand_where_strides_cannot() -> None:
    net = Sketch()
    x = net.convolution(net.input(2, 3, 4, 6), 8)
    flat = net.add(Reshape(), x, shape=(2, 8, 24))  # of channels last
    turned = net.add(Permute((0, 2, 1)), flat, shape=(2, 24, 8))
    weight, bias = net.constant(5, 8), net.constant(5)
    rows = net.add(Linear(has_bias=True), turned, weight, bias, shape=(2, 24, 5))
    image = net.add(Reshape(), net.add(Permute((0, 2, 1)), rows, shape=(2, 5, 24)), shape=(2, 5, 4, 6))
    assert_equal_runs(net.program(net.convolution(image, 3), rows, flat))


def test_torch_runs_what_has_no_kernel_in_the_middle() -> None:
    net = Sketch()
    x = net.convolution(net.input(1, 3, 5, 5), 4)
    sorted_ = net.add(Aten("aten.flip.default", (Input(0), (1,))), x, shape=(1, 4, 5, 5))
    numbers = net.input(3, dtype="int64")
    doubled = net.add(Aten("aten.add.Tensor", (Input(0), Input(0))), numbers, shape=(3,), dtype="int64")
    assert_equal_runs(net.program(net.convolution(sorted_, 4), doubled, x))


def test_inputs_and_constants_may_be_outputs() -> None:
    net = Sketch()
    x, y = net.input(2, 2), net.input(1, 3, 4, 4)
    constant = net.constant(3)
    program = net.program(x, constant, net.convolution(y, 2), x)
    executor = NativeExecutor(program, num_threads=2)
    inputs = inputs_of(program, 0)
    first, second, _, last = executor.run(inputs)
    assert first is inputs[0]
    assert last is inputs[0]
    assert second is program.constants[constant]


def test_buffers_are_written_back_and_read_anew() -> None:
    net = Sketch()
    x = net.input(2, 3)
    state = net.constant(2, 3)
    added = net.add(Aten("aten.add.Tensor", (Input(0), Input(1))), x, state, shape=(2, 3))
    program = net.program(added, mutations=((state, added),))
    executor = NativeExecutor(program, num_threads=1)
    expected = program.constants[state].clone()
    for seed in range(3):
        inputs = inputs_of(program, seed)
        expected = expected + inputs[0]
        torch.testing.assert_close(executor.run(inputs)[0], expected)
    torch.testing.assert_close(program.constants[state], expected)


def test_strided_inputs_and_copies() -> None:
    net = Sketch()
    x = net.input(2, 3, 4, 5)
    program = net.program(net.add(Copy(), x, shape=(2, 3, 4, 5)), net.convolution(x, 4))
    executor, reference = NativeExecutor(program, num_threads=2), ReferenceExecutor(program)
    inputs = [torch.randn(2, 4, 5, 3).permute(0, 3, 1, 2)]
    for ours, theirs in zip(executor.run(inputs), reference.run(inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Parts(torch.nn.Module):
    def forward(self, x: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        """Read parts of inputs by kernels and by torch, and few and many channels of planes."""
        few, many = images[:, 1:4], images[:, 2:]
        weights = [torch.ones(5, part.shape[1], 3, 3) for part in (few, many)]
        folded = [torch.conv2d(part, weight) for part, weight in zip((few, many), weights, strict=True)]
        return torch.msort(x[2:]), x[3:] * 2, x[1, 2:], *folded


def test_inputs_are_read_where_they_lie() -> None:
    x, images = torch.randn(6, 5), torch.randn(2, 20, 9, 8)
    model = Nimble(Parts()).prepare((x, images))
    for _ in range(2):
        for found, wanted in zip(model(x, images), Parts()(x, images), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        x, images = torch.randn(6, 5), torch.randn(2, 9, 8, 20).permute(0, 3, 1, 2)


def test_many_replays_with_workers_that_sleep_and_wake() -> None:
    program = branches(depth=3)
    executor = NativeExecutor(program, num_threads=4)  # more than there are cores
    inputs = inputs_of(program, 1)
    expected = executor.run(inputs)
    for _ in range(300):
        for a, b in zip(executor.run(inputs), expected, strict=True):
            assert torch.equal(a, b)


def test_two_executors_in_two_threads() -> None:
    programs = [branches(), branches(depth=1)]
    executors = [NativeExecutor(program, num_threads=2) for program in programs]
    wanted = [ReferenceExecutor(program).run(inputs_of(program, 0)) for program in programs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(50):
            for a, b in zip(executors[which].run(inputs_of(programs[which], 0)), wanted[which], strict=True):
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                    wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_index_out_of_range_is_an_error_and_the_next_call_is_none():
    table = torch.nn.Embedding(7, 4)
    nimble = Nimble(table).prepare(torch.tensor([1, 2]), executor="native", num_threads=2)
    with pytest.raises(IndexError, match="embedding: an index is out of range"):
        nimble(torch.tensor([6, 7]))
    with pytest.raises(IndexError):
        nimble(torch.tensor([-1, 0]))
    assert torch.equal(nimble(torch.tensor([6, 0])), table.weight[[6, 0]])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("sizes", [(1,), (7, 300_001), (65_536, 65_537, 3)])
def test_bytes_are_compared_by_all_workers(sizes: tuple[int, ...], num_threads: int) -> None:
    executor = NativeExecutor(branches(1), num_threads=num_threads)
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for number, tensor in enumerate(tensors):
        for place in {0, len(tensor) // 2, len(tensor) - 1}:
            found = executor.compare(pieces_of(tensors))
            assert found.nbytes == sum(sizes)
            assert all(found.is_same(has_team=has_team) for has_team in (True, False) for _ in range(3))
            tensor[place] = 1
            assert not found.is_same(has_team=place > 0), (number, place)
            tensor[place] = 0
            assert not found.is_same(has_team=True)  # what was made of other bytes stays so


def test_threads_that_call_at_once_notice_a_change_of_weights() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(512, 512), torch.randn(4, 512)
    with torch.no_grad():
        prepared = Nimble(model).prepare(x, num_threads=2, executor="native")
        for _ in range(5):
            model.weight.data[300, 7] += 1
            expected, found = model(x), []
            threads = [threading.Thread(target=call_once, args=(prepared, x, found)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 4
            for result in found:
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def call_once(model: Nimble, x: Tensor, results: list[Tensor]) -> None:
    with torch.no_grad():
        results.append(model(x))


def test_the_record_is_json_and_names_every_operator() -> None:
    image, weight = ValueType((1, 4, 6, 6), "float32"), ValueType((4, 4, 1, 1), "float32")
    kind = Convolution((1, 1), ((0, 0), (0, 0)), (1, 1), 1, has_bias=False)
    program = Program(
        (image, weight, image, ValueType((1, 2, 6, 6), "float32")),
        (Operator("conv", kind, (0, 1), (2,)), Operator("half", Slice(1, 2), (2,), (3,))),
        inputs=(0,),
        outputs=(3,),
        constants={1: torch.ones(4, 4, 1, 1)},
    )
    schedule = NativeExecutor(program, num_threads=2).schedule
    record = json.loads(json.dumps(schedule.record()))
    by_name = {operator["name"]: operator for operator in record["operators"]}
    assert by_name["half"]["in_place"]
    assert by_name["conv"]["seconds"] > 0
    [result], [half] = by_name["conv"]["outputs"], by_name["half"]["outputs"]
    assert record["values"][half]["offset"] == record["values"][result]["offset"] + 2 * 4
    assert record["values"][result]["strides"][1] == 4  # channels last
    run = {piece["operator"] for worker in record["stretches"][0]["workers"] for piece in worker}
    assert run == set(by_name) - {"half"}
