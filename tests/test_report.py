"""Results survive their files, files survive failures, and pages survive hostile text."""

import dataclasses
import errno
import json
import math
import os
import re
import stat
from html.parser import HTMLParser

import jsonschema
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fake_reports import HOSTILE, hostile_example, make_report, make_scores, role_info

from headlab.errors import OutputError
from headlab.report import CAUSAL_COLUMNS, Report, environment, files, schema, write_file
from headlab.report.html import SCRIPTS, STYLES, render
from headlab.report.page import page
from headlab.report.payload import condensed, payload, script_json, shown_examples
from headlab.report.scale import STEPS, Scale, count, duration, small
from headlab.roles.scores import COLUMNS, Example, Scores

NAN = float("nan")


@pytest.fixture(scope="module")
def report():
    return make_report(10, 4, 3, kv=2, top=3, each=2)


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "out"
    report.write(path)
    return path


# Files


def test_a_report_survives_its_files(report, folder):
    again = Report.read(folder)
    pd.testing.assert_frame_equal(again.scores.frame, report.scores.frame)
    pd.testing.assert_frame_equal(again.causal, report.causal)
    assert again.scores.roles == report.scores.roles
    assert again.examples == report.examples
    assert again.model == report.model
    assert again.checks == report.checks
    assert again.warnings == report.warnings
    assert again.reproducibility == report.reproducibility
    assert again.to_html() == report.to_html()
    assert again.to_dict() == report.to_dict()
    assert not list(folder.glob(".*")), "temporary files stay behind"


def test_report_json_is_strict_small_and_obeys_its_published_schema(report, folder):
    text = (folder / "report.json").read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(data, schema())
    assert len(data["roles"][0]["top"]) == 10
    assert data["roles"][1]["claimed"] == report.scores.claimed("induction")


def test_schema_and_code_name_the_same_fields(report):
    published = schema()
    for name, value in (
        ("model", report.model),
        ("role", report.to_dict()["roles"][0]),
        ("ablation", dict.fromkeys(CAUSAL_COLUMNS)),
        ("score", dict.fromkeys(column for column in COLUMNS if column != "role")),
    ):
        part = published["$defs"][name]
        keys = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        assert set(part["properties"]) == set(part["required"]) == set(keys), name
    assert set(published["required"]) == {*report.to_dict(), "files"}
    info = published["$defs"]["role"]["properties"]["info"]
    assert set(info["required"]) == set(dataclasses.asdict(report.scores.roles[0]))


def test_parquet_files_say_what_they_belong_to(report, folder):
    metadata = pq.read_schema(folder / "scores.parquet").metadata
    assert metadata[b"headlab.schema_version"] == b"2.0"
    assert metadata[b"headlab.model_fingerprint"] == report.model.fingerprint.encode()
    assert tuple(pd.read_parquet(folder / "scores.parquet").columns) == COLUMNS
    assert len(pd.read_parquet(folder / "examples.parquet")) == len(report.examples)


def test_details_overlap_and_stability_are_kept(report, folder):
    again = Report.read(folder)
    pd.testing.assert_frame_equal(again.scores.details, report.scores.details)
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    one, other = report.scores.names[:2]
    claimed = {name: set(report.scores.claimed(name)) for name in (one, other)}
    assert data["overlap"][one][other] == len(claimed[one] & claimed[other])
    assert data["overlap"][one][one] == len(claimed[one])
    assert [row["role"] for row in data["stability"]] == list(report.scores.names)
    # Halves that differ by a constant of each head rank the heads alike.
    assert data["stability"][0]["rank_correlation"] > 0.9


def test_a_bare_report_round_trips(tmp_path):
    full = make_report(2, 2, 1, claims=False)
    bare = Report(full.model, full.scores)
    paths = bare.write(tmp_path / "new" / "folder")
    assert set(paths) == {
        "scores.parquet",
        "details.parquet",
        "examples.parquet",
        "report.html",
        "report.json",
    }
    again = Report.read(tmp_path / "new" / "folder")
    assert again.examples == ()
    assert again.causal is None
    empty = dataclasses.replace(bare, scores=Scores(full.scores.frame.head(0), 0.05, ()))
    empty.write(tmp_path / "empty")
    assert Report.read(tmp_path / "empty").scores.frame.empty


