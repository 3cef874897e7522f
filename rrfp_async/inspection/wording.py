"""How times, sizes and idle spans are said, the same in every report, picture and story."""

from rrfp_async.inspection.lines import IdleSpan, Wait

_NAMED_MOST = 3


def seconds(time_s: float) -> str:
    """A duration with a unit that suits it, in three or four digits."""
    size_s = abs(time_s)
    if size_s >= 0.999995:  # what rounds up to 1000 ms
        return f"{time_s:.3f} s"
    if size_s >= 0.9995e-3:
        return f"{time_s * 1e3:.2f} ms"
    return f"{round(time_s * 1e6) + 0:d} µs"


def moment(time_s: float) -> str:
    """A moment of the run, to the microsecond."""
    return f"{time_s:.6f} s"


def size(size_bytes: float) -> str:
    """A size with a unit that suits it."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def names(tasks: tuple[object, ...] | list[object]) -> str:
    """The first few, and how many more there are."""
    told = ", ".join(str(task) for task in tasks[:_NAMED_MOST])
    more = len(tasks) - _NAMED_MOST
    return f"{told} and {more} more" if more > 0 else told


def wait_words(wait: Wait) -> str:
    """What was missing, from whom."""
    if wait.wanted == "task":
        return f"{wait.task} had to follow {wait.source}"
    if wait.edge is None or wait.source is None:
        return f"{wait.task} lacked its {wait.wanted}"
    where = f" on rank {wait.rank}" if wait.rank is not None else ""
    return f"{wait.task} lacked its {wait.wanted} from {wait.source}{where} (edge {wait.edge})"


def idle_words(idle: IdleSpan) -> str:
    """Why the device had nothing to do, as one phrase."""
    first = wait_words(idle.waits[0]) if idle.waits else ""
    match idle.cause:
        case "limit":
            told = f"limit: {names(list(idle.ready))} ready, but {_in_flight(idle)}"
            return f"{told}; {first}" if first else told
        case "fixed order":
            held = f"{names(list(idle.ready))} ready, but the fixed order has another next"
            return f"fixed order: {held}; {first}" if first else f"fixed order: {held}"
        case "agreement":
            held = f"{names(list(idle.ready))} ready here, but not agreed on with its group"
            return f"agreement: {held}"
        case "others":
            return "its own tasks were done, others' were not"
    return f"{idle.cause}: {first}" if first else idle.cause


def _in_flight(idle: IdleSpan) -> str:
    return f"{idle.in_flight} forwards in flight of at most {idle.bound}"
