"""Stages on threads of one process, which share torch's generators, draw as if they were alone."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rrfp_async.tasks.generators import (
    Generators,
    Phase,
    Streams,
    rng_stream,
    shared_generators,
    stream_seed,
)

CPU = torch.device("cpu")
SEED = 11
STEPS, MICROBATCHES, WIDTH = 2, 3, 64
MANY = range(25)  # repetitions


class DrawsInBackward(torch.autograd.Function):
    """Adds noise to a gradient, as stochastic rounding does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand(gradient.shape) + torch.rand(gradient.shape)


def drops(x: torch.Tensor) -> torch.Tensor:
    """Draw time and again: a stranger's draw or state in between shows."""
    for _ in range(6):
        x = functional.dropout(x.tanh() + x, 0.5)
    return x


def keeps(x: torch.Tensor) -> torch.Tensor:
    """As much work, without drawing."""
    for _ in range(6):
        x = x.tanh() + x
    return x


def noisy_backward(x: torch.Tensor) -> torch.Tensor:
    """Draws in its backward only."""
    return keeps(DrawsInBackward.apply(x))  # type: ignore[no-untyped-call] # torch's


def recomputed(function: Callable[[torch.Tensor], torch.Tensor], times: int = 3) -> Any:
    """The function under checkpoints, one after the other."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = checkpoint(function, x, use_reentrant=False)
        return x

    return forward


BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "drops": drops,
    "drops, recomputed": recomputed(drops),
    "keeps": keeps,
    "keeps, recomputed": recomputed(keeps),
    "draws in backward": noisy_backward,
}
Numbers = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


def orders(shuffler: random.Random) -> list[tuple[int, str, int]]:
    """Step by step, each microbatch's F and B, B after F, otherwise in any order."""
    tasks = []
    for step in range(STEPS):
        places = [microbatch for microbatch in range(MICROBATCHES) for _ in "FB"]
        shuffler.shuffle(places)
        begun = set[int]()
        for microbatch in places:
            tasks.append((step, "B" if microbatch in begun else "F", microbatch))
            begun.add(microbatch)
    return tasks


def compute(streams: Streams, body: Any, stage: int, tasks: list[tuple[int, str, int]]) -> Numbers:
    """Run a stage's tasks; the output and the input's gradient of each microbatch and step."""
    saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    numbers: Numbers = {}
    for step, kind, microbatch in tasks:
        if kind == "F":
            x = torch.linspace(-1, 1 + stage + microbatch, WIDTH).requires_grad_()
            with streams.forward(step, microbatch):
                saved[microbatch] = x, body(x)
            continue
        x, y = saved.pop(microbatch)
        with streams.backward(step, microbatch):
            y.sum().backward()
        assert x.grad is not None
        numbers[step, microbatch] = y.detach(), x.grad
    return numbers


def in_order(bodies: list[str]) -> list[Numbers]:
    """What the stages compute one after another, in a process of their own."""
    tasks = [
        (step, kind, microbatch)
        for step, microbatch, kind in product(range(STEPS), range(MICROBATCHES), "FB")
    ]
    return [
        compute(Streams(Generators(shared=False), CPU, SEED, stage), BODIES[body], stage, tasks)
        for stage, body in enumerate(bodies)
    ]


def assert_equal(seen: list[Numbers], wanted: list[Numbers], about: object) -> None:
    for stage, (some, other) in enumerate(zip(seen, wanted, strict=True)):
        assert some.keys() == other.keys()
        for place, tensors in some.items():
            for name, tensor, same in zip(("output", "grad"), tensors, other[place], strict=True):
                assert torch.equal(tensor, same), (about, stage, place, name)


@pytest.fixture
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hammer(bodies: list[str], shuffler: random.Random) -> list[Numbers]:
    """All stages at once, each on a thread of its own and in an order of its own."""
    generators = Generators(shared=True)
    begin = threading.Barrier(len(bodies))

    def work(stage: int, tasks: list[tuple[int, str, int]]) -> Numbers:
        streams = Streams(generators, CPU, SEED, stage)
        torch.set_num_threads(1)
        begin.wait(30)
        return compute(streams, BODIES[bodies[stage]], stage, tasks)

    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(work, stage, orders(shuffler)) for stage in range(len(bodies))]
        return [future.result(60) for future in futures]


@pytest.mark.parametrize("repetition", MANY)
@pytest.mark.usefixtures("_many_switches")
def test_threads_draw_what_stages_draw_one_after_another(repetition: int) -> None:
    """2 to 4 stages of any kind, one of which draws at least; the user's state stays."""
    shuffler = random.Random(repetition)
    bodies = shuffler.choices(list(BODIES), k=shuffler.randint(1, 3))
    bodies.append(("drops", "drops, recomputed")[repetition % 2])
    outer = torch.get_rng_state()
    seen = hammer(bodies, shuffler)
    assert torch.equal(torch.get_rng_state(), outer), bodies
    assert_equal(seen, in_order(bodies), bodies)


@pytest.mark.parametrize("other", ["drops", "drops, recomputed", "keeps, recomputed"])
@pytest.mark.usefixtures("_many_switches")
def test_a_drawing_stage_beside_each_kind_that_could_disturb_it(other: str) -> None:
    """Draws, and states that a checkpoint sets, never reach the other thread's stream."""
    bodies = ["drops", other, other]
    wanted = in_order(bodies)
    for repetition in MANY:
        seen = hammer(bodies, random.Random(repetition))
        assert_equal(seen, wanted, (repetition, bodies))


def meet(
    first: AbstractContextManager[None], second: AbstractContextManager[None], timeout_s: float
) -> bool:
    """Whether a second thread gets inside while a first one is there and waits for it."""
    begun, barrier = threading.Event(), threading.Barrier(2)

    def enter(context: AbstractContextManager[None]) -> bool:
        with context:
            begun.set()
            try:
                barrier.wait(timeout_s)
            except threading.BrokenBarrierError:
                return False
            return True

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(enter, first)
        begun.wait()
        other = pool.submit(enter, second)
        return one.result() and other.result()


def known(generators: Generators, stage: int, *, draws: bool) -> Streams:
    """The streams of a stage whose step 0 has seen its probes."""
    streams = Streams(generators, CPU, SEED, stage)
    for context in (streams.forward(0, 0), streams.backward(0, 0)):
        with context:
            torch.rand(1 if draws else 0)
    return streams


def task(name: str, generators: Generators, stage: int) -> AbstractContextManager[None]:
    """What a task of that name runs in."""
    whose, kind = name.split(" ")
    streams = (
        Streams(generators, CPU, SEED, stage)
        if whose == "unknown"
        else known(generators, stage, draws=whose == "drawing")
    )
    step = 1 if whose == "probed" else 0
    return streams.forward(step, 1) if kind == "F" else streams.backward(step, 1)


NAMES = ["drawing F", "drawing B", "unknown F", "unknown B", "probed F", "quiet B", "quiet F"]


def may_meet(first: str, second: str) -> bool:
    """The rule: a quiet forward disturbs nobody, quiet backwards do not disturb each other."""
    return "quiet F" in (first, second) or first == second == "quiet B"


@pytest.mark.parametrize(("first", "second"), [*product(NAMES, NAMES)])
def test_which_tasks_of_two_stages_may_overlap(first: str, second: str) -> None:
    """Whatever draws or may draw is alone; a pipeline that never draws is not held up."""
    generators = Generators(shared=True)
    wanted = may_meet(first, second)
    one, other = task(first, generators, 0), task(second, generators, 1)
    assert meet(one, other, 10 if wanted else 0.03) == wanted


# -- who is let in ------------------------------------------------------------------------------


def passes(context: AbstractContextManager[None]) -> None:
    with context:
        pass


def test_processes_with_one_compute_thread_lock_nothing() -> None:
    """Unshared, two that would be alone do not know of each other."""
    generators = Generators(shared=False)
    assert meet(generators.alone(), generators.alone(), 10)
    assert meet(generators.alone(), generators.together(), 10)