def test_odd_values_become_plain_json(tmp_path, report):
    odd = dataclasses.replace(
        report,
        checks={"nan": NAN, "numpy": np.float32(0.5), "flag": np.True_},
        reproducibility={"path": tmp_path, "set": {2, 1}, "array": np.arange(2), "inf": math.inf},
    )
    data = json.loads(files.dump_json(odd.to_dict()), parse_constant=pytest.fail)
    assert data["checks"] == {"nan": None, "numpy": 0.5, "flag": True}
    assert data["reproducibility"] == {
        "path": str(tmp_path),
        "set": [1, 2],
        "array": [0, 1],
        "inf": None,
    }
    odd.to_html()


def test_a_full_disk_leaves_the_earlier_report_whole(report, tmp_path, monkeypatch):
    report.write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    other = dataclasses.replace(report, warnings=("changed",))
    with pytest.raises(OutputError, match="no space left on device; choose a folder") as caught:
        other.write(tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interrupt_leaves_no_partial_file(report, tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*file"):
        write_file(tmp_path / "file" / "below.txt", "y")
    with pytest.raises(OutputError, match="it is a folder"):
        write_file(tmp_path / "folder", "y")


def test_written_files_have_the_users_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    path = write_file(tmp_path / "ours.txt", "ä\ud800")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert path.read_text(encoding="utf-8") == "ä\\ud800"


def test_damaged_mixed_and_newer_folders_are_refused(report, tmp_path):
    with pytest.raises(OutputError, match="give the folder a report was written to"):
        Report.read(tmp_path)
    report.write(tmp_path)
    path = tmp_path / "report.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:100], encoding="utf-8")
    with pytest.raises(OutputError, match="not a report headlab can read"):
        Report.read(tmp_path)
    path.write_text(
        text.replace('"schema_version": "2.0"', '"schema_version": "3.0"'), encoding="utf-8"
    )
    with pytest.raises(OutputError, match=r"schema version 3\.0"):
        Report.read(tmp_path)
    path.write_text(text, encoding="utf-8")
    make_report(2, 2, 1).write(tmp_path / "other")
    (tmp_path / "scores.parquet").write_bytes((tmp_path / "other" / "scores.parquet").read_bytes())
    with pytest.raises(OutputError, match=r"not the file its report\.json describes"):
        Report.read(tmp_path)


def test_causal_frames_must_have_every_column(report):
    with pytest.raises(OutputError, match="causal frame lacks note"):
        dataclasses.replace(report, causal=report.causal.drop(columns="note"))


def test_environment_names_versions_and_no_folder_of_the_program():
    block = environment(["/some/where/bin/headlab", "report", "a b"])
    assert block["command"] == "headlab report 'a b'"
    assert {"headlab", "torch", "transformers", "numpy", "python", "platform", "date"} <= set(block)


# Page


def test_the_page_needs_nothing_but_itself(report):
    html = report.to_html()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert "default-src &#39;none&#39;" in policy or "default-src 'none'" in policy
    assert "unsafe" not in policy
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))
    parser.feed(html)
    for tag, attributes in tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "form", "base"}
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
        assert "src" not in attributes
    assert [tag for tag, _ in tags].count("script") == 2


def test_assets_cannot_end_their_own_element():
    from headlab.report.html import _asset

    for name in (*STYLES, *SCRIPTS):
        text = _asset(name)
        assert "</" not in text
        assert "<!--" not in text
        assert "innerHTML" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_hostile_text_stays_text_everywhere():
    evil = "</script><img src=x onerror=alert(1)>\u202e\u2028"
    base = make_report(2, 2, 1)
    first = base.scores.ranked("previous_token").iloc[0]
    info = role_info("previous_token", evil, evil, statistic=evil, reference=evil)
    frame = base.scores.frame.assign(note=evil)
    report = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, name=evil, family=evil, device=evil),
        scores=Scores(frame, 0.05, (info,)),
        examples=(hostile_example("previous_token", int(first["layer"]), int(first["head"])),),
        checks={evil: evil},
        warnings=(evil,),
        reproducibility={evil: evil, "command": evil, "configuration": {evil: [evil]}},
        causal=base.causal.assign(role=evil, heads=evil, metric=evil, note=evil),
    )
    html = report.to_html()
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html
    assert "\u2028" not in html
    assert "\x00" not in html
    assert "<img" not in report._repr_html_()


def test_script_data_cannot_leave_its_element():
    text = script_json({"tokens": list(HOSTILE)})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["tokens"] == list(HOSTILE)


