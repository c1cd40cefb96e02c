"""The OpenAPI page of every combination of endpoints that a node serves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from prorl_trio.config import BackendConfig
from prorl_trio.edges.prorl_compat import compat_endpoints
from prorl_trio.edges.rest.app import ENDPOINTS, describe


def operations(*, prorl_compat: bool) -> dict[str, list[str]]:
    """Operation ids by path."""
    compatible = compat_endpoints(BackendConfig(), free=False) if prorl_compat else []
    page: dict[str, Any] = msgspec.json.decode(describe([*ENDPOINTS, *compatible]))
    return {path: [each["operationId"] for each in methods.values()] for path, methods in page["paths"].items()}


@pytest.mark.parametrize("prorl_compat", [False, True])
def test_operation_ids_are_unique(*, prorl_compat: bool):
    ids = [each for path in operations(prorl_compat=prorl_compat).values() for each in path]
    assert len(ids) > 10
    assert [each for each, count in Counter(ids).items() if count > 1] == []


def test_those_of_the_node_itself_do_not_depend_on_what_is_served_beside_them():
    alone, both = operations(prorl_compat=False), operations(prorl_compat=True)
    assert {path: both[path] for path in alone} == alone
    assert both["/status"] == ["prorl_status"]
