"""`GET /v1/statistics` and its series, from the file of a registrar."""

import os

import httpx
import pytest

from frontends import serving
from noria.config import Config
from noria.testing.fake_engine import FakeEngine
from sample_statistics import NUM_WINDOWS, VERSION, WINDOW_S, write_sample_statistics

SERIES = {"endpoint": "t2i", "version": VERSION, "variable": "prompt_words"}


@pytest.fixture(scope="module")
def engine(folder):
    with FakeEngine(f"ipc://{folder}/statistics-routes") as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def web(engine, data):
    with serving(Config(data_dir=str(data)), engine) as (url, _), httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def counted(data):
    write_sample_statistics(data)
    yield data / "statistics.json"
    (data / "statistics.json").unlink(missing_ok=True)


def test_nothing_is_counted_at_first(web):
    assert web.get("/v1/statistics").json()["data"] == []
    response = web.get("/v1/statistics/series", params=SERIES)
    assert (response.status_code, response.json()["error"]["param"]) == (409, "endpoint")


def test_all_series_have_their_drift(web, counted):
    listed = web.get("/v1/statistics").json()
    assert (listed["window_s"], listed["current_windows"], listed["psi_threshold"]) == (WINDOW_S, 12, 0.1)
    found = {each["variable"]: each for each in listed["data"]}
    assert found["prompt_words"]["num_values"] == 720
    assert found["prompt_words"]["mean"] == pytest.approx(15, abs=0.5)
    assert found["prompt_words"]["drift"]["psi"] > 0.5
    assert found["prompt_words"]["reference"] == {
        "version": VERSION,
        "num_values": 5000,
        "at": 1_790_000_000.0,
        "by": "ada",
        "why": "a good day",
    }
    assert abs(found["scheduler"]["drift"]["psi"]) < 0.1
    assert (found["scheduler"]["most_frequent"], found["scheduler"]["mean"]) == ("ddim", None)
    assert (found["image_entropy"]["drift"], found["image_entropy"]["reference"]) == (None, None)
    assert (found["price"]["num_values"], found["price"]["mean"]) == (30, pytest.approx(4.25))


def test_a_series_has_its_distributions_and_its_drift_over_time(web, counted):
    detail = web.get("/v1/statistics/series", params=SERIES).json()
    assert detail["cells"][:2] == ["1", "2"] and detail["cells"][-1] == "+Inf"
    assert len(detail["cells"]) == len(detail["current"]) == len(detail["reference"])
    assert (sum(detail["current"]), sum(detail["reference"])) == (720, 5000)
    windows = detail["windows"]
    assert [windows[1]["start"] - windows[0]["start"], len(windows)] == [WINDOW_S, NUM_WINDOWS]
    psi = [each["psi"] for each in windows]
    assert psi[2] is None and abs(psi[20]) < 0.1 and psi[-1] > 0.5
    categories = web.get("/v1/statistics/series", params=SERIES | {"variable": "scheduler"}).json()
    assert categories["cells"] == ["ddim", "euler", "dpm++2m", "other"]
    assert categories["current"][-1] == 0


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"variable": "prompt"}, "variable", "there are image_brightness, image_entropy"),
        ({"version": "x" * 1000}, "version", "there are shapes@1"),
        ({"endpoint": ""}, "endpoint", "there are shop, t2i"),
        ({"variable": None}, "variable", "variable is missing; the query has endpoint, version, variable"),
    ],
)
def test_a_series_that_is_not_there_is_an_error_that_names_those_that_are(web, counted, change, param, says):
    query = {name: value for name, value in (SERIES | change).items() if value is not None}
    error = web.get("/v1/statistics/series", params=query).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_field" if "missing" in says else "registry_conflict")
    assert says in error["message"]


def test_a_new_file_is_read_and_a_damaged_one_is_an_error_until_it_is_written_again(web, counted):
    content = counted.read_bytes()
    counted.write_bytes(content[:100])
    os.utime(counted, ns=(1, 1))
    response = web.get("/v1/statistics")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "registry_unavailable")
    counted.write_bytes(content)
    assert len(web.get("/v1/statistics").json()["data"]) == 7
