from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_keys", frozenset({""})),
        ("api_keys", frozenset({"two words"})),
        ("api_keys", frozenset({"line\n"})),
        ("open_paths", ("",)),
        ("max_body_nbytes", -1),
        ("max_body_nbytes", 1.5),
        ("max_bodies_nbytes", 0),
        ("max_bodies_nbytes", 1.5),
        ("request_timeout_s", 0),
        ("request_timeout_s", float("nan")),
        ("max_request_timeout_s", float("inf")),
        ("drain_timeout_s", -1),
        ("log_format", "xml"),
        ("validation_status", 500),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=field if field != "api_keys" else "API key"):
        HttpConfig(**{field: value})


def test_the_repr_does_not_show_keys() -> None:
    assert "hunter2" not in repr(HttpConfig(api_keys=frozenset({"hunter2"})))


@pytest.mark.parametrize(
    ("default", "cap", "expected"), [(None, None, None), (5, None, 5), (5, 60, 60), (None, 60, 60)]
)
def test_the_cap_is_the_default_deadline_unless_it_is_given(
    default: float | None, cap: float | None, expected: float | None
) -> None:
    assert HttpConfig(request_timeout_s=default, max_request_timeout_s=cap).timeout_cap_s == expected


@pytest.mark.parametrize("module", ["mlsys_serving.http", "mlsys_serving.http.config"])
def test_importing_the_package_imports_no_web_framework(module: str) -> None:
    heavy = "[m for m in ('fastapi', 'starlette', 'uvicorn', 'torch', 'prometheus_client') if m in sys.modules]"
    code = f"import sys, {module}; print({heavy})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_exported_name_resolves() -> None:
    import mlsys_serving.http as package

    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing
