"""The pages /models, /deployments and /lineage in front of a registry with a month of history."""

import io
import itertools
import re
import shutil
import time

import msgspec
import pytest
from expect_on_page import expect
from PIL import Image

import sample_registry
from frontends import folder, serving  # noqa: F401 - a fixture
from noria.canary.judge import JudgeSettings
from noria.canary.shadow import ShadowCounts, ShadowPlan, ShadowState
from noria.config import Config, FrontendConfig, RegistryConfig
from noria.frontend.access.api_keys import generate_key
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import save_options
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.openlineage import parse_event
from noria.registry.lineage.store import LineageStore
from noria.registry.schema import open_registry
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from sample_registry import HOSTILE, model_folder
from waiting import wait_until_ready

pytestmark = pytest.mark.browser

PAGES = {
    "/models": "Versions of shapes",
    "/deployments#t2i": "Changes, the latest first",
    "/lineage?of=shapes@3": "Graph",
}
"""Each page, and a region that it has when it has loaded."""
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A data folder with a registry."""
    home = tmp_path_factory.mktemp("registry")
    engine = open_registry(Config(data_dir=str(home)))
    sample_registry.fill(engine, time.time())
    engine.dispose()
    return home


@pytest.fixture(scope="module")
def fake(filled, folder):  # noqa: F811 - a fixture
    """An engine with a model of the configuration and the versions that t2i has."""
    engine = open_registry(Config(data_dir=str(filled)))
    routes = DeploymentStore(engine).routes()
    engine.dispose()
    route = routes.find("t2i")
    fingerprints = (route.control.fingerprint, route.canary.fingerprint)
    deployed = [msgspec.structs.replace(FAKE_MODEL, name="t2i", fingerprint=each) for each in fingerprints]
    with FakeEngine(f"ipc://{folder}/pages", models=(FAKE_MODEL, *deployed)) as running:
        running.routes = routes
        yield running


@pytest.fixture(scope="module")
def url(filled, fake):
    """The address of a server with the registry, which no test changes."""
    with serving(Config(data_dir=str(filled)), fake, routes=fake.routes) as (address, _):
        wait_until_ready(address)
        yield address


@pytest.fixture
def own(filled, fake, tmp_path):
    """Start a server with a registry of its own: `own(**settings of the front end)`; its address and deployments."""
    running = []

    def start(**settings):
        shutil.copytree(filled, tmp_path / "data")
        config = Config(data_dir=str(tmp_path / "data"), frontend=FrontendConfig(**settings))
        engine = open_registry(config)
        context = serving(config, fake, routes=fake.routes)
        running.append((context, engine))
        return context.__enter__()[0], engine

    yield start
    for context, engine in running:
        context.__exit__(None, None, None)
        engine.dispose()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_pages_are_accessible_and_show_hostile_texts_as_text(url, open_page, check_accessibility, path, scheme):
    page = open_page(f"{url}{path}", color_scheme=scheme)
    expect(page.get_by_role("region", name=PAGES[path]).first).to_be_visible()
    expect(page.locator("#page-status")).to_have_class(re.compile("good"))
    for details in page.locator("details").all():
        details.click()
    check_accessibility(page)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_on_a_narrow_screen(url, open_page, check_accessibility, path):
    page = open_page(f"{url}{path}", viewport=NARROW)
    expect(page.get_by_role("region", name=PAGES[path]).first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    check_accessibility(page)


def test_pages_work_below_a_path_of_a_proxy(url, open_page):
    """Chromium asks for what is below /path/, and gets what the server has without it, as through a proxy."""
    page, outside = open_page("about:blank"), []

    def strip_path(route):
        if not route.request.url.startswith(f"{url}/path/"):
            outside.append(route.request.url)
        route.continue_(url=route.request.url.replace("/path/", "/", 1))

    page.route("**/*", strip_path)
    for path, region in PAGES.items():
        page.goto(f"{url}/path{path}")
        expect(page.get_by_role("region", name=region).first).to_be_visible()
        expect(page.locator("#page-status")).to_have_class(re.compile("good"))
    page.get_by_role("link", name="Live", exact=True).click()
    expect(page.locator("#page-status")).to_have_class(re.compile("good"))
    expect(page.locator("#curl")).to_contain_text(f"{url}/path/t2i")
    page.get_by_role("link", name="Images").click()
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    assert outside == []


def test_models_have_what_is_known_of_each_version(url, open_page):
    page = open_page(f"{url}/models")
    versions = page.get_by_role("table").filter(has=page.get_by_role("rowheader", name="shapes@5"))
    latest = versions.get_by_role("row").filter(has_text="shapes@5")
    for text in (
        "next",
        "stage=test",
        "2 days ago",
        "by ann",
        "more latents",
        "31.4 MB in 9 files",
        "engine 0 as t2i",
        "canary",
    ):
        expect(latest).to_contain_text(text)
    expect(versions.get_by_role("row").filter(has_text="shapes@4")).to_contain_text(HOSTILE)
    expect(versions.get_by_role("row").filter(has_text="shapes@2")).to_contain_text("its crop was wrong")
    served = page.get_by_role("region", name="Models that engines hold")
    expect(served.get_by_role("row").filter(has_text=FAKE_MODEL.name)).to_contain_text("the configuration’s")
    latest.get_by_role("link", name="Lineage of shapes@5").click()
    expect(page.get_by_role("button", name="model shapes@5")).to_have_attribute("aria-pressed", "true")


def test_a_canary_is_shown_with_its_plan_its_evidence_and_who_did_what(url, open_page):
    page = open_page(f"{url}/deployments#t2i")
    expect(page.get_by_role("link", name=re.compile("^t2i"))).to_have_attribute("aria-current", "true")
    expect(page.get_by_role("listitem").filter(has_text="25 %").first).to_have_attribute("aria-current", "step")
    traffic = page.get_by_role("img", name=re.compile("^Share of each version"))
    expect(traffic).to_have_accessible_name(re.compile("at the end: shapes@3 75 %, shapes@5 25 %"))
    for name in (
        "Evidence at the end: .* rolled back at 20",
        "Responses at the end: control: ",
        "Increase of the error rate",
    ):
        expect(page.get_by_role("img", name=re.compile(name))).to_be_visible()
    page.get_by_text("The evidence as a table").click()
    expect(page.get_by_role("table").filter(has_text="Evidence: latency").get_by_role("row")).not_to_have_count(2)
    history = page.get_by_role("region", name="Changes, the latest first").get_by_role("row")
    expect(history.filter(has_text="rolled back")).to_contain_text("and fails from 20")
    expect(history.filter(has_text="asked for").nth(1)).to_contain_text(HOSTILE)
    page.get_by_label("of deployment", exact=True).select_option(label="4: shapes@4, rolled back")
    expect(page.locator("#verdict")).to_contain_text(
        re.compile(r"fail.*Evidence that the canary is worse: [\d,.]+ of 20\.")
    )
    page.get_by_role("button", name="1 month").click()
    expect(page.locator("#traffic-legend")).to_contain_text("shapes@1")
    page.get_by_role("link", name=re.compile("^embed")).click()
    expect(page.locator("#endpoint-name")).to_have_text("embed")
    expect(page.get_by_role("region", name="Changes, the latest first")).to_contain_text("its files changed")


def test_a_canary_is_promoted_with_a_reason(own, open_page, check_accessibility):
    url, engine = own()
    page = open_page(f"{url}/deployments#t2i")
    page.get_by_role("button", name="Promote").click()
    dialog = page.get_by_role("dialog", name="Promote shapes@5 on t2i?")
    expect(dialog).to_contain_text("It gets 25 % of the requests now")
    expect(dialog.get_by_label("Why")).to_be_focused()
    check_accessibility(page)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Promote").click()
    dialog.get_by_label("Why").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator("#endpoint-chips")).to_contain_text("shapes@5 serves")
    expect(page.get_by_role("button", name="Promote")).to_be_hidden()
    expect(page.get_by_role("region", name="Changes, the latest first").get_by_role("row").nth(1)).to_contain_text(
        HOSTILE
    )
    assert DeploymentStore(engine).get("t2i").serving.last_change.why == HOSTILE


def test_a_shadow_gets_copies_and_no_traffic(own, open_page, check_accessibility):
    url, engine = own()
    store, now = DeploymentStore(engine), time.time()
    store.roll_back("t2i", Change(now, "ann"))
    shadow, _ = store.deploy("t2i", "shapes@5", None, JudgeSettings(), Change(now + 1, "ann"), shadow=ShadowPlan(10.0))
    store.try_lease(shadow.id, "registrar", now + 2, 1e6)
    store.mounted(shadow.id, "registrar", Change(now + 2, "registrar"))
    page = open_page(f"{url}/deployments#t2i")
    expect(page.locator("#endpoint-chips")).to_contain_text("shapes@5 is a shadow")
    expect(page.get_by_role("img", name=re.compile("^Share of each"))).to_have_accessible_name(
        re.compile("at the end: shapes@3 100 %")
    )
    expect(page.get_by_role("region", name="Changes, the latest first")).to_contain_text("which gets copies")
    section = page.get_by_role("region", name="Shadow and control")
    expect(section).to_contain_text("shapes@5, shadow: copies of 10 % of the requests.")
    expect(section).to_contain_text("No copy was answered yet.")
    for number, seconds in ((10, 30.0), (40, 60.0)):
        counts = ShadowCounts(
            num_answers=number, num_errors=number // 10, num_dropped=3, num_timed=number, shadow_s=2.0, control_s=1.0,
            num_distances=number, distance=0.02 * number, max_distance=0.11,
        )  # fmt: skip
        change = Change(now + 2 + seconds, "registrar")
        store.step_shadow(shadow.id, "registrar", ShadowState(counts, seconds, change.at), change)
    for name in (
        "Copies of requests at the end: answered: 40; dropped: 3.",
        "Errors at the end: shadow: 4; control: 0.",
        "Computing time at the end: shadow: 2.",
        "Distance of outputs at the end: mean: 0.02; largest: 0.11.",
    ):
        expect(section.get_by_role("img", name=name, exact=True)).to_be_visible()
    check_accessibility(page)
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("dialog")).to_contain_text("It is a shadow")
    page.goto(f"{url}/lineage?of=t2i")
    expect(page.locator("#details")).to_contain_text("shadow")


def test_what_others_do_appears_without_a_reload(own, open_page):
    url, engine = own()
    page = open_page(f"{url}/deployments#t2i")
    expect(page.locator("#endpoint-chips")).to_contain_text("shapes@5 is a canary")
    DeploymentStore(engine).roll_back("t2i", Change(time.time(), "bob", "hands have six fingers"))
    expect(page.locator("#endpoint-chips")).not_to_contain_text("shapes@5")
    expect(page.get_by_role("region", name="Changes, the latest first").get_by_role("row").nth(1)).to_contain_text(
        "six fingers"
    )


def test_a_version_is_deployed_and_rolled_back(own, open_page):
    url, engine = own()
    page = open_page(f"{url}/deployments#embed")
    page.get_by_role("button", name="Deploy a version").click()
    dialog = page.get_by_role("dialog", name="Deploy a version")
    dialog.get_by_label("Version").fill("nothing@1")
    dialog.get_by_label("How").select_option("canary")
    expect(dialog.get_by_label("Ramp")).to_be_hidden()
    dialog.get_by_label("Share in per cent").fill("12.5")
    dialog.get_by_role("button", name="Deploy").click()
    expect(dialog.get_by_role("alert")).to_contain_text("there is no model 'nothing'")
    open_page.ignore_logged(409)
    dialog.get_by_label("Version").fill("minilm@prod")
    dialog.get_by_role("button", name="Deploy").click()
    expect(page.locator("#endpoint-chips")).to_contain_text("minilm@1 is pending")
    assert DeploymentStore(engine).get("embed").unfinished.plan.percents == (12.5,)
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(page.locator("#endpoint-chips")).not_to_contain_text("pending")
    expect(page.get_by_role("region", name="Changes, the latest first").get_by_role("row").nth(1)).to_contain_text(
        "rolled back"
    )


def test_a_key_is_asked_for_and_one_without_the_scope_is_not_enough(own, open_page, tmp_path):
    keys = {"client": generate_key("client"), "deployer": generate_key("deployer", ["lineage", "deploy"])}
    (tmp_path / "keys.toml").write_text("".join(table for _, table in keys.values()))
    url, _ = own(api_keys_file=str(tmp_path / "keys.toml"))
    page = open_page(f"{url}/deployments#t2i")
    for name in ("client", "deployer"):
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(keys[name][0])
        page.keyboard.press("Enter")
        if name == "client":
            expect(page.locator("#key-error")).to_contain_text("deploy")
    expect(page.locator("#endpoint-name")).to_have_text("t2i")
    page.evaluate("sessionStorage.setItem('noria-key', 'another')")  # it was revoked meanwhile
    page.get_by_role("button", name="Roll back").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Roll back").click()
    dialog.get_by_label("API key").fill(keys["deployer"][0])
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("region", name="Changes, the latest first").get_by_role("row").nth(1)).to_contain_text(
        "by deployer"
    )
    open_page.ignore_logged(401)
    open_page.ignore_logged(403)


@pytest.mark.parametrize("path", PAGES)
def test_a_registry_that_is_away_is_said(fake, open_page, tmp_path, path):
    registry = RegistryConfig(database="sqlite:////dev/null/registry.sqlite", deployments=False)
    with serving(Config(data_dir=str(tmp_path / "data"), registry=registry), fake) as (url, _):
        wait_until_ready(url)
        page = open_page(f"{url}{path}")
        expect(page.get_by_role("alert").first).to_contain_text("The registry does not answer")
        expect(page.locator("#page-status")).to_have_text("registry away")
        if path == "/models":
            expect(page.get_by_role("region", name="Models that engines hold")).to_contain_text(FAKE_MODEL.name)
        if path.startswith("/deployments"):
            expect(page.locator("#not-carried-out")).to_be_visible()
    open_page.ignore_logged(503)
    open_page.ignore_logged("ERR_CONNECTION_REFUSED", optional=True)


def focused(page):
    return page.evaluate("document.activeElement.innerText.split('\\n').slice(0, 2).join(' ')")


def test_arrow_keys_follow_the_lines_of_a_lineage(url, open_page):
    page = open_page(f"{url}/lineage?of=t2i")
    expect(page.get_by_role("button", name="endpoint t2i")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="endpoint t2i").focus()
    walked = []
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        walked.append(focused(page))
    assert walked[0] in ("deployment 3 shapes@3", "deployment 6 shapes@5")
    page.locator("#graph").get_by_role("button", name="deployment 6 shapes@5").focus()
    walked = []
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        walked.append(focused(page))
    assert walked == ["model shapes@5", "run fine-tune", "model shapes@5", "deployment 6 shapes@5", "endpoint t2i"]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.graph')") is None, "Tab leaves the graph"


def test_enter_opens_the_details_and_a_key_traces_from_there(url, open_page):
    page = open_page(f"{url}/lineage?of=shapes@3")
    page.locator("#graph").get_by_role("button", name="step train unet").focus()
    page.keyboard.press("Enter")
    details = page.get_by_role("region", name="run train unet")
    expect(details).to_be_focused()
    for text in ("studio/train unet", "complete", "11.1 h", "rate 0.001", "fid 12.4", "dataset /data/latents"):
        expect(details).to_contain_text(text)
    page.keyboard.press("Escape")
    assert focused(page) == "step train unet"
    details.get_by_role("button", name="dataset /data/latents").click()
    expect(page.get_by_role("region", name="dataset version /data/latents")).to_contain_text(
        re.compile("sha256:[0-9a-f]{64}")
    )
    page.keyboard.press("c")
    expect(page.locator("#of")).to_have_value(re.compile(r"^dataset:\d+$"))
    expect(page.locator(".box.subject")).to_contain_text("/data/latents")
    page.go_back()
    expect(page.locator(".box.subject")).to_contain_text("shapes@3")


def test_an_image_file_leads_to_the_data_that_made_it(url, open_page):
    version = model_folder(3)
    metadata = GenerationMetadata(
        "p",
        model="t2i",
        model_version=version.fingerprint,
        noria="0.1.0",
        deployment=3,
        registered_version="shapes@3",
        model_digest=version.manifest.digest,
    )
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format="png", **save_options(metadata, "png"))
    page = open_page(f"{url}/lineage")
    expect(page.get_by_role("heading", name="Begin with")).to_be_visible()
    page.locator("#file").set_input_files(
        {"name": f"{HOSTILE}.png", "mimeType": "image/png", "buffer": file.getvalue()}
    )
    image = page.locator(".box.subject")
    expect(image).to_contain_text(HOSTILE)
    image.focus()
    walked = []
    for _ in range(3):
        page.keyboard.press("ArrowDown")
        walked.append(focused(page))
    assert walked == ["deployment 3 shapes@3", "model shapes@3", "step train unet"]
    page.locator("#file").set_input_files({"name": "none.png", "mimeType": "image/png", "buffer": b"none"})
    expect(page.get_by_role("alert").first).to_contain_text("not an image")
    open_page.ignore_logged(422)


def test_a_subject_that_the_registry_does_not_have_is_said_and_another_one_can_be_traced(url, open_page):
    page = open_page(f"{url}/lineage?of=nothing")
    expect(page.get_by_role("alert").first).to_contain_text("There is no model 'nothing'")
    open_page.ignore_logged(409)
    page.get_by_label("Trace", exact=True).fill("embed")
    page.keyboard.press("Enter")
    expect(page.locator(".box.subject")).to_contain_text("embed")
    expect(page.get_by_role("alert").first).to_be_hidden()


def test_a_large_graph_is_cut_and_a_loop_is_drawn(own, open_page):
    url, engine = own()
    loop = [sample_registry.data("/loop", "1")]
    runs = [event for k in range(250) for event in sample_registry.run_events(f"reader {k}", k, 1, loop, loop)]
    LineageStore(engine).record([parse_event(msgspec.json.encode(event)) for event in runs], "", time.time())
    page = open_page(f"{url}/lineage?of=file:///loop@1")
    expect(page.locator("#cut")).to_contain_text("at most 200 boxes")
    expect(page.locator(".box")).to_have_count(200)


LAID_OUT = """async ([nodes, edges]) => {
  const { layOut } = await import("/pages/lineage/lineage_layout.js");
  const size = { width: 100, height: 50, gapX: 20, gapY: 30 };
  const { places, courses, layers, width } = layOut(nodes, edges.map(([product, source]) => ({ product, source })), size);
  return { places: Object.fromEntries(places), num: courses.length, layers, width };
}"""


def test_layout_puts_products_above_their_sources_and_no_box_over_another(url, open_page):
    page = open_page(f"{url}/models")
    nodes = [f"n{k}" for k in range(30)]
    edges = [[f"n{k}", f"n{j}"] for k in range(30) for j in range(k + 1, 30) if (k * 7 + j * 3) % 11 == 0]
    laid = page.evaluate(LAID_OUT, [nodes, edges])
    places = laid["places"]
    assert laid["num"] == len(edges) > 30
    assert all(places[product]["y"] < places[source]["y"] for product, source in edges)
    for layer in laid["layers"]:
        xs = [places[name]["x"] for name in layer]
        assert all(b - a >= 119.9 for a, b in itertools.pairwise(xs))
    assert all(50 <= place["x"] <= laid["width"] - 50 + 0.1 for place in places.values())


def test_layout_of_loops_and_of_nothing(url, open_page):
    page = open_page(f"{url}/models")
    laid = page.evaluate(LAID_OUT, [["a", "b", "c"], [["a", "b"], ["b", "c"], ["c", "a"], ["a", "a"]]])
    assert (laid["num"], [len(layer) for layer in laid["layers"]]) == (3, [1, 1, 1])
    assert page.evaluate(LAID_OUT, [[], []])["layers"] == []


TRAFFIC = """async ([deployments, isComplete]) => {
  const { trafficChanges } = await import("/pages/deployments/traffic.js");
  return trafficChanges(deployments, isComplete).map(({ at, shares }) => [at, ...shares.map(({ version, share }) => `${version} ${share}`)]);
}"""


def test_traffic_follows_from_the_events(url, open_page):
    page = open_page(f"{url}/models")

    def deployment(number, version, *events):
        return {
            "id": number,
            "version": version,
            "events": [
                {"number": k, "type": event_type, "traffic": traffic, "change": {"at": at}}
                for k, (at, event_type, traffic) in enumerate(events)
            ],
        }

    first = deployment(1, "a", (1, "pending", 0), (2, "serving", 1), (3, "follow", 1), (9, "replaced", 0))
    second = deployment(
        2, "b", (5, "pending", 0), (6, "canary", 0.25), (7, "step", 0.25), (8, "step", 0.5), (9, "serving", 1)
    )
    third = deployment(3, "c", (10, "pending", 0), (11, "canary", 0.25), (12, "rolled_back", 0))
    shadow = deployment(4, "d", (13, "pending", 0), (14, "shadow", 0.1), (15, "step", 0.1), (16, "ended", 0))
    expected = [
        [1, "configuration 1"],
        [2, "a 1"],
        [6, "a 0.75", "b 0.25"],
        [8, "a 0.5", "b 0.5"],
        [9, "b 1"],
        [11, "b 0.75", "c 0.25"],
        [12, "b 1"],
    ]
    assert page.evaluate(TRAFFIC, [[shadow, third, second, first], True]) == expected
    assert page.evaluate(TRAFFIC, [[third], False])[0] == [10, "not loaded 1"]
    gone = deployment(1, "a", (2, "serving", 1), (3, "rolled_back", 0))
    assert page.evaluate(TRAFFIC, [[gone], False]) == [[2, "a 1"], [3, "configuration 1"]]


def test_a_hidden_page_asks_nothing(url, open_page):
    page = open_page(f"{url}/deployments#t2i")
    expect(page.locator("#endpoint-name")).to_have_text("t2i")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { get: () => true }); "
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(3000)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(3000)
    assert asked == []


def test_screenshots(url, open_page, screenshot):
    page = open_page(f"{url}/deployments#t2i", viewport={"width": 1280, "height": 1000})
    expect(page.get_by_role("img", name=re.compile("^Evidence at the end"))).to_be_visible()
    screenshot(page, "deployments.png")
    page = open_page(f"{url}/lineage?of=t2i", viewport={"width": 1280, "height": 1000})
    page.locator("#graph").get_by_role("button", name="model shapes@3").click()
    screenshot(page, "lineage.png")
