"""The page in a real browser: opened as a file, without a network, light, dark and narrow.

Needs Debian's ``chromium`` (``apt-get install chromium``); ``HEADLAB_NO_BROWSER=1`` skips these.
Set ``HEADLAB_SCREENSHOTS=folder`` to keep what they see.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from fake_reports import HOSTILE, hostile_example, make_report

from headlab.roles.scores import visible

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",  # containers run as root
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-gpu",
]


@pytest.fixture(scope="module")
def browser():
    if os.environ.get("HEADLAB_NO_BROWSER") == "1":
        pytest.skip("HEADLAB_NO_BROWSER=1")
    path = shutil.which("chromium")
    if path is None:
        pytest.fail(
            "chromium is not installed: apt-get install chromium, or set HEADLAB_NO_BROWSER=1"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report():
    base = make_report(12, 6, 4, kv=2, top=3, each=2)
    top = base.scores.ranked("induction").iloc[0]
    hostile = hostile_example("induction", int(top["layer"]), int(top["head"]))
    return dataclasses.replace(base, examples=(hostile, *base.examples[1:]))


@pytest.fixture(scope="module")
def address(report, tmp_path_factory):
    return report.write(tmp_path_factory.mktemp("page"))["report.html"].as_uri()


@pytest.fixture
def open_page(browser, address, request):
    """Opens the page; afterwards nothing may have been logged, thrown or requested."""
    contexts, troubles = [], []

    def open_(url=address, width=1400, height=1000, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda sent: sent.url.startswith("file:") or troubles.append(sent.url))
        page.goto(url)
        return page

    yield open_
    folder = os.environ.get("HEADLAB_SCREENSHOTS")
    for context in contexts:
        if folder and context.pages:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = request.node.name.replace("/", "-")
            context.pages[0].screenshot(path=Path(folder) / f"{name}.png", full_page=True)
        context.close()
    assert troubles == []


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1400), ("dark", 1400), ("light", 390), ("dark", 390)]
)
def test_page_opens_offline_without_a_word_on_the_console(open_page, scheme, width):
    page = open_page(width=width, color_scheme=scheme)
    assert page.locator(".map .cell").count() == 72
    assert page.locator("section.role.current tbody tr").count() == 25
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (scheme == "light")


def test_hostile_tokens_are_rendered_as_text(open_page, address, report):
    page = open_page(f"{address}#role=induction&head={report.examples[0].label}")
    tokens = page.locator("#card .tokens").first.locator(".t").all_text_contents()
    assert tokens == [visible(token) for token in HOSTILE]
    assert "owned" not in page.title()
    assert page.locator("img").count() == 0


def test_clicking_a_cell_opens_its_card_with_every_role(open_page, report):
    page = open_page()
    label = report.scores.claimed("previous_token")[-1]
    page.locator(f'.map .cell[aria-label^="{label},"]').click()
    assert page.locator("#card h3").text_content() == label
    assert page.locator("#card .card-roles tbody tr").count() == 4
    assert "claimed" in page.locator("#card .card-roles tbody tr").first.text_content()
    assert page.locator("#status").text_content() == f"{label} selected, Previous token"
    assert f"head={label}" in page.url


def test_hovering_shows_the_evidence(open_page, report):
    page = open_page()
    row = report.scores.ranked("previous_token").iloc[0]
    label = report.scores.claimed("previous_token")[0]
    page.locator(f'.map .cell[aria-label^="{label},"]').hover()
    tip = page.locator("#tip").text_content()
    for part in (label, "95% interval", "null mean", f"{row['score']:.3f}", "claimed"):
        assert part in tip
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_hovering_a_token_shows_its_weight(open_page):
    page = open_page()
    page.locator("#card .tokens").nth(1).locator(".t").first.hover()
    assert "weight" in page.locator("#tip").text_content()


def test_arrow_keys_walk_the_map_and_enter_selects(open_page):
    page = open_page()
    page.locator('.map .cell[tabindex="0"]').focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#card h3").text_content() == "L1H1"
    assert page.locator('.map .cell[tabindex="0"]').count() == 1
    page.locator("#card .tokens, #card .muted").first.wait_for()


def test_arrow_keys_walk_the_tokens(open_page):
    page = open_page()
    page.locator("#card .tokens").nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert "the query itself" in page.locator("#tip").text_content()
    page.keyboard.press("ArrowLeft")
    assert "1 before the query" in page.locator("#tip").text_content()


def test_roles_switch_from_cards_and_from_the_list(open_page, report):
    page = open_page()
    page.locator(".role-link").nth(2).click()
    assert page.locator("section.role.current h2").text_content().startswith("Duplicate token")
    assert page.locator(".map .cell.claimed").count() == len(report.scores.claimed("duplicate"))
    page.select_option("#role-select", "3")
    assert page.locator(".map .cell.claimed").count() == 0
    assert page.locator("section.role:visible").count() == 1


def test_tables_sort_filter_and_grow(open_page, report):
    page = open_page()
    table = page.locator("section.role.current")
    first = table.locator("tbody tr").first
    assert first.locator("th").text_content() == report.scores.claimed("previous_token")[0]
    rows = report.scores.frame[report.scores.frame["role"] == "previous_token"]
    table.get_by_role("button", name="Effect").click()
    best = rows.loc[rows["effect"].idxmax()]
    assert first.locator("th").text_content() == f"L{best['layer']}H{best['head']}"
    assert table.locator('th[data-key="effect"]').get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name="Effect").click()
    worst = rows.loc[rows["effect"].idxmin()]
    assert first.locator("th").text_content() == f"L{worst['layer']}H{worst['head']}"
    table.get_by_label("Filter heads").fill("L4")
    assert table.locator("tbody tr").count() == 6
    assert (
        "Showing 6 of 6 heads that pass the filter (72 in all)"
        in table.locator(".caps").text_content()
    )
    assert "never reaches a target" in table.locator("tbody tr").last.text_content()
    table.get_by_label("Filter heads").fill("")
    table.get_by_label("claimed only").check()
    assert table.locator("tbody tr").count() == len(report.scores.claimed("previous_token"))
    table.get_by_label("claimed only").uncheck()
    table.get_by_role("button", name="Show 100 more").click()
    assert table.locator("tbody tr").count() == 72


def test_csv_is_copied_with_the_frames_columns(open_page, report):
    page = open_page()
    page.evaluate(
        """() => { window.copied = [];
        document.execCommand = () => { copied.push(document.activeElement.value); return true; };
        navigator.clipboard.writeText = () => Promise.reject(new Error("refused")); }"""
    )
    page.locator("section.role.current").get_by_role("button", name="Copy CSV").click()
    page.get_by_role("button", name="Copied 72 rows").wait_for()
    lines = page.evaluate("copied[0]").splitlines()
    left_out = {"effect_size", "half_1", "half_2"}  # the page does not show them
    assert lines[0] == ",".join(c for c in report.scores.frame.columns if c not in left_out)
    assert len(lines) == 73
    assert lines[1].startswith("previous_token,")


def test_a_link_opens_the_head_it_names(open_page, address):
    page = open_page(f"{address}#role=induction&head=L3H2")
    assert page.locator("#card h3").text_content() == "L3H2"
    assert page.locator("#role-select").input_value() == "1"
    odd = open_page(f"{address}#role=<b>&head=L99H99")
    assert odd.locator("#card h3").is_visible()


def test_page_reads_without_script(open_page):
    page = open_page(java_script_enabled=False)
    assert page.locator("section.role:visible").count() == 4
    assert page.locator("#explore").is_hidden()
    assert page.locator(".thumb").count() == 4
    assert page.locator("section.role .tokens:visible").count() >= 3


def test_print_shows_every_role(open_page):
    page = open_page()
    page.emulate_media(media="print")
    assert page.locator("section.role:visible").count() == 4
    assert page.locator("#explore").is_hidden()


def test_page_adds_no_global_names(open_page):
    page = open_page()
    assert (
        page.evaluate(
            "['data', 'state', 'select', 'el'].filter((name) => Object.hasOwn(window, name))"
        )
        == []
    )


def test_reports_without_claims_examples_or_scores_open(open_page, tmp_path):
    none = make_report(3, 3, 2, kv=3, claims=False, causal=False)
    bare = dataclasses.replace(none, examples=(), checks={}, reproducibility={}, warnings=())
    page = open_page(bare.write(tmp_path / "bare")["report.html"].as_uri())
    assert "No head of 9 is claimed" in page.locator(".verdict").text_content()
    assert "No example was kept" in page.locator("#card").text_content()
    scores = dataclasses.replace(none.scores, frame=none.scores.frame.head(0))
    empty = dataclasses.replace(bare, scores=scores)
    page = open_page(empty.write(tmp_path / "empty")["report.html"].as_uri())
    assert "No head of 0 is claimed" in page.locator(".verdict").text_content()


def test_the_largest_report_opens_in_time(open_page, tmp_path):
    path = make_report(32, 32, 10, kv=8, length=128).write(tmp_path)["report.html"]
    page = open_page(path.as_uri())
    assert page.locator(".map .cell").count() == 1024
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert loaded < 3000, f"{loaded:.0f} ms"