def test_the_static_page_tells_the_story(report):
    html = report.to_html()
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.S)
    claimed = report.scores.frame[report.scores.frame["claimed"]]
    heads = len(claimed[["layer", "head"]].drop_duplicates())
    assert f"<strong>{heads}</strong> of 40 heads are claimed for at least one of 3 roles." in text
    assert "Showing 10 of 40 heads; all are in scores.parquet." in text
    for part in (report.warnings[0], "not measurable", "Olsson et al. 2022", "3 min 12 s"):
        assert part in text
    for label in report.scores.claimed("induction"):
        assert f'<th scope="row">{label}</th>' in text
    none = dataclasses.replace(report, scores=make_scores(10, 4, 3, claims=False))
    assert "No head of 40 is claimed for any of 3 roles." in none.to_html()


def test_the_page_counts_what_it_leaves_out(report):
    many = tuple(dataclasses.replace(example, value=0.1) for example in report.examples * 5)
    full = dataclasses.replace(report, examples=many)
    shown = shown_examples(full)
    assert len(shown) < len(many)
    assert f"{len(shown)} of {len(many)} kept" in full.to_html()
    kinds = [example.kind for example in shown if example.label == shown[0].label]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"high": 3, "median": 3, "random": 3}


def test_payload_numbers_follow_the_scores(report):
    frame = report.scores.frame
    scales = {i.name: Scale.of(frame[frame["role"] == i.name], i) for i in report.scores.roles}
    data = payload(report, scales, shown_examples(report))
    for role in data["roles"]:
        rows = frame[frame["role"] == role["name"]].set_index(["layer", "head"])
        for position, pair in enumerate(data["heads"]):
            row = rows.loc[tuple(pair)]
            if math.isnan(row["score"]):
                assert role["score"][position] is None
            else:
                assert role["score"][position] == pytest.approx(row["score"], rel=1e-4)
            assert role["claimed"][position] == int(row["claimed"])
        top = data["heads"][role["order"][0]]
        ranked = report.scores.ranked(role["name"]).iloc[0]
        assert top == [ranked["layer"], ranked["head"]]
    example = data["examples"][1]
    assert sum(example["weights"]) == pytest.approx(10_000, abs=50)
    assert page(report, scales, ())["n_heads"] == 40


def test_long_examples_keep_their_ends_and_their_strongest_keys():
    length, peak, query = 3000, 1500, 2500
    weights = [0.0] * (query + 1)
    weights[peak], weights[0] = 0.6, 0.4
    example = Example("a", 0, 0, "high", ("t",) * length, query, tuple(weights), 0.6)
    spans = condensed(example)
    kept = {position for start, stop in spans for position in range(start, stop)}
    assert {0, peak, query} <= kept
    assert len(kept) < 400
    assert spans == sorted(spans)


def test_the_page_stays_within_its_budget_at_32_by_32_by_10():
    report = make_report(32, 32, 10, kv=8, top=8, each=3, length=128)
    size = len(render(report).encode())
    assert size < 3_000_000, f"report.html is {size:,} bytes"
    assert len(files.dump_json(report.to_dict())) < 200_000
    assert len(report._repr_html_()) < 200_000


def test_scales_keep_noise_pale_and_survive_missing_numbers():
    info = role_info("a", "A", "?", min_score=0.2, min_effect=0.1)
    numbers = {"score": 0.03, "ci_low": 0.02, "ci_high": 0.04, "null_mean": 0.01, "effect": 0.02}
    noise = pd.DataFrame([numbers])
    scale = Scale.of(noise, info)
    assert abs(scale.step(0.02)) <= 1
    assert scale.step(99.0) == STEPS
    assert scale.step(-99.0) == -STEPS
    empty = Scale.of(noise.head(0), dataclasses.replace(info, min_score=NAN, min_effect=NAN))
    assert (empty.low, empty.high, empty.effect) == (0.0, 1.0, 1.0)
    assert scale.text(NAN) == "–"
    assert scale.text(-0.5) == "−0.500"


def test_numbers_read_well():
    assert [small(value) for value in (0.0, 1e-5, 0.25, NAN)] == ["0.000", "1.0e−5", "0.250", "–"]
    assert [duration(value) for value in (8.24, 192.4, 7500)] == [
        "8.2 s",
        "3 min 12 s",
        "2 h 5 min",
    ]
    assert [count(value) for value in (999, 134_515_008, 8_030_000_000)] == [
        "999",
        "135 M",
        "8.03 B",
    ]
