"""Recorded runs over HTTP: the index, filters, search, pages, tokens; who is refused; the file that is exported."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import numpy as np
import pytest
import trio

from prorl_trio.cli.view import view
from prorl_trio.edges.viewer.pages import HEADERS, MODULES
from prorl_trio.runs import book as runs_book
from prorl_trio.runs.book import RunBook
from prorl_trio.runs.export import export_html
from prorl_trio.runs.index import OutcomeIndex, RowFilter, _scalars, groups_of
from prorl_trio.runs.recording import OutcomeFile, read_outcomes
from prorl_trio.types.errors import ConfigError, UnknownJob
from prorl_trio.types.models import Outcome, Trajectory
from support.fake_fleet import open_fake_fleet
from support.fake_node import FakeNode
from support.fake_rest import TOKEN, RestService, open_rest
from support.fake_service import TOKEN as FLEET_TOKEN
from support.fleet_head import open_head
from support.view_rig import runs_view
from support.viewed_runs import HOSTILE, Writer, sample_runs, write_learning, write_run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return sample_runs(tmp_path_factory.mktemp("viewed"))


@pytest.fixture
def book(root):
    with closing(RunBook(root)) as opened:
        yield opened


@pytest.fixture
async def service(root):
    async with runs_view(root) as served:
        host, port = served.url.removeprefix("http://").split(":")
        yield RestService((host, int(port)), None, trio.CancelScope())


async def ask(service, name, **query):
    answer = await service.call("GET", f"/v1/{name}?{urlencode(query)}")
    assert answer.status == 200, answer.body
    return answer.json()


# ---------------------------------------------------------------- the index


def test_outcomes_with_one_id_are_all_there_under_names_of_their_own(tmp_path):
    writer = Writer(tmp_path / "model")
    same = [writer.rollout("a", "g", reward) for reward in (0.25, 0.5, 0.75)]
    with closing(OutcomeIndex(write_run(tmp_path / "run", same) / "trajectories.msgpack")) as index:
        assert [row.job_id for row in index.rows] == ["a", "a (2)", "a (3)"]
        assert [index.read(row.job_id).reward for row in index.rows] == [0.25, 0.5, 0.75]


async def test_an_outcome_that_contradicts_itself_is_said_to_do_so(tmp_path):
    writer = Writer(tmp_path / "model")
    outcome = writer.rollout("a", "g", 1.0)
    (first, *others) = outcome.trajectory.turns
    turns = [msgspec.structs.replace(first, segment=99), *others]
    damaged = msgspec.structs.replace(outcome, trajectory=msgspec.structs.replace(outcome.trajectory, turns=turns))
    write_run(tmp_path / "runs" / "run", [damaged])
    async with runs_view(tmp_path / "runs") as served:
        host, port = served.url.removeprefix("http://").split(":")
        service = RestService((host, int(port)), None, trio.CancelScope())
        answer = await service.call("GET", "/v1/runs/rollout?run=run&job=a")
    assert answer.status == 422
    assert "contradicts itself" in answer.body.decode()


def test_the_index_grows_with_the_file_and_leaves_out_what_is_cut_off(tmp_path):
    writer = Writer(tmp_path / "model")
    path = write_run(tmp_path / "run", [writer.rollout("a", "g", 1.0)]) / "trajectories.msgpack"
    index = OutcomeIndex(path)
    assert [row.job_id for row in index.rows] == ["a"]
    with OutcomeFile(path, go_on=True) as file:
        file.append(writer.rollout("b", "g", 0.0))
    with path.open("ab") as file:
        file.write(msgspec.msgpack.encode(writer.rollout("never counted", "g", 0.0))[:500])
    index.refresh()
    assert [row.job_id for row in index.rows] == ["a", "b"]
    with closing(OutcomeIndex(path)) as again:
        assert [row.job_id for row in again.rows] == ["a", "b"]
        assert again.read("b") == index.read("b") == read_outcomes(path)[1]
    assert index.select(RowFilter(text="THE ANSWER IS 381")) == [index.row("b")]
    index.close()


@pytest.mark.parametrize("content", [b"", b"no msgpack", b"\xdd\x00\x00\x00\x01\x81\xa1a\x01"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, content):
    path = tmp_path / "trajectories.msgpack"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        OutcomeIndex(path)


@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [
        ({"reward_min": 0.5, "reward_max": 0.75}, ["run-1-3", "run-3-1"]),
        ({"status": "failed"}, ["run-1-2", "run-lost"]),
        ({"cause": "sandbox", "stop": "-"}, ["run-lost"]),
        ({"group": "group-0", "sort": "reward"}, ["run-0-1", "run-0-0", "run-0-2", "run-0-3"]),
        ({"family": "products"}, ["run-0-0"]),
        ({"group": "group-1", "sort": "reward", "descending": True}, ["run-1-3", "run-1-0", "run-1-1", "run-1-2"]),
        ({"text": "data.TXT by length", "reward_max": 0.1}, ["run-1-0", "run-1-1"]),
        ({"text": "graded run-2-3: RIGHT"}, ["run-2-3"]),
        ({"version": "8", "tokens_min": 1, "group": "group-2"}, [f"run-2-{n}" for n in range(4)]),
        ({"version": "9"}, []),
        ({"tokens_max": 0}, ["run-lost"]),
    ],
)
def test_rows_are_filtered_and_sorted(book, wanted, jobs):
    assert [row.job_id for row in book.index("main").select(RowFilter(**wanted))] == jobs


def test_groups_have_their_rewards_with_mean_and_spread(book):
    groups = {each["group"]: each for each in groups_of(book.index("main").select(RowFilter()))}
    assert [reward for _, reward, _, _ in groups["group-1"]["rollouts"]] == [0.0, 0.0, None, 0.5]
    assert groups["group-1"]["task"] == "Sort the lines of data.txt by length."
    assert groups["group-1"]["mean"] == pytest.approx(1 / 6)
    assert groups["group-3"]["spread"] == pytest.approx(np.std([0.25, 0.75, 0.0, 1.0]))
    assert groups["group-9"]["mean"] is None


def test_a_search_finds_each_rollout_once_wherever_its_words_are(tmp_path):
    writer = Writer(tmp_path / "model")
    outcomes = [writer.outcome(f"job {n}", "", 1.0, None, evaluation_log="Ünïcode here\0here" * n) for n in range(4)]
    index = OutcomeIndex(write_run(tmp_path, outcomes) / "trajectories.msgpack")
    assert [row.place for row in index.select(RowFilter(text="ünïCODE"))] == [1, 2, 3]
    assert [row.place for row in index.select(RowFilter(text="job 3"))] == [3]
    assert index.select(RowFilter(text="job 3graded")) == []
    index.close()


# ---------------------------------------------------------------- what the page asks for


async def test_runs_are_listed_with_their_kinds(service, root):
    found = await ask(service, "runs")
    kinds = {run["run"]: (run["kind"], run["rollouts"]) for run in found["runs"]}
    assert kinds == {
        "main": ("run", 17),
        "hostile": ("run", 2),
        "evaluation": ("evaluation", 4),
        "learning": ("learning", 1152),
    }
    about = await ask(service, "runs/about", run="main")
    assert about["facets"]["status"] == {"completed": 15, "failed": 2}
    assert about["facets"]["version"] == {"7": 16, "8": 16}
    assert about["reward_mean"] == pytest.approx(9.5 / 15)
    evaluated = await ask(service, "runs/about", run="evaluation")
    assert evaluated["facets"] | {"status": 0, "version": 0} == {
        "status": 0, "version": 0, "cause": {"": 4}, "stop": {"finished": 4}, "handler": {"math": 4},
        "agent": {"codex": 4}, "family": {"gsm8k": 4},
    }  # fmt: skip
    assert len((await ask(service, "runs/about", run="learning"))["curve"]["steps"]) == 12


async def test_pages_of_rows_and_of_groups(service):
    first = await ask(service, "runs/rollouts", run="main", limit=10, sort="sampled", descending="true")
    rest = await ask(service, "runs/rollouts", run="main", limit=10, offset=10, sort="sampled", descending="true")
    assert first["total"] == rest["total"] == 17
    sampled = [row["sampled"] for row in [*first["rows"], *rest["rows"]]]
    assert sampled == sorted(sampled, reverse=True)
    groups = await ask(service, "runs/groups", run="main", sort="reward", descending="true", limit=2)
    assert groups["total"] == 5
    assert [each["group"] for each in groups["groups"]] == ["group-2", "group-0"]


async def test_a_rollout_says_who_said_what_and_where_its_tokens_are(service, root):
    found = await ask(service, "runs/rollout", run="main", job="run-0-0")
    trajectory, (own, asked) = found["trajectory"], found["trajectory"]["segments"]
    assert [reward for _, reward in found["siblings"]] == [1.0, 0.0, 1.0, 1.0]
    assert (own["lane"], asked["lane"], asked["reason"], asked["agent"]) == (0, 1, "sub_agent", "checker")
    assert (own["sampled"], asked["sampled"], trajectory["undelivered_tokens"]) == (108, 24, 0)
    assert [turn["dropped_tokens"] for turn in trajectory["turns"]] == [0, 3, 0, 0]
    first, second = trajectory["turns"][:2]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["tool_results"][0]["exit_code"], second["tool_results"][0]["outcome"]) == (0, "error")
    received = await ask(service, "runs/text", run="main", job="run-0-0", part="received.1")
    assert (
        received["text"]
        == f"\n<|im_start|>tool\n{'391' + chr(10)}" + "391\n" * 11 + "<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_tokens_have_their_kinds_texts_and_log_probabilities(service, book):
    outcome = book.index("main").read("run-0-0")
    segment = outcome.trajectory.segments[0]
    windows = [
        await ask(service, "runs/tokens", run="main", job="run-0-0", segment=0, offset=start, limit=100)
        for start in range(0, len(segment), 100)
    ]
    assert [each for window in windows for each in window["ids"]] == segment.token_ids.tolist()
    kinds = "".join(window["kinds"] for window in windows)
    texts = [text for window in windows for text in window["texts"]]
    assert [kind == "s" for kind in kinds] == (segment.loss_mask == 1).tolist()

    def of(kind):
        return "".join(text for text, own in zip(texts, kinds, strict=True) if own == kind)

    assert of("m") == "You solve tasks in a sandbox. Think, call tools, and finish with the answer.What is 17 * 23?"
    assert of("o") == ("391\n" * 12).strip() + "error: no such file: data.txt"
    assert of("t").startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")
    logprobs = [each for window in windows for each in window["logprobs"]]
    assert logprobs == pytest.approx(segment.logprobs.tolist(), abs=1e-4)


async def test_a_character_of_several_tokens_is_shown_once(tmp_path):
    writer = Writer(tmp_path / "model")
    segment, turns = writer.dialogue([], [("né €", None)])
    outcome = writer.outcome("a", "", 1.0, Trajectory(segments=[segment], turns=turns, stop_reason="finished"))
    with closing(RunBook(write_run(tmp_path / "run", [outcome], writer.model))) as book:
        texts = book.rollout(".", "a").decoded(0)[0]
    assert "".join(texts) == "<|im_start|>assistant\nné €<|im_end|>"
    assert "€" in texts
    assert len(texts) == len(segment)


async def test_a_long_text_comes_in_parts(tmp_path):
    writer, output = Writer(tmp_path / "model"), "0123456789" * 1000
    write_run(tmp_path / "run", [writer.hostile("long", output=output)])
    async with runs_view(tmp_path / "run") as served:
        host, port = served.url.removeprefix("http://").split(":")
        service = RestService((host, int(port)), None, trio.CancelScope())
        turn = (await ask(service, "runs/rollout", run=".", job="long"))["trajectory"]["turns"][0]
        (cut,) = turn["observations"]
        assert (cut["text"], cut["chars"]) == (output[:4000], 10_000)
        rest = await ask(service, "runs/text", run=".", job="long", part=cut["part"], offset=4000, limit=6000)
        assert cut["text"] + rest["text"] == output
        tokens = await ask(service, "runs/tokens", run=".", job="long", segment=0, limit=4)
        assert (tokens["texts"], tokens["kinds"]) == (None, "gggg")


def test_a_model_that_is_gone_or_damaged_leaves_the_ids(tmp_path):
    outcome = Writer(tmp_path / "model").rollout("a", "g", 1.0)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    for model in (tmp_path / "gone", tmp_path / "damaged"):
        with closing(RunBook(write_run(tmp_path / f"run {model.name}", [outcome], model))) as book:
            assert book.rollout(".", "a").decoded(0)[0] is None


async def test_an_outcome_is_sent_as_it_was_recorded(service, book):
    sent = msgspec.json.decode(
        msgspec.json.encode(await ask(service, "runs/outcome", run="main", job="run-3-1")), type=Outcome
    )
    assert sent == book.index("main").read("run-3-1")
    assert "(2, b'3')" in str(await ask(service, "runs/outcome", run="hostile", job="second"))


async def test_a_damaged_run_is_an_error_that_names_it_and_the_others_are_shown(tmp_path):
    sound = write_run(tmp_path / "sound", [Writer(tmp_path / "model").rollout("a", "g", 1.0)])
    write_run(tmp_path / "damaged", [])
    (tmp_path / "damaged" / "trajectories.msgpack").write_bytes(b"\xdd\x00\x00\x00\x01\x81\xa1a\x01")
    async with runs_view(tmp_path) as served:
        host, port = served.url.removeprefix("http://").split(":")
        service = RestService((host, int(port)), None, trio.CancelScope())
        assert len((await ask(service, "runs"))["runs"]) == 2
        answer = await service.call("GET", "/v1/runs/about?run=damaged")
        assert (answer.status, "damaged/trajectories.msgpack" in answer.json()["error"]["message"]) == (422, True)
        assert (await ask(service, "runs/about", run=sound.name))["rollouts"] == 1


async def test_a_run_that_was_removed_leaves_the_list_and_the_others_stay(tmp_path):
    outcome = Writer(tmp_path / "model").rollout("a", "g", 1.0)
    for name in ("gone", "kept"):
        write_run(tmp_path / "root" / name, [outcome])
    with closing(RunBook(tmp_path / "root")) as book:
        gone = book.run("gone")
        shutil.rmtree(gone.path)
        assert gone.describe()["changed_s"] == 0.0  # removed after it was found
        assert [run.run_id for run in book.runs()] == ["kept"]


def test_a_run_that_is_cut_off_while_it_is_shown_is_an_error_that_names_it(tmp_path):
    run = write_run(tmp_path / "run", [Writer(tmp_path / "model").rollout("a", "g", 1.0)])
    with closing(RunBook(run)) as book:
        assert len(book.index(".").rows) == 1
        os.truncate(run / "trajectories.msgpack", 100)
        with pytest.raises(ConfigError, match=r"run/trajectories\.msgpack: the outcome at byte 5"):
            book.index(".").read("a")


@pytest.mark.parametrize("curve", [{"steps": 5}, {"steps": [1]}, {"evaluations": {"a": 1}}])
def test_a_curve_of_another_program_is_none(tmp_path, curve):
    run = write_run(tmp_path / "run", [])
    (run / "curve.json").write_bytes(msgspec.json.encode(curve))
    with closing(RunBook(run)) as book:
        assert (book.run(".").about()["curve"], book.run(".").describe()["kind"]) == ({}, "run")


def test_a_folder_whose_name_is_no_utf8_is_shown(tmp_path):
    write_run(tmp_path / "x", []).rename(tmp_path / os.fsdecode(b"x\xff"))
    with closing(RunBook(tmp_path)) as book:
        assert [run["about"]["name"] for run in exported(export_html(book))[3]["runs"]] == ["x\\xff"]


def test_nobody_waits_for_a_pipe(tmp_path):
    for name in ("trajectories.msgpack", "run.json", "curve.json"):
        os.mkfifo(tmp_path / name)
    with closing(RunBook(tmp_path)) as book:
        assert book.run(".").describe()["rollouts"] == 0
        with pytest.raises(OSError, match="not a regular file"):
            book.index(".")


def test_what_a_policy_nested_too_deeply_hides_nothing_else(tmp_path):
    nested: object = 0
    for _ in range(700):
        nested = [nested]
    outcome = msgspec.structs.replace(Writer(tmp_path / "model").rollout("a", "g", 1.0), details={"checks": nested})
    with closing(RunBook(write_run(tmp_path / "run", [outcome]))) as book:
        assert book.rollout(".", "a").about["details"] == "(nested too deeply to be shown)"
        assert len(exported(export_html(book))[3]["runs"][0]["rollouts"]) == 1


def test_a_search_looks_into_what_is_nested_deeply():
    nested: object = "needle"
    for _ in range(5000):
        nested = {"x": (nested,)}
    assert list(_scalars({"found": nested, "other": 1}))[-1] == "found"
    assert "needle" in _scalars(nested)


# ---------------------------------------------------------------- who is refused


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("runs/about?run=nowhere", 404),
        ("runs/about?run=../viewed", 404),
        ("runs/about?run=%2Fetc", 404),
        ("runs/about", 404),
        ("runs/rollout?run=main&job=nobody", 404),
        ("runs/rollout?run=learning&job=run-0-0", 404),
        ("runs/text?run=main&job=run-0-0&part=received.99", 404),
        (f"runs/text?run=main&job=run-0-0&part=received.{'9' * 5000}", 404),
        ("runs/text?run=main&job=run-0-0&part=..%2F..%2Frun.json", 404),
        ("runs/tokens?run=main&job=run-0-0&segment=7", 404),
        ("runs/tokens?run=main&job=run-lost&segment=0", 404),
        ("runs/tokens?run=main&job=run-0-0&segment=-1", 422),
        ("runs/rollouts?run=main&sort=constructor", 422),
        ("runs/rollouts?run=main&limit=10000000", 422),
        ("status", 404),
    ],
)
async def test_what_is_not_there_or_not_understood_is_said(service, path, status):
    answer = await service.call("GET", f"/v1/{path}")
    assert answer.status == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs/about?run=main", "/v1/runs/outcome?run=main&job=run-0-0"])
async def test_nothing_recorded_is_shown_without_the_token(service, path):
    for token in ("", "Bearer wrong"):
        assert (await service.call("GET", path, headers={"Authorization": token})).status == 401
    foreign = {"Authorization": "", "Host": "evil.example"}
    assert (await service.call("GET", path, headers=foreign)).status == 403


@pytest.mark.parametrize("path", ["/ui", "/", "/ui/main.js", "/ui/style.css"])
async def test_the_page_is_free_at_an_address_of_this_machine_alone(service, path):
    answer = await service.call("GET", path, headers={"Authorization": ""})
    assert answer.status == 200
    assert TOKEN.encode() not in answer.body
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= answer.headers.items()
    for foreign in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await service.call("GET", path, headers={"Authorization": "", **foreign})).status == 403


@pytest.mark.parametrize("path", ["/ui/../pages.py", "/ui/%2e%2e/pages.py", "/ui/index.html", "/ui/", "/ui/main.js/"])
async def test_no_other_file_is_served(service, path):
    assert (await service.call("GET", path)).status == 404


async def test_a_websocket_finds_nobody_there(service):
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    async with await service.open_stream() as stream:
        await service.send(stream, "GET", "/", headers=upgrade)
        with trio.fail_after(5):
            assert await stream.receive_some() == b""


async def test_a_node_serves_the_same_page_without_anything_recorded():
    async with open_rest(FakeNode()) as rest:
        page = await rest.call("GET", "/ui", headers={"Authorization": ""})
        assert (page.status, b'data-source="node"' in page.body) == (200, True)
        assert (await rest.call("GET", "/ui/live.js", headers={"Authorization": ""})).status == 200
        assert (await rest.call("GET", "/v1/runs")).status == 404
        described = (await rest.call("GET", "/openapi.json")).json()["paths"]
        assert [path for path in described if path.startswith("/ui")] == ["/ui"]


async def test_a_fleets_head_serves_it_with_the_state_of_its_members(tmp_path):
    (tmp_path / "fleet").mkdir(mode=0o700)
    async with open_fake_fleet(tmp_path / "fleet", "a"), open_head(tmp_path / "fleet", "a") as head:
        host, port = head.url.removeprefix("ws://").split(":")
        service = RestService((host, int(port)), None, trio.CancelScope())
        page = await service.call("GET", "/ui", headers={"Authorization": ""})
        assert (page.status, b'data-source="node"' in page.body) == (200, True)
        status = await service.call("GET", "/v1/status", headers={"Authorization": f"Bearer {FLEET_TOKEN}"})
        member = status.json()["node"]["members"]["a"]
        assert (member["connected"], member["host"], member["held_jobs"]) == (True, "h1", 0)


# ---------------------------------------------------------------- the page's own files


def test_the_policy_allows_nothing_but_the_pages_own_files():
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
        "frame-ancestors": "'none'", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip


def test_scripts_make_texts_only_as_text_nodes():
    static = Path(__file__).parents[2] / "prorl_trio" / "edges" / "viewer" / "static"
    assert {path.name for path in static.glob("*.js")} == set(MODULES)
    for path in static.glob("*.js"):
        source = path.read_text()
        for banned in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "Function(",
            'setTimeout("',
            "srcdoc",
        ):
            assert banned not in source, (path.name, banned)
        assert not re.search(r"https?://(?!www\.w3\.org/)", source), path.name
    page = (static / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=", page)


# ---------------------------------------------------------------- the exported file


def exported(content):
    page = content.decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return page, policy, script, msgspec.json.decode(data)


def test_an_exported_file_runs_its_own_script_alone(book):
    page, policy, script, data = exported(export_html(book))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.count("<script") == 2
    assert [run["about"]["run"] for run in data["runs"]] == ["evaluation", "hostile", "learning", "main"]
    hostile = next(run for run in data["runs"] if run["about"]["run"] == "hostile")
    assert hostile["rollouts"][0]["job_id"] == HOSTILE


def test_an_exported_file_has_the_tokens_that_were_recorded(book):
    _, _, _, data = exported(export_html(book, ["run-0-0"]))
    (run,) = data["runs"]
    (rollout,) = run["rollouts"]
    segment = book.index("main").read("run-0-0").trajectory.segments[0]
    packed = rollout["tokens"][0]
    assert base64.b64decode(packed["ids"]) == segment.token_ids.tobytes()
    assert base64.b64decode(packed["logprobs"]) == segment.logprobs[segment.loss_mask == 1].tobytes()
    assert sum(count for _, count in packed["kinds"]) == len(segment)
    assert data["vocabulary"][str(segment.token_ids[0])] == "<|im_start|>"


def test_an_exported_file_is_smaller_than_twice_its_data(tmp_path):
    writer = Writer(tmp_path / "model")
    outcomes = [writer.long(f"long {n}", 40_000) for n in range(3)] + [
        writer.rollout(f"r{n}", "g", 1.0) for n in range(50)
    ]
    folder = write_run(tmp_path / "run", outcomes, writer.model)
    size = (folder / "trajectories.msgpack").stat().st_size
    with closing(RunBook(folder)) as book:
        assert len(export_html(book)) < 2 * size


def test_a_rollout_that_is_not_there_is_named(book):
    with pytest.raises(ConfigError, match="nobody"):
        export_html(book, ["run-0-0", "nobody"])


# ---------------------------------------------------------------- the command


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no recorded run"):
        RunBook(tmp_path)


def test_a_model_that_is_asked_for_must_be_there(root, tmp_path):
    with pytest.raises(ConfigError, match="misspelt has no tokenizer"):
        RunBook(root, tmp_path / "misspelt")


def test_a_tree_of_more_runs_is_searched_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_book, "MAX_RUNS", 2)
    for name in "abc":
        write_run(tmp_path / name, [])
    assert [run.run_id for run in RunBook(tmp_path).runs()] == ["a", "b"]


def test_a_run_that_comes_later_is_found(tmp_path):
    book = RunBook(write_learning(tmp_path))
    with pytest.raises(UnknownJob):
        book.run("later")
    write_run(tmp_path / "later", [])
    assert [run.run_id for run in book.runs()] == [".", "later"]


async def test_the_command_prints_its_address_and_ends_at_an_interrupt(root):
    command = [sys.executable, "-m", "prorl_trio.cli", "view", str(root)]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            start = partial(trio.run_process, command, stdout=subprocess.PIPE, check=False)
            process = await nursery.start(start)
            printed = b""
            while printed.count(b"\n") < 2:
                printed += await process.stdout.receive_some()
            url, token = printed.decode().split()[-1].split("/ui#token=")
            host, port = url.removeprefix("http://").split(":")
            service = RestService((host, int(port)), None, trio.CancelScope())
            answer = await service.call("GET", "/v1/runs", headers={"Authorization": f"Bearer {token}"})
            assert (host, answer.status, len(answer.json()["runs"])) == ("127.0.0.1", 200, 4)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0


def test_the_command_exports_what_is_asked_for(root, tmp_path):
    target = tmp_path / "one.html"
    command = [
        sys.executable,
        "-m",
        "prorl_trio.cli",
        "view",
        str(root),
        "--export",
        str(target),
        "--rollout",
        "run-1-3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "one.html" in done.stdout) == (0, True), done.stderr
    (run,) = exported(target.read_bytes())[3]["runs"]
    assert [row["job_id"] for row in run["rows"]] == ["run-1-3"]


def test_the_command_may_open_as_many_runs_as_it_is_given(root, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        view.callback(root, False, "127.0.0.1", 0, None, tmp_path / "all.html", ())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
