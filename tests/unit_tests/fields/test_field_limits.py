"""Fields declare what they may hold, and every number of the package's own configs does."""

import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import pytest

from torchtitan_rl import algorithm, data, environments, generator, models, rewards, trainer
from torchtitan_rl.config import RunConfig
from torchtitan_rl.errors import UserError
from torchtitan_rl.fields.field_limits import check_fields
from torchtitan_rl.fields.number import number

ANY_NUMBER = {"ReasoningGym.Config.tasks": "pairs of a name and a weight, checked where the names are"}
"""Numeric fields without a declared limit, each with its reason."""


@dataclass(kw_only=True, slots=True)
class Inner:
    share: float = number(0.5, above=0, below=1, remedy="Use a half.")


@dataclass(kw_only=True, slots=True)
class Outer:
    count: int = number(4, least=1)
    size: int | None = number(None, least=1)
    least: float = number(1.0, least=0)
    most: float = number(2.0, least="least", most=math.inf)
    pair: tuple[float, float] = number((0.1, 0.2), least=0, below=1)
    ids: list[int] = number([], least=0)
    weights: dict[str, float] = number({}, above=-math.inf, below=math.inf)
    kind: Literal["one", "other"] = "one"
    kinds: dict[str, Literal["one", "other"]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)
    named: dict[str, Inner] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "run.count = 0: expected at least 1. Use 4."),
        ({"count": 1.5}, "run.count = 1.5: expected a valid integer. Use 4."),
        ({"least": "1"}, "run.least = '1': expected a valid number. Use 1.0."),
        ({"least": math.inf, "most": math.inf}, "run.least = inf: expected a finite number. Use 1.0."),
        ({"most": 0.5}, "run.most = 0.5: expected at least 1.0 (least). Use 2.0."),
        ({"pair": (0.1, 1.0)}, "run.pair = (0.1, 1.0): expected at least 0 and less than 1. Use (0.1, 0.2)."),
        ({"weights": {"a": math.nan}}, "run.weights = {'a': nan}: expected a finite number. Use {}."),
        ({"kind": "third"}, "run.kind = 'third': expected 'one' or 'other'. Use 'one'."),
        ({"kinds": {"a": "third"}}, "run.kinds = {'a': 'third'}: expected 'one' or 'other'."),
        ({"texts": [5]}, "run.texts = [5]: expected a valid string. Correct the value."),
        ({"inner": None}, "run.inner = None: expected an instance of Inner. Use Inner()."),
        ({"inner": Inner(share=0)}, "run.inner.share = 0: expected more than 0 and less than 1. Use a half."),
        ({"named": {"a": Inner(share=1)}}, "run.named.a.share = 1: expected more than 0 and less than 1. Use a half."),
    ],
)
def test_number_out_of_range_is_refused_with_its_full_name(settings, message):
    with pytest.raises(UserError) as raised:
        check_fields(Outer(**settings), "run")
    assert str(raised.value).startswith(message)


def own_configs(config: type, seen: set[type]) -> Iterator[type]:
    """A config class of this package, and all that its fields may hold: subclasses and what is inside lists and dicts too."""
    if not (is_dataclass(config) and config.__module__.startswith("torchtitan_rl.")) or config in seen:
        return
    seen.add(config)
    yield config
    for found in (*config.__subclasses__(), *(kind for one in fields(config) for kind in kinds(one.type))):
        yield from own_configs(found, seen)


def kinds(declared: Any) -> list[Any]:
    """A type and all types inside it. Example: int | None -> [int | None, int, NoneType]"""
    return [declared, *(inner for one in get_args(declared) for inner in kinds(one))]


def undeclared(config: type) -> set[str]:
    """Its numeric fields without a limit."""
    numbers = {one for one in fields(config) if {int, float} & {*kinds(one.type)}}
    return {f"{config.__qualname__}.{one.name}" for one in numbers if not one.metadata.get("limits")}


def test_every_number_in_a_config_declares_its_range():
    for drawer in (algorithm, data, environments, generator, models, rewards, trainer):
        for module in pkgutil.walk_packages(drawer.__path__, f"{drawer.__name__}."):
            if not module.name.endswith(".chat_harness"):  # it runs where verifiers is installed, and has no config
                import_module(module.name)  # what one may put into a field of another's type
    configs = [*own_configs(RunConfig, set())]
    names = {config.__qualname__ for config in configs}
    assert names >= {"RunConfig", "SamplingConfig", "WatchdogLimits", "AdamW.Config", "TauController.Config", "Share"}
    assert set().union(*map(undeclared, configs)) == {*ANY_NUMBER}
