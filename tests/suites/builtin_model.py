"""Which standard tests a built-in model cannot pass, whatever the server does. A pytest plugin.

The built-in models find facts in a text and know nothing else: they write what a grammar allows, but not
what was asked for, and not always to its end. With another model (`tools/suites.py --model`) these
tests count.
"""

from __future__ import annotations

import pytest
from target import MODEL

UNDERSTANDS = "needs a model that understands the question"
ABILITIES = {
    "test_tool_calling": UNDERSTANDS,
    "test_tool_calling_async": UNDERSTANDS,
    "test_bind_runnables_as_tools": UNDERSTANDS,
    "test_agent_loop": UNDERSTANDS,
    "test_unicode_tool_call_integration": UNDERSTANDS,
    "test_structured_output": UNDERSTANDS,
    "test_structured_output_async": UNDERSTANDS,
    "test_structured_output_pydantic_2_v1": UNDERSTANDS,
    "test_structured_output_optional_param": UNDERSTANDS,
    "test_json_mode": UNDERSTANDS,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = ABILITIES.get(item.name.partition("[")[0])
        if reason and "langchain" in item.nodeid and MODEL.startswith("firn-demo"):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
