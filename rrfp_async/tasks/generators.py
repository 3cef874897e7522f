"""Random streams: what a task draws depends on seed, step, stage and microbatch, never on order.

torch draws from default generators: one per process for the CPU, one per GPU. A task that may draw
runs in a *stream*: they are seeded from its coordinates, and get their state back when it is over.
Where the ranks of a process compute on threads of their own, the threads share the generators:

- **Alone** runs whatever draws: the forwards and backwards of a stage that was seen to draw, and
  the probes by which that is found out: a stage's first forward of every step, and its first
  backward. A probe is a stream too, and compares the generators with how it left them seeded.
- **Together, but beside nothing that is alone**, run the backwards of stages that never drew. A
  checkpoint in one sets the generators to what its forward saw and back again (torch's
  `fork_rng`): nobody can tell from outside, and whoever draws meanwhile would draw wrong numbers.
- **Free** run the other forwards of such stages. They only read the generators, as a checkpoint
  does, and what it has read is used for nothing if nothing is drawn.

All first forwards of a step come before its backwards, one stage after the other, so a pipeline
that never draws waits for its probes only in its first step, where backwards are probed.

Two backwards together may restore each other's states: A saves the outer one and sets its own, B
saves A's, A restores the outer one, B restores A's. What they compute does not depend on it; the
last one out puts it right. Hence streams have marked seeds.

Not covered: Python's and numpy's generators. And where threads share: a stage that never drew
before and does in a later microbatch of a step than its first; one that sets the generators in
its forward and restores them itself; whoever draws outside tasks while other ranks of the
process compute.

This file knows generators and threads. It does not know modules, ranks or who asks.
"""

import enum
import functools
import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch

_MARK = 0x5A << 56  # the highest byte of every stream's seed
_MARKED = 0xFF << 56
_WORD = 1 << 64
_FREE = nullcontext()
_CPU = torch.device("cpu")


class Phase(enum.IntEnum):
    """What part of a microbatch's work draws from a stream."""

    FORWARD = 0
    BACKWARD = 1
    EVALUATION = 2


def stream_seed(
    seed: int, step: int, stage: int, microbatch: int, phase: Phase, *, replica: int = 0
) -> int:
    """The 64-bit seed of a stream: a hash of its coordinates under a fixed highest byte.

    torch's CPU generator uses the lower 32 bits of a seed only, CUDA's all of them.

    Args:
        seed: As `torch.manual_seed` takes it; a negative one counts modulo 2**64, as there.
        step: From 0, among the steps of its kind: an evaluation does not count for training.
        stage: Its global index.
        microbatch: From 0.
        phase: Which of the microbatch's streams.
        replica: The dp rank: replicas see other samples, and draw other numbers.

    Raises:
        ValueError: If a number is no int of its range.
    """
    try:
        packed = struct.pack(">QQQQB", _checked_seed(seed), step, stage, microbatch, phase)
        if replica:
            packed += struct.pack(">Q", replica)
    except struct.error as error:
        raise ValueError(
            f"replica={replica!r}, step={step!r}, stage={stage!r}, microbatch={microbatch!r} name "
            f"no random stream: give ints of 0 to 2**64 - 1"
        ) from error
    digest = hashlib.blake2b(packed, digest_size=7, person=b"rrfp_async").digest()
    return _MARK | int.from_bytes(digest)


def _checked_seed(seed: int) -> int:
    if type(seed) is not int or not -_WORD // 2 <= seed < _WORD:
        raise ValueError(f"seed={seed!r} must be an int of -2**63 to 2**64 - 1, as torch takes it")
    return seed % _WORD


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that operations on `device` draw from by default, the CPU's first.

    Raises:
        ValueError: If `device` is neither a CPU nor a GPU of CUDA.
    """
    if device.type == "cpu":
        return (torch.default_generator,)
    if device.type != "cuda":
        raise ValueError(f"device {str(device)!r} has no known generator: use 'cpu' or 'cuda'")
    torch.cuda.init()  # type: ignore[no-untyped-call] # torch's
    index = device.index
    if index is None:  # "cuda" without a number
        index = torch.cuda.current_device()
    return (torch.default_generator, torch.cuda.default_generators[index])


@contextmanager
def rng_stream(
    seed: int,
    step: int,
    stage: int,
    microbatch: int,
    *,
    phase: Phase = Phase.FORWARD,
    device: torch.device | str = _CPU,
    replica: int = 0,
) -> Iterator[None]:
    """What is drawn inside is what a pipeline's stage draws: for a reference run.

    Run the forward of each stage in its stream, and the loss in the last stage's. A backward needs
    one only if it draws itself (`Phase.BACKWARD`); a checkpoint finds its numbers again anyway.
    The default generators have their state back afterwards, also after an exception. No lock: not
    for use beside another thread that draws.

    Args:
        seed: `Config.seed`, or what `torch.initial_seed()` told when the Runtime was built.
        step: From 0, among the steps of its kind; see `stream_seed`.
        stage: The stage's global index.
        microbatch: From 0.
        phase: Which of the microbatch's streams.
        device: Where the stage computes: the generators of the CPU and of that GPU are seeded.
        replica: The dp rank.

    Raises:
        ValueError: If a number is no int of its range, or the device is not known.
    """
    generators = default_generators(torch.device(device))
    with _seeded(generators, stream_seed(seed, step, stage, microbatch, phase, replica=replica)):
        yield


@contextmanager
def _seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seed `generators`, and on leaving restore their states, whatever was done to them."""
    before = _states(generators)
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Copies of their states, bytes on the CPU. Waits for no GPU: their offsets are the host's."""
    return [generator.get_state() for generator in generators]


