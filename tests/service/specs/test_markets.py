"""Hardware on a market: a value of the field and of its axis, with a price and nodes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE, MARKET_LABEL, Hardware, Market, MarketPrice, lookup
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, devices_of, unsatisfiable
from service.scheduling.run_plan import shapes_of
from service.specs.experiment import json_schema, validate

NAME = "A100-PCIE-80GB"
SPOT = MarketPrice(price_usd_per_hour=1.2, price_date="2026-05-01", price_source="a test")
MARKETS: Mapping[str, Hardware] = {
    **CATALOGUE,
    NAME: CATALOGUE[NAME].model_copy(update={"markets": {Market.spot: SPOT}}),
}
BASE = {"name": "x", "task": {"name": "imdb"}}


def on(market: str) -> dict[str, str]:
    return {"name": "A100", "market": market}


def test_a_market_is_a_value_of_the_axis_with_its_price_and_its_nodes() -> None:
    spec = validate({**BASE, "search": {"axes": {"hardware": ["cpu", on("spot"), on("on-demand")]}}}, MARKETS)
    plans = list(spec.runs(MARKETS))
    assert [plan.point["hardware"] for plan in plans] == ["cpu", "A100@spot", "A100@on-demand"]
    assert [plan.spec.hardware for plan in plans] == ["cpu", f"{NAME}@spot", f"{NAME}@on-demand"]
    prices = [lookup(plan.spec.hardware, MARKETS).price_usd_per_hour for plan in plans[1:]]
    assert prices == [1.2, CATALOGUE[NAME].price_usd_per_hour]
    for plan, market in zip(plans[1:], Market, strict=False):
        (shape,) = shapes_of(plan.spec, MARKETS)
        assert dict(shape.labels) == {MARKET_LABEL: plan.spec.hardware.partition("@")[2]}, market


def test_only_nodes_of_the_market_serve_it() -> None:
    resources = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}
    nodes = tuple(
        ClusterNode(market, market, True, resources, resources, {MARKET_LABEL: market})
        for market in ("on-demand", "spot", "spot")
    )
    assert [devices_of(lookup(f"A100{at}", MARKETS), nodes) for at in ("", "@spot", "@on-demand")] == [
        3,
        2,
        1,
    ]
    spec = validate({**BASE, "hardware": on("spot")}, MARKETS)
    assert unsatisfiable(spec.at({}, MARKETS), ClusterSnapshot(0.0, True, None, nodes), MARKETS) is None
    missing = unsatisfiable(spec.at({}, MARKETS), ClusterSnapshot(0.0, True, None, nodes[:1]), MARKETS)
    assert f"no node has hardware {NAME}@spot (Ray label ray.io/market-type=spot)" in str(missing)


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        (
            on("spt"),
            "hardware: hardware A100-PCIE-80GB has no price on market 'spt', but on on-demand, spot; ",
        ),
        (
            {"name": "T4", "market": "spot"},
            "hardware: hardware T4 has no price on market 'spot', but on on-demand;",
        ),
        (
            {"name": "A100", "markt": "spot"},
            "hardware: it has name, markt; give a name, or {name: A100, market: ",
        ),
        ("A1000@spot", "hardware: 'A1000' is not in the catalogue; did you mean 'A100'?"),
    ],
)
def test_a_mistake_names_field_value_and_fix(hardware: Any, message: str) -> None:
    for document in ({"hardware": hardware}, {"search": {"axes": {"hardware": ["cpu", hardware]}}}):
        with pytest.raises(SpecError) as refused:
            list(validate({**BASE, **document}, MARKETS).runs(MARKETS))
        assert message.partition(": ")[2] in str(refused.value)


def test_the_published_schema_has_markets_in_the_field_and_its_axis() -> None:
    search = {"axes": {"hardware": [on("spot"), "cpu"]}}
    for document in ({"hardware": on("spot")}, {"search": search}):
        jsonschema.validate({**BASE, **document}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**BASE, "hardware": on("spt")}, json_schema())
