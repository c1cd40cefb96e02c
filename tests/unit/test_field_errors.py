"""msgspec's messages are read in one place: what is wrong, where, and which field does not exist."""

from __future__ import annotations

import msgspec
import pytest

from prorl_trio.types.errors import field_error, malformed_job


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0
    tags: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number must be >= 0, see `$x` - at `home`")


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner = Inner()
    many: list[Inner] = []
    keys: dict[int, str] = {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", ("Object missing required field `name`", "$", "")),
        ('{"name": "n", "x y": 1}', ("Object contains unknown field `x y`", "$", "x y")),
        ('{"name": "n", "inner": {"y": 1}}', ("Object contains unknown field `y`", "$.inner", "y")),
        ('{"name": "n", "many": [{"number": "1"}]}', ("Expected `int`, got `str`", "$.many[0].number", "")),
        ('{"name": "n", "inner": {"tags": {"a": 1}}}', ("Expected `str`, got `int`", "$.inner.tags[...]", "")),
        ('{"name": "n", "keys": {"a": "b"}}', ("Expected `int`, got `str`", "$.keys", "")),
        ('{"name": "n", "inner": {"number": -1}}', ("number must be >= 0, see `$x` - at `home`", "$.inner", "")),
        ("{", ("Input data was truncated", "$", "")),
    ],
)
def test_an_error_is_taken_apart(text, expected):
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=Outer)
    assert field_error(caught.value) == expected


def test_a_refusal_names_the_field_from_where_the_caller_stands():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"name": "n", "inner": {"number": "1"}}, Outer)
    refusal = malformed_job(caught.value, prefix="$.jobs[2]")
    assert refusal.path == "$.jobs[2].inner.number"
    assert str(refusal) == "Expected `int`, got `str` - at `$.jobs[2].inner.number`"


def test_what_is_nested_too_deeply_has_a_message_too():
    assert str(malformed_job(RecursionError())) == "nested too deeply"
