"""The HTML page in a browser: what can be clicked and typed, both themes, thousands of events, and no request."""

import dataclasses
import time
from itertools import pairwise

import pytest
from hostile import EVENTS, hostile, many_events
from sample_reports import SOURCES, bridge
from test_read_json import with_history

from gradsan.present import render_html
from gradsan.present.html import render_fragment


@pytest.fixture(scope="module")
def opened(chromium):
    """Pages by the settings of their contexts, each kept for the next test that asks for the same."""
    pages = {}
    yield pages
    for page in pages.values():
        page.context.close()


@pytest.fixture
def show(chromium, opened, tmp_path):
    """Open a report; nothing may be requested but the file, and nothing may fail in it."""
    requests, failures, shown = [], [], []

    def open_page(made, language="en", **settings):
        file = tmp_path / "report.html"
        file.write_text(render_html(made, language=language, cwd=SOURCES), encoding="utf-8")
        key = repr(sorted(settings.items()))
        if key not in opened:
            viewport = {"viewport": {"width": 1000, "height": 900}}
            opened[key] = chromium.new_context(**{**viewport, **settings}).new_page()
        page = opened[key]
        shown.append(page)
        page.mouse.move(0, 0)
        for event, hear in hears.items():
            page.on(event, hear)
        page.goto(file.as_uri())
        return page

    hears = {
        "request": lambda request: requests.append(request.url),
        "pageerror": lambda failure: failures.append(str(failure)),
        "console": lambda message: failures.append(message.text),
    }
    yield open_page
    for page in shown:
        for event, hear in hears.items():
            page.remove_listener(event, hear)
    assert failures == []
    assert [url for url in requests if not url.startswith("file://")] == []
    assert len(requests) == len(shown)


def told(page):
    return page.locator(".status").inner_text()


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def ink(page):
    """How many different colours the timeline shows: an empty one has hardly any."""
    picture(page)
    return page.evaluate(
        """() => { const canvas = document.querySelector("canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
        for (let at = 0; at < data.length; at += 4) seen.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
        return seen.size; }"""
    )


def picture(page):
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("() => document.querySelector('canvas').toDataURL()")


def test_hostile_text_stays_text(show):
    page = show(hostile())
    assert page.title().startswith("gradsan:")
    assert page.title() != "broken"
    assert page.locator("main img, main script, main b b").count() == 0
    assert "document.title='broken'" in page.locator("article h2").inner_text()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_mark_leads_to_its_words(show, language):
    page = show(with_history(bridge()), language)
    page.locator(".chain .badge").nth(1).click()
    assert page.url.endswith("#finding-1-mark-1")
    said = page.locator(".said:target")
    assert said.is_visible()
    assert "Adadelta" in said.inner_text()


def test_a_stack_opens(show):
    page = show(with_history(bridge()))
    frame = page.locator(".stack li").first
    assert not frame.is_visible()
    page.locator(".stack summary").first.click()
    assert frame.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_toggled(show, scheme):
    page = show(with_history(bridge()), color_scheme=scheme)
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    mine, other = (light, dark) if scheme == "light" else (dark, light)
    assert background(page) == mine
    before = picture(page)
    button = page.get_by_role("button", name="dark", exact=True)
    assert button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
    button.click()
    assert background(page) == other
    assert button.get_attribute("aria-pressed") == str(scheme != "dark").lower()
    assert picture(page) != before, "the timeline takes the colours, too"
    button.click()
    assert background(page) == mine


def luminance(color):
    parts = [int(part) / 255 for part in color]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(show, scheme):
    page = show(with_history(bridge()), color_scheme=scheme)
    pairs = page.evaluate(
        """() => [...document.querySelectorAll("p, li, h1, h2, h3, span, code, a, td, th, summary, mark, button")]
        .filter((one) => one.checkVisibility())
        .filter((one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
        .map((one) => { let ground = one, color;
          do { color = getComputedStyle(ground).backgroundColor; ground = ground.parentElement; }
          while (ground && color === "rgba(0, 0, 0, 0)");
          return [getComputedStyle(one).color, color, one.outerHTML.slice(0, 80)]; })"""
    )
    assert len(pairs) > 40
    for front, back, where in pairs:
        one, other = (luminance([*map(float, color[4:-1].split(","))]) for color in (front, back))
        ratio = (max(one, other) + 0.05) / (min(one, other) + 0.05)
        assert ratio >= 4.5, (ratio, where)


def test_the_keyboard_reaches_everything_and_walks_the_timeline(show):
    page = show(with_history(bridge()))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName"))
        if reached[-1] == "CANVAS":
            break
    assert {"A", "BUTTON", "CANVAS"} <= set(reached)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    assert told(page).startswith("1/3 · saved at clock 3, step 0 · MmBackward0 · rnn.py:10")
    page.keyboard.press("ArrowRight")
    assert "written (elsewhere)" in told(page)
    page.keyboard.press("End")
    assert told(page).startswith("3/3 · needed at clock 9")
    page.keyboard.press("ArrowRight")
    assert told(page).startswith("3/3"), "there is no event after the last"
    page.keyboard.press("Home")
    assert told(page).startswith("1/3")


