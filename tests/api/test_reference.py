"""docs/api.md names every path that the server has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.server.app import ROUTES, Route

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.paths.split()[0])
def test_the_page_of_the_api_names_every_path(route: Route) -> None:
    first = route.paths.split()[0]
    assert first.replace("{model:.+}", "NAME") in PAGE


def test_the_page_names_no_path_that_is_not_there() -> None:
    said = set(re.findall(r"`(?:(?:GET|POST|PUT|DELETE) )?(/[^`]*)`", PAGE))
    there = {path.replace("{model:.+}", "NAME") for route in ROUTES for path in route.paths.split()}
    assert len(said) > 20
    assert said <= there | {"/v1"}
