"""One loader: plain values become dataclasses, and what is wrong with them is said in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster, ClusterError, load_cluster
from opcast.datasets.devices import Device, DeviceError, load_device
from opcast.datasets.loading import check_fields, load, number, whole
from opcast.simulator.question.plan import Parallel, PlanError, Stack, load_stack


class MenuError(ValueError):
    pass


@dataclass(frozen=True)
class Dish:
    name: str
    price: float = 1.0
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        number(MenuError, "dish.price", self.price)


@dataclass(frozen=True)
class Menu:
    title: str
    first: Dish | None = None
    others: tuple[Dish, ...] = ()
    seats: int = 1
    open: bool = True
    tips: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole(MenuError, "menu.seats", self.seats, 1)


def test_plain_values_become_what_they_describe() -> None:
    values = {"title": "Lunch", "first": {"name": "soup", "price": 3, "parts": ["leek"]}, "others": [{"name": "pie"}]}
    made = load(Menu, values | {"tips": {"noon": {"low": 1}}}, MenuError, "menu")
    assert made == Menu("Lunch", Dish("soup", 3.0, ("leek",)), (Dish("pie"),), tips={"noon": {"low": 1.0}})
    assert load(Menu, {"title": "x", "first": None, "others": None, "tips": None}, MenuError, "menu") == Menu("x")
    assert load(Menu, {"title": "x", "first": Dish("pie")}, MenuError, "menu") == Menu("x", Dish("pie"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seat": 2}, "menu has no field 'seat'; did you mean seats?"),
        ({"wine": 2}, "menu has no field 'wine'; it has first, open, others, seats, tips, title"),
        ({"seats": 0}, "menu.seats=0 must be a whole number of at least 1"),
        ({"seats": "two"}, "menu.seats='two' must be a whole number of at least 1"),
        ({"seats": "\ud800"}, "menu.seats='\\ud800' must be a whole number of at least 1"),
        ({"seats": True}, "menu.seats=True must be a whole number of at least 1"),
        ({"open": 1}, "menu.open=1 must be true or false"),
        ({"title": None}, "menu.title=None must be a word"),
        ({"first": 3}, "menu.first=3 must be a mapping or null"),
        ({"first": {"nam": "pie"}}, "menu.first has no field 'nam'; did you mean name?"),
        ({"first": {}}, "menu.first lacks name"),
        ({"first": {"name": "pie", "price": -2}}, "dish.price=-2 must be a number of at least 0"),
        ({"first": {"name": "pie", "parts": "leek"}}, "menu.first.parts='leek' must be a list"),
        ({"others": [{"name": "pie"}, {"name": 5}]}, "menu.others[1].name=5 must be a word"),
        ({"tips": {"noon": {"low": "much"}}}, "menu.tips.noon.low='much' must be a number"),
        ({"tips": {"noon": 3}}, "menu.tips.noon=3 must be a mapping"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(MenuError) as caught:
        load(Menu, {"title": "Lunch"} | change, MenuError, "menu")
    assert str(caught.value) == says


def test_no_mapping_at_all() -> None:
    with pytest.raises(MenuError, match="menu=3 must be a mapping of title, first"):
        load(Menu, 3, MenuError, "menu")


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        (lambda: Cluster("mine", "Mine", "l40s", nodes=0), ClusterError, "cluster.nodes=0 must be a whole number"),
        (lambda: Device(**load_device("l4").to_dict() | {"memory_gbps": -1}), DeviceError, "device.memory_gbps=-1"),
        (lambda: Stack(bucket_mib=-1), PlanError, "stack.bucket_mib=-1 must be a number of at least 0"),
        (lambda: Stack(overlap=("dp", "mp")), PlanError, "stack.overlap='mp' is not one of dp"),
        (lambda: Parallel(tp=0), PlanError, "parallel.tp=0 must be a whole number of at least 1"),
    ],
)
def test_ranges_hold_for_what_is_made_in_python_too(made: Any, error: type[ValueError], says: str) -> None:
    with pytest.raises(error, match=says):
        made()


@dataclass(frozen=True)
class Tray:
    """Fields with limits of their own."""

    cups: int = field(default=1, metadata={"least": 1, "most": 9})
    full: float | None = field(default=None, metadata={"most": 1})
    grams: float = field(default=2.0, metadata={"positive": True})
    hot: bool = False
    size: str | None = field(default=None, metadata={"choices": ("small", "large")})
    note: str | int = -1

    def __post_init__(self) -> None:
        check_fields(self, MenuError, "tray")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cups": 0}, "tray.cups=0 must be a whole number of at least 1"),
        ({"cups": 10}, "tray.cups=10 must be at most 9"),
        ({"cups": None}, "tray.cups=None must be a whole number of at least 1"),
        ({"full": 1.5}, "tray.full=1.5 must be a share, at most 1"),
        ({"full": -1}, "tray.full=-1 must be a number of at least 0"),
        ({"grams": 0}, "tray.grams=0 must be more than 0"),
        ({"grams": float("nan")}, "tray.grams=nan must be a number of at least 0"),
        ({"hot": 1}, "tray.hot=1 must be true or false"),
        ({"size": "smal"}, "tray.size='smal' is not one of small, large; did you mean small?"),
    ],
)
def test_limits_stand_beside_fields(values: dict[str, Any], says: str) -> None:
    Tray(full=1, size="large", note=-3)
    with pytest.raises(MenuError) as caught:
        Tray(**values)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"issue": {}}, "stack has no field 'issue'; did you mean issue_us?"),
        ({"issue_us": {"gemm": "long"}}, "stack.issue_us.gemm='long' must be a number"),
        ({"fusion": "all"}, "stack.fusion='all' must be a list of names; take stack.fusion=\\[all\\]"),
        ({"scale": {"h100_sxm": {"gemm": -1}}}, "stack.scale.h100_sxm.gemm=-1 must be a number of at least 0"),
        ({"scale": 3}, "stack.scale=3 must be a mapping"),
        ({"cuda_graph": "yes"}, "stack.cuda_graph='yes' must be true or false"),
    ],
)
def test_a_framework_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        load(Stack, values, PlanError, "stack")


def test_what_ships_goes_through_and_back() -> None:
    for known in (load_cluster("dgx_h100"), load_device("h100_sxm"), load_stack("megatron")):
        values = {name: getattr(known, name) for name in known.__dataclass_fields__}
        assert load(type(known), values, ValueError, "it") == known
