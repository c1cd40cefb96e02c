"""Every number of node.toml has bounds that a machine can bear, and a file beyond them is refused with its field."""

from __future__ import annotations

import math
import resource

import msgspec
import pytest
from msgspec import inspect as types

from prorl_trio.config import NodeConfig, load_config
from prorl_trio.config.quantities import MIN_MESSAGE_BYTES, Seconds
from prorl_trio.node import descriptors
from prorl_trio.node.descriptors import check_descriptors, raise_descriptor_limit
from prorl_trio.types.errors import ConfigError

UNBOUNDED = {"model.template_options"}
"""Variables of the model's template: whatever it takes."""
BEYOND = {"int": (10**20, -(10**20), 2**63 - 1, 2**62, -1), "float": (1e20, 1e300, math.inf, -math.inf, math.nan, -1.0)}


def numbers(table=NodeConfig, path=""):
    """Each number of the schema: its path, with `KEY` in place of a key, and its type."""
    for field in types.type_info(table).fields:
        place = f"{path}.{field.name}" if path else field.name
        yield from numbers_of(field.type, place)


def numbers_of(kind, place):
    match kind:
        case types.IntType() | types.FloatType():
            yield place, kind
        case types.StructType():
            yield from numbers(kind.cls, place)
        case types.UnionType():
            for each in kind.types:
                yield from numbers_of(each, place)
        case types.DictType() if place not in UNBOUNDED:
            yield from numbers_of(kind.value_type, f"{place}.KEY")
        case types.ListType() | types.VarTupleType() | types.CollectionType():
            yield from numbers_of(kind.item_type, place)


NUMBERS = dict(numbers())
SECONDS = types.type_info(Seconds)
DICTS = {place for place in NUMBERS if place.endswith(".KEY")}


def test_the_schema_is_walked_to_its_leaves():
    assert {"stages.run_workers", "sandbox.limits.memory_bytes", "backends.load.decrease_factor"} <= set(NUMBERS)
    assert {"backends.weights.KEY", "admission.session_weights.KEY", "agent.max_staleness"} <= set(NUMBERS)
    assert len(NUMBERS) > 100


@pytest.mark.parametrize("place", sorted(set(NUMBERS) - DICTS - UNBOUNDED))
def test_every_number_has_an_upper_and_a_lower_bound(place):
    kind = NUMBERS[place]
    assert kind.le is not None or kind.lt is not None, "the field has no upper bound"
    assert kind.ge is not None or kind.gt is not None, "the field has no lower bound"


@pytest.mark.parametrize("place", NUMBERS)
def test_a_number_beyond_all_reason_is_refused_with_its_field(tmp_path, place):
    *tables, name = place.split(".")
    values = BEYOND["int" if isinstance(NUMBERS[place], types.IntType) else "float"]
    for value in values:
        file = tmp_path / "node.toml"
        line = f'"http://e:1" = {value}' if name == "KEY" else f"{name} = {value}"
        urls = '[backends]\nurls = ["http://e:1"]\n' if tables[:1] == ["backends"] and name == "KEY" else ""
        head = f"[{'.'.join(tables)}]\n" if tables else ""
        model = '[model]\npath = "x"\n'
        file.write_text(f"{model}{urls}{head}{line}\n" if tables else f"{line}\n{model}")
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert (tables[-1] if name == "KEY" else name) in str(caught.value), value


@pytest.mark.parametrize("field", ["listen.max_message_bytes", "listen.max_body_bytes", "search.max_response_bytes"])
def test_a_message_limit_that_no_message_fits_is_refused(tmp_path, field):
    table, name = field.split(".")
    file = tmp_path / "node.toml"
    file.write_text(f"[model]\npath = 'x'\n[{table}]\n{name} = {MIN_MESSAGE_BYTES - 1}\n")
    with pytest.raises(ConfigError, match=rf"`int` >= {MIN_MESSAGE_BYTES} - at `\$\.{table}\.{name}`"):
        load_config(file)
    file.write_text(f"[model]\npath = 'x'\n[{table}]\n{name} = {MIN_MESSAGE_BYTES}\n")
    load_config(file)


@pytest.mark.parametrize("place", [place for place, kind in NUMBERS.items() if kind == SECONDS])
def test_a_duration_shorter_than_any_step_is_refused(tmp_path, place):
    *tables, name = place.split(".")
    file = tmp_path / "node.toml"
    file.write_text(f"[model]\npath = 'x'\n[{'.'.join(tables)}]\n{name} = 1e-9\n")
    with pytest.raises(ConfigError, match=rf">= 0\.001 - at .*{name}"):
        load_config(file)


@pytest.mark.parametrize("place", sorted(set(NUMBERS) - DICTS))
def test_zero_is_refused_where_it_means_nothing(tmp_path, place):
    *tables, name = place.split(".")
    kind = NUMBERS[place]
    text = f"[model]\npath = 'x'\n[{'.'.join(tables)}]\n{name} = 0\n" if tables else f"{name} = 0\n[model]\npath='x'\n"
    file = tmp_path / "node.toml"
    file.write_text(text)
    if kind.ge == 0:
        load_config(file)
    else:
        with pytest.raises(ConfigError, match=name):
            load_config(file)


# ---------------------------------------------------------------- descriptors


def config(**tables):
    return msgspec.convert({"model": {"path": "x"}, **tables}, NodeConfig)


@pytest.fixture
def limited(monkeypatch):
    def limit(soft, hard=None):
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _which: (soft, hard or soft))

    return limit


def test_the_default_configuration_fits_the_usual_limit(limited):
    limited(1024)
    check_descriptors(config())
    limited(resource.RLIM_INFINITY)
    check_descriptors(config(stages={"run_workers": 10_000}))


@pytest.mark.parametrize(
    ("tables", "field", "limit"),
    [
        ({"stages": {"run_workers": 140}}, "stages.run_workers", 256),
        ({"stages": {"run_workers": 10_000}}, "stages.run_workers", 20_000),
        ({"stages": {"ready_queue": 5_000}}, "stages.ready_queue", 1024),
        ({"sandbox": {"max_warm": 1000}}, "sandbox.max_warm", 4096),
        ({"listen": {"max_sessions": 10_000}}, "listen.max_sessions", 4096),
        ({"listen": {"max_connections": 10_000}}, "listen.max_connections", 4096),
        ({}, "stages.run_workers", 110),
    ],
)
def test_more_than_the_process_may_open_is_refused_with_field_limit_and_remedy(limited, tables, field, limit):
    limited(limit)
    with pytest.raises(ConfigError, match=rf"^{field}: .* the limit is {limit}; raise the limit .*LimitNOFILE"):
        check_descriptors(config(**tables))


def test_the_soft_limit_is_raised_to_the_hard_one():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
