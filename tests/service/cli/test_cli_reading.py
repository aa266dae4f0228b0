"""Looking at experiments over a real API: tables, stories, waiting, narrow terminals, pure JSON."""

from __future__ import annotations

import re
import socket
import threading

import orjson
import pytest

from service.domain.records import LogLine
from service.domain.states import ExperimentState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.store import RecordBatch
from tests.service.cli.house import SPEC, House
from trainers.errors import FailureClass


def test_an_empty_service_says_how_to_begin(house: House) -> None:
    result = house.run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "stillhouse submit" in result.stderr
    assert house.run("watch").stderr == "error: there are no experiments yet; submit one\n"


def test_list_counts_the_runs_that_are_done(full_house: House) -> None:
    lines = full_house.run("list").stdout.splitlines()
    assert lines[2].split()[:5] == ["2", "precision-by-batch", "root", "queued", "0/8"] or "0/8" in lines[2]
    assert "8/8" in lines[3]


def test_list_takes_filters_and_names_what_it_does_not_know(full_house: House) -> None:
    assert [e["id"] for e in full_house.json("list", "--filter", "state = 'queued'")] == [2]
    bad = full_house.run("list", "--filter", "stat = 'queued'")
    assert bad.exit_code == 2
    assert "stat" in bad.stderr


def test_runs_over_all_experiments_by_filter_and_order(full_house: House) -> None:
    found = full_house.json(
        "runs", "--filter", "precision = 'fp32' and accuracy > 0.91", "--order-by", "id ASC"
    )
    assert [run["id"] for run in found] == [2, 4]


def test_show_tells_of_failures_retries_and_resumes(house: House) -> None:
    number = house.submitted()
    experiment = house.claimed()
    run = house.runs(number)[0]
    first = house.begun(run, experiment)
    house.failed(run, first, FailureClass.infrastructure, "the node went away", retry_delay_s=0.0)
    second = house.begun(run, experiment, resumed_from_step=30)
    house.finished(run, second, 0.9, 20.0)
    story = house.run("show", str(number)).stdout
    assert "infrastructure: the node went away" in story
    assert "resumed from step 30" in story
    story = house.run("show", "run:1").stdout
    assert re.search(r"^attempt 1  infrastructure .*\n +the node went away$", story, re.MULTILINE)
    assert "attempt 2  succeeded" in story
    assert "resumed from step 30, reached step 40" in story
    assert re.search(r"^accuracy +0\.900$", story, re.MULTILINE)


def test_show_leaves_out_what_goes_as_it_should_and_says_so(full_house: House) -> None:
    number = 1
    assert "24 routine events hidden (--events)" in full_house.run("show", str(number)).stdout
    assert "hidden" not in full_house.run("show", str(number), "--events").stdout
    assert len(full_house.json("show", str(number))["events"]) == 28


def test_show_says_why_an_experiment_waits(house: House) -> None:
    number = house.submitted()
    assert "no scheduler is running" in " ".join(house.run("show", str(number)).stdout.split())


def test_compare_shows_mean_and_spread_by_cell(full_house: House) -> None:
    result = full_house.run("compare", "1")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if "fp32" in line or "bf16" in line]
    assert len(rows) == 4
    assert rows[0].split()[:5] == ["fp32", "16", "2/2", "20.0", "±0.0"]
    assert "0.910 ±0.014" in rows[0]
    assert result.output.count("energy is modelled from rated power and time, not measured") == 1


def test_compare_says_what_is_missing_once(full_house: House) -> None:
    result = full_house.run("compare", "1", "--filter", "seed = 0")
    assert result.exit_code == 0
    assert result.output.count("one seed per") == 1
    assert result.output.count("energy is modelled") == 1
    assert "* best value; not tested for significance" in result.stdout
    notes = full_house.json("compare", "1", "--filter", "seed = 0")["notes"]
    assert all(note in " ".join(result.stdout.split()) for note in notes)


def test_compare_by_one_axis_marks_the_best(full_house: House) -> None:
    fp32, bf16 = full_house.run("compare", "1", "--by", "precision").stdout.splitlines()[3:5]
    assert fp32.endswith("*")
    assert "10.0 ±0.0*" in bf16


