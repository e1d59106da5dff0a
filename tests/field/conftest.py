"""Field tests: each reproduces a fault reported in public, and names the guard against it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guards import GUARDS

OPTION = "--without-guards"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        action="store_true",
        help="take away the guard of each field test, which must fail then",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "field_report(*ids, guard): the public reports a test is about, and its guard"
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    marker = pyfuncitem.get_closest_marker("field_report")
    if marker is None or not pyfuncitem.config.getoption(OPTION, default=False):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        GUARDS[marker.kwargs["guard"]](patch)
        try:
            yield
        except (Exception, pytest.fail.Exception):
            return True  # as it must be
    pytest.fail(f"passes without its guard: {marker.kwargs['guard']}")
