"""How far hypothesis searches: `sample` by default, `all` for RRFP_HYPOTHESIS_PROFILE=all."""

import os

import pytest
from hypothesis import HealthCheck, settings

ALL_TIMEOUT_S = 1800

settings.register_profile(
    "sample",
    max_examples=250,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", settings.get_profile("sample"), max_examples=2500)
PROFILE = os.environ.get("RRFP_HYPOTHESIS_PROFILE", "sample")
settings.load_profile(PROFILE)


def pytest_report_header() -> str:
    """Say which profile is searched with."""
    return f"hypothesis search: {PROFILE} ({settings().max_examples} cases a property)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the long search the time it needs; pytest-timeout's default would end it."""
    if PROFILE != "all":
        return
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.timeout(ALL_TIMEOUT_S))