def test_the_timeline_is_zoomed_by_buttons_keys_and_wheel(show):
    page = show(hostile(many_events(200)))
    whole = picture(page)
    assert ink(page) > 5
    page.get_by_role("button", name="zoom in").click()
    zoomed = picture(page)
    assert zoomed != whole
    page.get_by_role("button", name="later").click()
    assert picture(page) != zoomed
    page.get_by_role("button", name="show all").click()
    assert picture(page) == whole
    canvas = page.locator("canvas")
    canvas.focus()
    for key in ("+", "-"):
        page.keyboard.press(key)
    page.keyboard.press("0")
    assert picture(page) == whole
    canvas.hover(position={"x": 400, "y": 60})
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(100)
    assert picture(page) != whole
    page.keyboard.press("0")
    assert picture(page) == whole


def test_the_page_scrolls_over_a_timeline_that_was_not_chosen(show):
    page = show(hostile(many_events(200)))
    page.locator("canvas").scroll_into_view_if_needed()
    before, scrolled = picture(page), page.evaluate("scrollY")
    page.locator("canvas").hover()
    page.mouse.wheel(0, -200)
    page.wait_for_function("(before) => scrollY < before", arg=scrolled)
    assert picture(page) == before


def test_an_event_is_chosen_by_a_click(show):
    page = show(with_history(bridge()))
    box = page.locator("canvas").bounding_box()
    page.locator("canvas").click(position={"x": box["width"] - 20, "y": 8 + 34 * 3 + 17})
    assert told(page).startswith("3/3 · needed")


def test_ten_thousand_events_stay_quick(show):
    begun = time.perf_counter()
    page = show(hostile(many_events()))
    assert ink(page) > 5
    opened = time.perf_counter() - begun
    assert opened < 5, opened
    page.locator("canvas").focus()
    frame = page.evaluate(
        """async () => { const canvas = document.querySelector("canvas"), times = [];
        for (let at = 0; at < 20; at += 1) {
          canvas.dispatchEvent(new KeyboardEvent("keydown", { key: at % 2 ? "-" : "+" }));
          const begun = performance.now();
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          times.push(performance.now() - begun);
        }
        return times.sort((one, other) => one - other)[10]; }"""
    )
    assert frame < 200, frame


def test_the_table_pages_through_all_events(show):
    page = show(hostile(many_events()))
    rows = page.locator(".events tbody tr")
    page.locator(".events summary").click()
    page.wait_for_selector(".pager")
    assert rows.count() == 200
    assert f"1 to 200 of {EVENTS}" in page.locator(".pager").inner_text()
    assert page.get_by_role("button", name="earlier events").is_disabled()
    page.get_by_role("button", name="later events").click()
    assert f"201 to 400 of {EVENTS}" in page.locator(".pager").inner_text()
    assert rows.first.locator("td").first.inner_text() == str(10 + 3 * 199)


def test_landmarks_and_names_are_there_for_a_screen_reader(show):
    page = show(with_history(bridge()))
    for role in ("banner", "main", "contentinfo", "article", "application"):
        assert page.get_by_role(role).count() == 1, role
    assert page.get_by_role("article").get_attribute("aria-labelledby") == "finding-1-title"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, a, canvas')]
        .filter((one) => !(one.ariaLabel || one.innerText.trim())).length"""
    )
    assert unnamed == 0


def test_without_script_the_page_says_the_same(show):
    page = show(with_history(bridge()), java_script_enabled=False)
    assert page.locator(".listing").first.is_visible()
    assert not page.locator("canvas").is_visible()
    page.locator(".events summary").click()
    assert page.locator(".events tbody tr").count() == 3


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_page(show, width):
    page = show(hostile(), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_prints_in_light_colours_without_controls(show):
    page = show(with_history(bridge()), color_scheme="dark")
    page.emulate_media(media="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()
    assert len(page.pdf()) > 10_000


def test_a_patch_is_copied_by_a_button(show):
    page = show(with_history(bridge()))
    context = page.context
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = page.locator("button.copy").first
    shown = page.locator(".diff code").first.text_content()
    button.click()
    page.wait_for_function("document.querySelector('button.copy').textContent === 'copied'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.replace("\r", "") == shown
    assert copied.startswith("--- ")
    assert page.locator(".timeline .axis").is_visible()


def test_the_first_fix_is_on_the_first_screen(show):
    [one] = bridge().diagnoses
    page = show(with_history(dataclasses.replace(bridge(), diagnoses=(dataclasses.replace(one, fixes=one.fixes * 3),))))
    box = page.locator(".fixes .diff").first.bounding_box()
    assert box["y"] + box["height"] < 900
    others = page.locator("details.others")
    for event, is_open in (("beforeprint", True), ("afterprint", False)):
        page.evaluate("(name) => window.dispatchEvent(new Event(name))", event)
        assert others.evaluate("one => one.open") == is_open
    page.locator(".others summary").first.click()
    assert page.locator(".others .fixes li").first.is_visible()


def test_the_first_fix_is_in_the_frame_of_a_notebook(show):
    page = show(with_history(bridge())).context.new_page()
    page.set_content(render_fragment(with_history(bridge()), language="en", cwd=SOURCES))
    frame = page.locator("iframe").bounding_box()
    inner = page.frame_locator("iframe")
    box = inner.locator(".fixes .diff").first.bounding_box()
    assert box["y"] + box["height"] < frame["y"] + frame["height"]
    assert not inner.locator("h1").is_visible()


def test_a_code_leads_to_its_page_which_opens(show):
    page = show(with_history(bridge()))
    heading = page.locator("details.about h4").first
    assert not heading.is_visible()
    page.locator(".head a").first.click()
    assert heading.is_visible()
