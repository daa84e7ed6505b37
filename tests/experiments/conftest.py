"""Fixtures of the matrices' tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cells_have_blank_reports(blank_reports):
    """Also for matrices that a module's tests share."""