def test_compare_as_json_has_the_numbers(full_house: House) -> None:
    answer = full_house.json("compare", "1", "--by", "precision", "--metric", "accuracy")
    assert answer["axes"] == ["precision"]
    assert answer["rows"][0]["figures"]["accuracy"] == {
        "mean": pytest.approx(0.91), "sd": pytest.approx(0.02 / 2**0.5), "n": 4,
    }  # fmt: skip
    assert answer["best"] == {"accuracy": 0}


def test_compare_names_an_unknown_axis(full_house: House) -> None:
    result = full_house.run("compare", "1", "--by", "colour")
    assert result.exit_code == 2
    assert result.stderr == "error: unknown axis 'colour'; axes: precision, batch.global_size\n"


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("command", ["list", "runs", "show 1", "show run:1", "compare 1", "watch 1"])
def test_no_figure_is_cut_at_any_width(full_house: House, command: str, width: int) -> None:
    result = full_house.run(*command.split(), width=width)
    assert result.exit_code == 0
    assert "…" not in result.stdout


@pytest.mark.parametrize("command", ["list", "show 1", "show run:1", "compare 1", "queue"])
def test_tables_fit_into_80_columns(full_house: House, command: str) -> None:
    lines = full_house.run(*command.split()).stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("mean ±")) <= 80


def test_watch_without_a_terminal_prints_events_then_every_run(full_house: House) -> None:
    result = full_house.run("watch", "1")
    assert result.exit_code == 0
    assert "submitted by" in result.stdout
    assert result.stdout.splitlines()[-1] == "experiment 1 succeeded: 8 succeeded"
    assert "run:8 precision=bf16 batch=32 seed=1 succeeded" in result.stdout


def test_watch_as_json_is_a_document_per_line_until_the_end(full_house: House) -> None:
    result = full_house.run("watch", "1", "--json")
    documents = [orjson.loads(line) for line in result.stdout.splitlines()]
    assert documents[-1]["ended"]["state"] == "succeeded"
    assert any("event" in document for document in documents)


def test_watch_follows_what_happens_meanwhile(house: House) -> None:
    number = house.submitted()
    experiment = house.claimed()

    def train() -> None:
        for run in house.runs(number):
            house.finished(run, house.begun(run, experiment), 0.9, 1.0)
        house.ended(ExperimentState.succeeded, experiment)

    timer = threading.Timer(0.5, train)
    timer.start()
    result = house.run("watch", str(number))
    timer.join()
    assert result.exit_code == 0
    assert "accuracy=0.900" in result.stdout


def test_wait_ends_with_how_it_ended(house: House) -> None:
    house.whole_experiment()
    assert house.run("wait", "1").exit_code == 0
    assert house.run("wait", "run:1").exit_code == 0
    number = house.submitted()
    house.run("cancel", str(number))
    cancelled = house.run("wait", str(number))
    assert (cancelled.exit_code, cancelled.stdout) == (1, f"experiment {number} cancelled\n")
    assert house.run("watch", str(number)).exit_code == 1


def test_wait_gives_up_after_its_timeout(house: House) -> None:
    number = house.submitted()
    result = house.run("wait", str(number), "--timeout", "0.1")
    assert result.exit_code == 7
    assert "has not ended after 0.1 s and continues" in result.stderr


def test_submit_and_wait_is_one_json_document(house: House) -> None:
    def end() -> None:
        while not house.store.experiments.page().items:
            threading.Event().wait(0.05)
        house.run("cancel", "1")

    thread = threading.Thread(target=end)
    thread.start()
    result = house.run("submit", house.spec(), "--wait", "--json")
    thread.join()
    assert result.exit_code == 1
    assert orjson.loads(result.stdout)["state"] == "cancelled"


def test_logs_of_all_runs_name_each_and_one_run_does_not(full_house: House) -> None:
    assert len(full_house.run("logs", "1").stdout.splitlines()) == 8
    assert " run:1 attempt 1 trains" in full_house.run("logs", "1").stdout
    assert full_house.run("logs", "run:1").stdout.endswith(" attempt 1 trains\n")
    assert "run:" not in full_house.run("logs", "run:1", "-f").stdout
    assert full_house.json("logs", "run:1")[0]["message"] == "attempt 1 trains"


