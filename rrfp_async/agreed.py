"""The settings that must be equal on every rank, as words that ranks compare before a step."""

import hashlib
from importlib.metadata import version

from rrfp_async.config import Config
from rrfp_async.topology import Topology

_WORDS_MOST = 1_000  # characters; longer lists are compared by their hash


def agreed_settings(config: Config, topology: Topology) -> tuple[tuple[str, str], ...]:
    """Name and value of each."""
    owners = map(topology.rank_of, range(topology.num_stages))
    return (
        ("version", version("rrfp-async")),
        ("stages", str(topology.num_stages)),
        ("pp x dp x tp", f"{topology.pp} x {topology.dp} x {topology.tp}"),
        ("placement", _shortened(" ".join(map(str, owners)))),
        ("edges", _shortened(" ".join(map(str, topology.graph)))),
        ("tied", _shortened("; ".join(map(str, topology.tied_parameters)))),
        *config.agreed(),
    )


def _shortened(words: str) -> str:
    """The words, or a digest where they are many."""
    return words if len(words) <= _WORDS_MOST else hashlib.sha256(words.encode()).hexdigest()