def test_an_exception_inside_lets_the_next_one_in() -> None:
    """From alone and from together, and from a probe: who comes next is not kept waiting."""
    generators = Generators(shared=True)
    quiet, drawing = known(generators, 0, draws=False), known(generators, 1, draws=True)
    with ThreadPoolExecutor(1) as pool:
        for context in (drawing.forward(0, 1), quiet.backward(0, 1), quiet.forward(1, 0)):
            with pytest.raises(ZeroDivisionError), context:
                raise ZeroDivisionError
            pool.submit(passes, drawing.forward(0, 2)).result(10)
            pool.submit(passes, quiet.backward(0, 2)).result(10)


def test_all_worlds_of_a_process_share_one_lock() -> None:
    """The generators are the process's, however many local worlds it has."""
    assert shared_generators() is shared_generators()
    assert shared_generators().shared


# -- who draws ----------------------------------------------------------------------------------


def test_a_stage_is_quiet_until_the_first_forward_of_a_step_draws() -> None:
    """A dropout that is switched on between two steps has its streams from the first task on."""
    streams = known(Generators(shared=True), 0, draws=False)
    outer = torch.get_rng_state()
    with streams.forward(0, 1):
        assert torch.equal(torch.get_rng_state(), outer)  # free: not seeded
    for step, microbatch in product((1, 2), (2, 0, 1)):
        for phase, kind in ((Phase.FORWARD, streams.forward), (Phase.BACKWARD, streams.backward)):
            with kind(step, microbatch):
                seen = torch.rand(4)
            with rng_stream(SEED, step, 0, microbatch, phase=phase):
                assert torch.equal(seen, torch.rand(4)), (step, microbatch, phase)


def test_a_stage_that_is_quiet_in_evaluation_may_draw_in_training() -> None:
    """What an evaluation has shown counts for evaluations."""
    streams = Streams(Generators(shared=True), CPU, SEED, 0)
    passes(streams.forward(0, 0, training=False))
    with streams.forward(0, 0):
        torch.rand(1)
    assert streams.draws(Phase.EVALUATION) is False
    assert streams.draws(Phase.FORWARD) is True
    assert streams.draws(Phase.BACKWARD) is None


def test_a_probe_that_fails_has_shown_nothing() -> None:
    """The next task of the stage is a probe again."""
    streams = Streams(Generators(shared=True), CPU, SEED, 0)
    with pytest.raises(ZeroDivisionError), streams.forward(0, 0):
        raise ZeroDivisionError
    assert streams.draws(Phase.FORWARD) is None
    with streams.forward(0, 1):
        torch.rand(1)
    assert streams.draws(Phase.FORWARD) is True


# -- the user's state ---------------------------------------------------------------------------


def cross(generators: Generators, theirs: torch.Tensor, meanwhile: Callable[[], object]) -> None:
    """Two checkpoints recompute at once, and the second takes the first one's state for the outer.

    `theirs` is what they saw in their forwards.
    """
    with ExitStack() as second:
        with generators.together():
            outer = torch.get_rng_state()
            torch.set_rng_state(theirs)
            second.enter_context(generators.together())
            between = torch.get_rng_state()
            torch.set_rng_state(theirs)
            torch.set_rng_state(outer)
        torch.set_rng_state(between)
        meanwhile()


def test_backwards_that_cross_leave_the_users_state() -> None:
    """Not that of a stream that a forward has seen."""
    with rng_stream(SEED, 0, 0, 0):
        stream = torch.get_rng_state()
    outer = torch.get_rng_state()
    cross(Generators(shared=True), stream, lambda: None)
    assert torch.equal(torch.get_rng_state(), outer)


@pytest.mark.parametrize("seed", [3, stream_seed(SEED, 0, 0, 0, Phase.FORWARD) + 1])
def test_what_the_user_draws_or_seeds_meanwhile_is_not_undone(seed: int) -> None:
    """Only streams' states are taken away, also from who has a seed that looks like theirs."""
    generators = Generators(shared=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outer = torch.get_rng_state()
        cross(generators, outer, lambda: torch.rand(3))
        assert torch.equal(torch.get_rng_state(), _after(outer))
        cross(generators, outer, lambda: torch.manual_seed(23))
        assert torch.initial_seed() == 23


def _after(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.rand(3, generator=generator)
    return generator.get_state()