def test_what_a_run_logs_commands_no_terminal(house: House) -> None:
    number = house.submitted()
    experiment = house.claimed()
    run = house.runs(number)[0]
    attempt = house.begun(run, experiment)
    message = "\x1b]0;owned\x07\x1b[2J half\rway \x9b31m\tdone"
    house.store.recording.record(RecordBatch(logs=[LogLine(run.id, attempt, 9, 0.0, "info", message)]))
    shown = "\\u001b]0;owned\\u0007\\u001b[2J half\\u000dway \\u009b31m\tdone\n"
    assert shown in house.run("logs", f"run:{run.id}").stdout
    assert message in [line["message"] for line in house.json("logs", f"run:{run.id}")]
    house.failed(run, attempt, FailureClass.bad_data, "\x1b[2J no such file")
    for target in (str(number), f"run:{run.id}"):
        story = house.run("show", target).stdout
        assert "\\u001b[2J no such file" in story
        assert "\x1b" not in story


def test_queue_says_why_each_waits(house: House) -> None:
    house.submitted()
    result = house.run("queue")
    assert "no scheduler is running" in " ".join(result.stdout.split())
    assert "nothing will start" in result.stderr


def test_queue_lists_what_is_at_work_and_waits_for_capacity(house: House) -> None:
    number = house.submitted()
    house.queue.heartbeat("s", node="n", pid=1)
    (claimed,) = house.queue.claim("s", lease_s=60)
    house.store.drivers.started(number, claimed.attempt, "node", 1)
    assert "nothing is waiting" in house.run("queue").stdout
    (run, *_) = house.store.runs.page(experiment_id=number).items
    house.store.drivers.set_waiting(number, claimed.attempt, {run.id: "capacity: no node has hardware T4"})
    shown = house.run("queue", width=200).stdout
    assert "nothing is waiting" not in shown
    assert "at work" in shown and "runs wait for capacity: no node has hardware T4" in shown
    (listed,) = house.json("queue")["at_work"]
    assert (listed["experiment"]["id"], listed["experiment"]["state"]) == (number, "running")


def test_cluster_shows_every_pool(house: House) -> None:
    node = ClusterNode("1", "1", True, {"CPU": 8.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0}, {})
    there = Queue(house.store, "gpu")
    there.put_cluster(ClusterSnapshot(house.store.clock(), True, None, (node,)))
    there.heartbeat("s1", node="n", pid=1)
    shown = house.run("cluster", width=200).stdout
    assert "none; start one with: stillhouse scheduler" in shown and "never seen" in shown
    assert "s1" in shown and "8 CPU, 2 GPU" in shown
    pools = house.json("cluster")["pools"]
    assert [(each["pool"], each["schedulers"]) for each in pools] == [("default", []), ("gpu", ["s1"])]
    going = ClusterNode("2", "10.0.0.2", True, {"CPU": 8.0}, {}, draining=True, drain_deadline_s=45_296.0)
    there.put_cluster(ClusterSnapshot(house.store.clock(), True, None, (node, going)))
    shown = house.run("cluster", width=200).stdout
    assert "pool gpu: node 10.0.0.2 is draining, and goes at 12:34:56 UTC; nothing starts there" in shown
    assert "8 CPU, 2 GPU" in shown
    house.submitted(SPEC + "pool: gpu\n")
    assert "gpu" in house.run("queue", width=200).stdout


def test_hardware_shows_the_catalogue_and_the_sources_of_an_entry(house: House) -> None:
    listed = house.run("hardware").stdout
    assert "A100-PCIE-80GB = A100" in listed
    assert "A10G" in listed
    sheet = " ".join(house.run("hardware", "A100").stdout.split())
    assert "NVIDIA A100 Tensor Core GPU data sheet" in sheet
    assert "table 4.16: cost / time of its three runs" in sheet
    assert "no data sheet" in house.run("hardware", "cpu").stdout
    assert house.json("hardware", "V100")["name"] == "V100-PCIE-16GB"
    missing = house.run("hardware", "A1000")
    assert missing.exit_code == 3
    assert "'A1000' is not in the catalogue; did you mean 'A100'?" in missing.stderr


