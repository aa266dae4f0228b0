"""Reports of a simulated sweep: complete, self-contained, the same words in both forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects
import pytest

from benchmarks.simulated import sweep
from service.analysis.answers import AnalysisError, Selection
from service.domain.formats import title
from service.domain.records import PointRow
from service.output.plots.material import TIME_PARTS, Unanswered
from service.output.plots.plot import PALETTE, unit_of
from service.output.report import ReportContents, html, markdown
from service.output.report.sections import Block, Paragraph, Table, sections
from tests.service.output.report.conftest import Sweep
from trainers.checkpoints.predictions import LabelCounts
from trainers.telemetry.timeline import OWN


def test_every_part_of_the_report_is_there(simulated: Sweep) -> None:
    text = markdown(simulated.contents())
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "Answer", "Question", "Results", "The price of accuracy", "Tested claims", "Effects by axis",
        "Speed-up over the baseline", "Other weightings", "Total cost", "Method", "Environment",
        "Caveats", "How to reproduce this",
    ]  # fmt: skip
    assert "Use precision=bf16 batch=" in text
    assert "Does bf16 lose accuracy" in text
    assert "3 out_of_memory" in text
    assert "stillhouse submit spec-1.yaml" in text


def test_the_page_says_what_the_markdown_says(simulated: Sweep) -> None:
    contents = simulated.contents()
    page = html(contents).text
    for section in sections(contents):
        assert f'<h2 id="{section.id}-title">' in page
        for block in section.blocks:
            if isinstance(block, Table):
                assert f"<th>{block.headings[0]}</th>" in page


def test_every_kind_of_plot_is_drawn_and_plotly_knows_every_property(simulated: Sweep) -> None:
    drawn = simulated.contents().figures
    kinds = {figure.id.partition("-")[0] for figure in drawn}
    assert kinds == {"curve", "tradeoff", "effect", "breakdown", "timeline"}
    for figure in drawn:
        plotly.graph_objects.Figure(
            data=figure.data, layout=figure.layout
        )  # Raises for what it does not know.


def test_the_bars_of_a_runs_time_are_all_of_its_phases() -> None:
    assert sorted(TIME_PARTS) == sorted(f"{phase}_time_s" for phase in OWN)


def test_every_axis_of_numbers_has_a_unit(simulated: Sweep) -> None:
    for figure in simulated.contents().figures:
        horizontal = any(trace.get("orientation") == "h" for trace in figure.data)
        axes = ["xaxis"] if horizontal or figure.id.startswith("effect") else ["xaxis", "yaxis"]
        for axis in axes:
            assert re.search(r"\(.+\)", figure.layout[axis]["title"]["text"]), (figure.id, axis)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("exact_match", "share, 0 to 1"), ("map", "share, 0 to 1"), ("precision_macro", "share, 0 to 1"),
        ("sequence_ms", "ms"), ("mean_power_w", "W"), ("loss", "nat"), ("noise_scale", "base batches"),
        ("steps", "1"),
    ],
)  # fmt: skip
def test_units_are_the_declared_ones(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_only_colours_that_everybody_tells_apart_are_used(simulated: Sweep) -> None:
    used = set(
        re.findall(r"#[0-9A-Fa-f]{6}", json.dumps([figure.data for figure in simulated.contents().figures]))
    )
    assert used <= set(PALETTE)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if name in ("src", "href") and value is not None]


def test_the_page_refers_to_nothing_outside_itself(simulated: Sweep) -> None:
    page = html(simulated.contents())
    links = _Links()
    links.feed(page.text)
    assert links.found
    assert all(link.startswith("#") for link in links.found)
    assert "default-src 'none'" in page.policy
    assert len(page.text.encode()) < 8_000_000


def test_a_name_cannot_bring_a_script_into_the_page(simulated: Sweep) -> None:
    name = "a_b"
    experiment = sweep(simulated.store, simulated.clock, axes={"precision": ["fp32"]}, seeds=1, name=name)
    contents = simulated.contents()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    runs = tuple(replace(run, failure_message=evil) for run in contents.run_table.runs)
    contents.run_table = replace(contents.run_table, runs=runs)
    contents.specs = [evil]
    page = html(contents).text
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert experiment.id > 1


def test_over_hardware_the_best_configuration_of_each_is_listed(simulated: Sweep) -> None:
    axes = {"hardware": ["T4", "V100"], "precision": ["fp32", "fp16"]}
    experiment = sweep(simulated.store, simulated.clock, axes=axes)
    text = markdown(ReportContents(simulated.store, [experiment.id]))
    assert "| hardware | best | cost | confidence |" in text
    assert "| hardware=T4 | hardware=T4 precision=" in text
    assert "The best on cost_usd is hardware=" in text.replace("\\", "")


def test_one_seed_is_reported_without_claims(simulated: Sweep) -> None:
    experiment = sweep(simulated.store, simulated.clock, axes={"precision": ["fp32", "bf16"]}, seeds=1)
    contents = ReportContents(simulated.store, [experiment.id])
    assert isinstance(contents.effects, Unanswered)
    text = markdown(contents)
    assert "One seed per configuration: the spread is unknown." in text
    assert "A claim needs at least two seeds" in text


def test_an_experiment_without_results_still_has_a_report(simulated: Sweep) -> None:
    experiment = sweep(
        simulated.store,
        simulated.clock,
        axes={"precision": ["fp32"]},
        seeds=2,
        out_of_memory=lambda run: True,
    )
    text = markdown(ReportContents(simulated.store, [experiment.id]))
    assert "No recommendation: " in text
    assert "2 runs (run:" in text


def test_a_filter_that_takes_nothing_leaves_no_report(simulated: Sweep) -> None:
    with pytest.raises(AnalysisError, match="has no runs"):
        markdown(
            ReportContents(simulated.store, [simulated.experiment.id], Selection(filter="precision = 'tf32'"))
        )


def test_the_confusion_matrix_of_the_recommended_configuration_is_added_up_over_seeds(
    simulated: Sweep,
) -> None:
    counts = LabelCounts(["art", "war | 1"], [7, 3], [6, 4], [5, 2], [[5, 2], [1, 2]])
    contents = ReportContents(simulated.store, [simulated.experiment.id], label_counts=lambda run: counts)
    assert contents.by_label is not None
    runs = len(contents.by_label.runs)
    assert runs > 1
    text = markdown(contents)
    assert f"| art | {7 * runs} | {6 * runs} | 0.833 | 0.714 | 0.769 |" in text
    assert f"| war \\| 1 | {1 * runs} | {2 * runs} |" in text
    page = html(contents).text
    assert "<td>war | 1</td>" in page
    drawn = next(figure for figure in contents.figures if figure.id == "confusion")
    assert drawn.data[0]["z"][0] == pytest.approx([5 / 7, 2 / 7], rel=1e-4)
    plotly.graph_objects.Figure(data=drawn.data, layout=drawn.layout)


def test_of_many_labels_the_most_frequent_confusions_are_listed(simulated: Sweep) -> None:
    predicted, true = np.array([1, 1, 5, 0, 2]), np.array([0, 0, 4, 0, 2])
    counts = LabelCounts.of_classes(predicted, true, [f"label {number}" for number in range(20)])
    contents = ReportContents(simulated.store, [simulated.experiment.id], label_counts=lambda run: counts)
    table = next(b for b in _blocks(contents, "labels") if isinstance(b, Table) and b.headings[0] == "true")
    assert [row[:2] for row in table.rows] == [["label 0", "label 1"], ["label 4", "label 5"]]
    assert table.rows[0][3] == "0.667"


def test_labels_without_a_matrix_have_their_figures(simulated: Sweep) -> None:
    counts = LabelCounts(["city", "person"], [4, 0], [2, 0], [1, 0])
    contents = ReportContents(simulated.store, [simulated.experiment.id], label_counts=lambda run: counts)
    assert [type(block) for block in _blocks(contents, "labels")] == [Paragraph, Table]
    assert "confusion" not in {figure.id for figure in contents.figures}


def test_models_of_few_bits_have_a_section_of_their_own(simulated: Sweep) -> None:
    contents = simulated.contents()
    first, *others = contents.run_table.finished
    same = [run.id for run in others if run.point == first.point]
    bits = {first.id: {"bits_per_weight": 1.5, "weight_memory_mib": 4.0}, same[0]: {"bits_per_weight": 2.5}}
    points = [PointRow("flipped_signs_pct", step, 1, 0.0, 10.0 / step) for step in (8, 16)]
    assert "bits" not in {section.id for section in sections(contents)}
    quantised = simulated.contents()
    quantised.run_table = replace(contents.run_table, summaries=bits)
    quantised.points = {first.id: {"flipped_signs_pct": points}}
    table = next(block for block in _blocks(quantised, "bits") if isinstance(block, Table))
    by_heading = dict(zip(table.headings, table.rows[0], strict=True))
    assert by_heading[title("bits_per_weight")].startswith("2")
    assert by_heading[title("weight_memory_mib")].startswith("4")
    assert by_heading[title("flipped_signs_pct")].startswith("0.62")


def _blocks(contents: ReportContents, id: str) -> list[Block]:
    return next(section.blocks for section in sections(contents) if section.id == id)
