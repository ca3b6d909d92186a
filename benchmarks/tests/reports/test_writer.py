"""Whole reports, from stored runs."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from synthetic_runs import record, run

from noria_bench.errors import RunsError
from noria_bench.measurement import runs as bench_runs
from noria_bench.measurement.runs import ImageCheck
from noria_bench.reports.writer import main, read_runs, write_report

NASTY = "<script>alert(1)</script>\"'&|`$x^2$"


class Page(HTMLParser):
    """Collects the tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_a_report_is_markdown_a_page_and_plots(tmp_path):
    files = write_report(tmp_path, [run(), run("reference-batched"), run("ray")])
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "report.md",
        "report.html",
        "plots/scenario2-throughput.svg",
        "plots/scenario2-latency.svg",
        "plots/scenario2-timeline.svg",
    ]
    for file in files[2:]:
        assert ET.parse(file).getroot().tag.endswith("svg")
        assert f"](plots/{file.name})" in files[0].read_text(encoding="utf-8")


def test_the_same_runs_make_the_same_files(tmp_path):
    runs = [run(), run("ray", [record(k, 0.3 * k) for k in range(9)])]
    first, second = write_report(tmp_path / "a", runs), write_report(tmp_path / "b", runs)
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_text_from_runs_is_never_markup(tmp_path):
    checks = (ImageCheck(0, 3.0, NASTY),)
    named = run(
        NASTY,
        variant=NASTY,
        settings={NASTY: NASTY},
        model={"name": NASTY},
        image_checks=checks,
        provenance={"command": NASTY, "machine": {"cpu": NASTY}},
    )
    markdown, page, *pictures = write_report(tmp_path, [named])
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<script" not in markdown.read_text(encoding="utf-8")
    tags = Page(text).tags
    assert not [tag for tag, _ in tags if tag in ("script", "iframe", "object", "embed", "link", "img")]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    for picture in pictures:
        ET.parse(picture)


def test_a_name_cannot_end_the_alternative_text_of_a_plot(tmp_path):
    report = write_report(tmp_path, [run("](http://example.org/) ![")])[0].read_text(encoding="utf-8")
    assert set(re.findall(r"(?<!\\)\]\(([^)]*)\)", report)) == {
        f"plots/scenario2-{kind}.svg" for kind in ("throughput", "latency", "timeline")
    }


def test_the_page_is_self_contained(tmp_path):
    page = write_report(tmp_path, [run(), run("ray")])[1].read_text(encoding="utf-8")
    tags = Page(page).tags
    links = [
        value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "xlink:href")
    ]
    assert links and all(link.startswith(("#", "data:application/json;base64,")) for link in links)
    assert "@import" not in page
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    targets = [link[1:] for link in links if link.startswith("#")] + re.findall(r"url\(#([^)]+)\)", page)
    assert set(targets) <= set(ids)
    assert len(ids) == len(set(ids))


def test_every_table_and_plot_is_accessible(tmp_path):
    tags = Page(write_report(tmp_path, [run(), run("ray")])[1].read_text(encoding="utf-8")).tags
    assert ("html", {"lang": "en"}) in tags
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in tags if tag == "th")
    pictures = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(pictures) == 3 and all(each["role"] == "img" and each["aria-label"] for each in pictures)


def test_the_raw_summaries_can_be_downloaded(tmp_path):
    page = write_report(tmp_path, [run(records=[record(0, status=500)], settings={"slots": 8})])[1].read_text(
        encoding="utf-8"
    )
    coded = re.search(r'download="summaries.json" href="data:application/json;base64,([^"]+)"', page)
    (found,) = json.loads(base64.b64decode(coded[1]))
    assert found["summary"]["p50_ms"] is None  # infinite
    assert (found["target"], found["summary"]["num_http_failures"], found["settings"]) == ("noria", 1, {"slots": 8})


def test_an_interrupted_run_is_marked(tmp_path):
    files = write_report(tmp_path, [run(complete=False, records=[record(0), record(1, answered=False)]), run("ray")])
    for file in files[:2]:
        text = file.read_text(encoding="utf-8")
        assert "Interrupted, so that rates and quantiles cover a shorter time: noria." in text
        assert "noria (interrupted)" in text


def test_shared_settings_are_printed_once(tmp_path):
    runs = [run(settings={"slots": 8, "dtype": "float32"}), run("ray", settings={"dtype": "float32", "max_images": 8})]
    report = write_report(tmp_path, runs)[0].read_text(encoding="utf-8")
    assert report.endswith('### Settings\n\n- All: dtype "float32"\n- noria: slots 8\n- ray: max_images 8\n')


def test_incorrect_images_are_a_warning(tmp_path):
    report = write_report(tmp_path, [run(image_checks=(ImageCheck(0, 9.0, "psnr 9.0 dB"), ImageCheck(1, None)))])[0]
    assert "**noria: 1 of 2 checked images are incorrect: psnr 9.0 dB**" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("records", [(), tuple(record(k, status=500) for k in range(3))], ids=["none", "all failed"])
def test_runs_without_images_have_a_report(tmp_path, records):
    sweeps = [run(records=records, bench="sweep-batching", variant=name) for name in ("250 ms, 8", "500 ms, 4")]
    files = write_report(tmp_path, [run(records=records), run("ray", records), *sweeps])
    assert len(files) == 7


def test_a_sweep_of_two_numbers_has_a_heat_map_even_if_its_grid_is_partial(tmp_path):
    pairs = ("250 ms, 8", "500 ms, 8", "500 ms, 16")
    files = write_report(tmp_path, [run("reference-batched", bench="sweep-batching", variant=name) for name in pairs])
    assert [file.name for file in files[2:]] == ["sweep-batching-heat-map.svg", "sweep-batching-bars.svg"]
    assert files[2].read_text(encoding="utf-8").count("<!-- not run -->") == 1 + 4  # ours, and the article's


def test_a_sweep_of_other_settings_has_bars(tmp_path):
    files = write_report(
        tmp_path, [run("reference-batched", bench="sweep-attention", variant=name) for name in ("plain", "sliced")]
    )
    assert [file.name for file in files[2:]] == ["sweep-attention-bars.svg"]


def test_the_command_reports_a_folder_of_folders(tmp_path, capsys):
    bench_runs.write_run(run(), tmp_path / "scenario2")
    bench_runs.write_run(run("reference-batched", bench="sweep-batching", variant="500 ms, 8"), tmp_path / "batching")
    assert main(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "## Scenario 2" in printed and "## Sweep: batching" in printed
    assert (tmp_path / "report.html").exists()
    assert main(tmp_path) == 0  # its own output does not interfere


def test_a_folder_that_is_missing_or_without_runs_is_named(tmp_path):
    with pytest.raises(RunsError, match="nowhere is not a folder"):
        main(tmp_path / "nowhere")
    with pytest.raises(RunsError, match="holds no runs"):
        read_runs(tmp_path)


@pytest.mark.parametrize("content", ["{}", "no json", '{"bench": 1}'])
def test_a_file_that_is_not_a_run_is_named(tmp_path, content):
    bench_runs.write_run(run(), tmp_path)
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(RunsError, match=r"other\.json is not a run"):
        read_runs(tmp_path)