def test_export_writes_every_format(full_house: House) -> None:
    assert full_house.run("export", "1").stdout.count("\n") == 9
    lines = full_house.run("export", "1", "--json").stdout.splitlines()
    assert [orjson.loads(line)["id"] for line in lines] == list(range(1, 9))
    target = full_house.folder / "runs.parquet"
    result = full_house.run("export", "1", "--format", "parquet", "-o", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    assert target.read_bytes()[:4] == b"PAR1"


@pytest.mark.parametrize(
    "command",
    [
        "list",
        "runs",
        "show 1",
        "show run:1",
        "wait 1",
        "logs 1",
        "queue",
        "compare 1",
        "doctor",
        "schema",
        "db check",
    ],
)
def test_json_is_all_that_is_on_standard_output(full_house: House, command: str) -> None:
    full_house.json(*command.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("show 99", 3, "error: no experiment has the id 99\n"),
        ("show run:99", 3, "error: no run has the id 99\n"),
        ("logs run:99", 3, "error: no run has the id 99\n"),
        ("compare 99", 3, "error: no experiment has the id 99\n"),
        ("watch 99", 3, "error: no experiment has the id 99\n"),
        ("export 99", 3, "error: no experiment has the id 99\n"),
        ("show 0", 2, "error: '0': give an experiment as 17 or a run as run:42\n"),
        ("pause run:1", 2, "error: 'run:1' is a run; this command takes an experiment, such as 17\n"),
        ("submit missing.yaml", 3, "error: missing.yaml: no such file\n"),
        ("shwo 1", 2, "error: No such command 'shwo'. Did you mean 'show'? See `stillhouse --help`.\n"),
        ("list --limit none", 2, "`stillhouse list --help`.\n"),
        ("compare", 2, "error: give experiments, such as 17, or --study with its number\n"),
    ],
)
def test_an_error_is_one_line_on_standard_error_with_its_code(
    full_house: House, arguments: str, code: int, said: str
) -> None:
    result = full_house.run(*arguments.split())
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.endswith(said)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("width", [30, 80])
def test_compare_shows_dashes_while_runs_are_still_running(house: House, width: int) -> None:
    house.submitted()
    result = house.run("compare", "1", width=width)
    assert result.exit_code == 0, result.exception
    assert "-" in result.stdout


def test_recommend_names_the_cheapest_that_loses_no_accuracy(full_house: House) -> None:
    loose = full_house.run("recommend", "1", "--within", "accuracy=0.2")
    assert loose.exit_code == 0
    assert loose.stdout.startswith("Use precision=bf16, batch.global_size=16: cost_usd ")
    assert "Confidence: " in loose.stdout
    strict = full_house.run("recommend", "1")
    assert strict.stdout.startswith("Use precision=fp32, ")
    assert "excluded precision=bf16, batch.global_size=16: accuracy" in strict.stdout


def test_recommend_as_json_has_the_evidence(full_house: House) -> None:
    answer = full_house.json("recommend", "1", "--within", "accuracy=0.2")
    assert answer["objective"] == "cost_usd"
    assert answer["over_runner_up"]["metric"] == "cost_usd"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["2"], 1, "no run has accuracy"),
        (["1", "--at-least", "accuracy=0.99"], 1, "no configuration meets every constraint"),
        (["1", "--objective", "price"], 2, "unknown metric 'price'"),
        (["1", "--within", "accuracy"], 2, "'accuracy' is not NAME=NUMBER"),
    ],
)
def test_recommend_says_why_it_cannot(full_house: House, arguments: list[str], code: int, says: str) -> None:
    result = full_house.run("recommend", *arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_health_check_is_about_the_schedulers_own_pool(house: House) -> None:
    there = {"STILLHOUSE_DATABASE_URL": house.settings.resolved_database_url()}
    Queue(house.store, "gpu").heartbeat("s1", node=socket.gethostname(), pid=1)
    assert house.run("scheduler", "--check", "--pool", "gpu", **there).stdout == "s1\n"
    assert house.run("scheduler", "--check", STILLHOUSE_POOL="gpu", **there).stdout == "s1\n"
    assert "no scheduler on" in house.run("scheduler", "--check", **there).stderr
    assert "of pool 'tpu' on" in house.run("scheduler", "--check", "--pool", "tpu", **there).stderr
    wrong = house.run("scheduler", "--check", "--pool", "GPUs!", **there)
    assert wrong.exit_code == 2 and "STILLHOUSE_POOL=GPUs!" in wrong.stderr