class _Together:
    """A context for several threads at once, beside nobody who is alone.

    A class, not a generator: every backward of most stages passes it.
    """

    def __init__(self, turn: threading.Lock, occupied: threading.Lock) -> None:
        self._turn = turn
        self._occupied = occupied
        self._counting = threading.Lock()
        self._inside = 0
        self._known: tuple[torch.Generator, ...] = (torch.default_generator,)
        self._outer: list[tuple[torch.Generator, torch.Tensor]] = []

    def include(self, generators: Sequence[torch.Generator]) -> None:
        """Look after `generators` too."""
        new = (generator for generator in generators if generator not in self._known)
        self._known = (*self._known, *new)

    def __enter__(self) -> None:
        with self._turn, self._counting:
            if self._inside == 0:
                self._occupied.acquire()  # at once: who is alone holds the turn
                self._outer = [(generator, generator.get_state()) for generator in self._known]
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._counting:
            self._inside -= 1
            if self._inside == 0:
                try:
                    self._put_right()
                finally:
                    self._occupied.release()

    def _put_right(self) -> None:
        """Undo it if those inside have left a stream's state behind.

        What the user did meanwhile stays: drawing keeps the seed, and a seed of one's own is not
        marked.
        """
        for generator, state in self._outer:
            seed = generator.initial_seed()
            if seed & _MARKED == _MARK and seed != _seed_in(state, generator.device):
                generator.set_state(state)


def _seed_in(state: torch.Tensor, device: torch.device) -> int:
    return torch.Generator(device).set_state(state).initial_seed()


class Generators:
    """torch's default generators as the compute threads of one process share them.

    Its contexts are entered on compute threads only: they wait for other threads' tasks, and a
    thread that is inside must wait for no other.

    Args:
        shared: Whether several threads of the process compute.

    Attributes:
        shared: As given. If not, nothing is locked.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._turn = threading.Lock()  # whoever wants in holds it; whoever is alone keeps it
        self._occupied = threading.Lock()  # by the one that is alone, or by those together
        self._together = _Together(self._turn, self._occupied)

    def include(self, generators: Sequence[torch.Generator]) -> None:
        """Note generators that tasks draw from. On the event loop, between steps."""
        self._together.include(generators)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else is inside, and keep everybody out."""
        if not self.shared:
            yield
            return
        with self._turn, self._occupied:
            yield

    def together(self) -> AbstractContextManager[None]:
        """Wait until nobody is alone inside; others may be together with this one.

        Whoever waits to be alone comes before those who want in after it.
        """
        return self._together if self.shared else _FREE


@functools.cache
def shared_generators() -> Generators:
    """The one for all worlds of this process whose ranks compute on threads of it.

    torch's default generators belong to the process, so the lock over them does.
    """
    return Generators(shared=True)


class Streams:
    """The streams of one stage. Its tasks run one after another, on one thread at a time.

    Args:
        generators: Of its process.
        device: Where the stage computes.
        seed: Equal on all ranks for numbers that do not depend on where stages are.
        stage: The stage's global index.
        replica: The dp rank; ranks that compute a stage together draw the same.

    Raises:
        ValueError: If the seed or the device is not one; see `stream_seed`, `default_generators`.
    """

    def __init__(
        self,
        generators: Generators,
        device: torch.device,
        seed: int,
        stage: int,
        *,
        replica: int = 0,
    ) -> None:
        self._generators = generators
        self._seed = _checked_seed(seed)
        self._stage = stage
        self._replica = replica
        self._own = default_generators(device)
        self._drew: dict[Phase, bool] = {}  # whether it was ever seen to draw, once it is known
        self._begun: tuple[Phase, int] | None = None
        generators.include(self._own)

    def reseed(self, seed: int) -> None:
        """From now on draw what follows from `seed`.

        Raises:
            ValueError: If it is none.
        """
        self._seed = _checked_seed(seed)

    def draws(self, phase: Phase) -> bool | None:
        """Whether the stage was ever seen to draw there; None if nobody has looked."""
        return self._drew.get(phase)

    def forward(
        self, step: int, microbatch: int, *, training: bool = True
    ) -> AbstractContextManager[None]:
        """What F of `microbatch` runs in, module and loss. To be entered at once.

        Args:
            step: Among the steps of its kind; see `stream_seed`.
            microbatch: From 0.
            training: Whether the step computes gradients. Evaluations have streams of their own,
                and whether a stage draws there is another question.
        """
        phase = Phase.FORWARD if training else Phase.EVALUATION
        quiet = self._drew.get(phase) is False
        if quiet and self._begun == (phase, step) and self._generators.shared:
            return _FREE
        self._begun = (phase, step)
        return self._stream(step, microbatch, phase)

    def backward(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """What B or I of `microbatch` runs in; see `forward`. W needs none: it runs no module."""
        drew = self._drew.get
        quiet = drew(Phase.FORWARD) is False and drew(Phase.BACKWARD) is False
        if quiet and self._generators.shared:
            return self._generators.together()
        return self._stream(step, microbatch, Phase.BACKWARD)

    @contextmanager
    def _stream(self, step: int, microbatch: int, phase: Phase) -> Iterator[None]:
        """Alone, in the stream; and see whether anything is drawn, while that matters."""
        numbers = (self._seed, step, self._stage, microbatch)
        seed = stream_seed(*numbers, phase, replica=self._replica)
        with self._generators.alone(), _seeded(self._own, seed):
            if not self._generators.shared or self._drew.get(phase):
                yield
                return
            fresh = _states(self._own)
            yield
            self._drew[phase] = not all(map(torch.equal, _states(self._own), fresh))
