"""The HTML page as text: whole without a browser, well-formed, loading nothing, whatever stands in the report."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser

from hostile import BREAKOUT, MIXED, hostile
from sample_reports import REPORTS, SOURCES, bridge, in_a_loop, nothing_found, same_line, two_files
from test_present_json import label_diagnosis
from test_read_json import with_history

from cases import each
from gradsan.present import render_html

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Checks nesting while it reads; keeps elements, texts, ids and links."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.links, self.elements, self.loads = [], [], [], [], []
        self.texts = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.elements.append((tag, attrs))
        if tag not in VOID:
            self.open.append(tag)
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "a":
            self.links.append(attrs["href"])
        self.loads += [name for name in ("src", "srcset", "data", "poster", "action", "style") if name in attrs]
        self.loads += [name for name in attrs if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.open[-1] if self.open else ""] = self.texts.get(self.open[-1] if self.open else "", "") + data

    @property
    def text(self):
        return "\n".join(text for tag, text in self.texts.items() if tag not in ("script", "style"))


def page(made, language="en"):
    return Page(render_html(made, language=language, cwd=SOURCES))


@each("language", ["en", "zh"])
@each("name", REPORTS)
def test_every_report_is_a_whole_page(name, language):
    read = page(with_history(REPORTS[name]()), language)
    assert len(read.ids) == len(set(read.ids))
    assert [link for link in read.links if link[1:] not in read.ids or link[0] != "#"] == []
    assert read.loads == []
    assert ("html", {"lang": {"en": "en", "zh": "zh-Hans"}[language]}) in read.elements
    names = [tag for tag, _ in read.elements]
    assert [names.count(one) for one in ("main", "h1", "title", "footer")] == [1, 1, 1, 1]
    assert names.count("article") == len(REPORTS[name]().diagnoses)


def test_nothing_in_a_report_breaks_out():
    text = render_html(hostile(), language="en")
    read = Page(text)
    assert read.loads == []
    assert BREAKOUT not in text
    assert "<img" not in text
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\x1b]", text)
    assert "⟨U+202E⟩" in read.text
    assert "🙂" in read.text
    assert "${style}" in read.text
    assert "&amp;<b></script>" in read.text, "what was written is what is shown"


def test_only_its_own_style_and_script_may_run():
    text = render_html(bridge(), language="en", cwd=SOURCES)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy.startswith("default-src 'none';")
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|url\(|@import", text)


def test_marks_are_numbered_in_the_order_of_events_wherever_their_lines_are():
    text = render_html(bridge(), language="en", cwd=SOURCES)
    listing = text[text.index('class="listing"') : text.index("part-why")]
    badges = re.findall(r'class="badge (\w+)" href="#finding-1-mark-(\d)"[^>]*>([^<]+)<', listing)
    assert badges == [("saved", "0", "1"), ("used", "2", "3"), ("written", "1", "2"), ("bridge", "3", "•")]


def test_marks_that_overlap_are_nested():
    text = render_html(same_line(), language="en", cwd=SOURCES)
    inner = '<mark class="written">.mul_(<span class="nu">2</span>)</mark>'
    assert f'<mark class="saved written">torch.sigmoid(x)</mark>{inner}' in text


def test_a_file_for_each_place():
    read = render_html(two_files(), language="en", cwd=SOURCES)
    assert re.findall(r"<figcaption><bdi>([^<]+)<", read) == ["model.py", "gan.py"]


def test_history_without_events_is_left_out():
    text = render_html(bridge(), language="en", cwd=SOURCES)
    for part in ("part-timeline", "part-versions", "part-graph"):
        assert part not in text
        assert part in render_html(with_history(bridge()), language="en", cwd=SOURCES)


def test_fixes_are_diffs_with_what_was_measured():
    text = page(same_line()).text
    assert "tried, works" in text
    text = render_html(bridge(), language="en", cwd=SOURCES)
    assert '<span class="removed">-    h = h_next' in text
    assert '<span class="added">+    h = h_next.detach()' in text
    assert "tried: failed" in text
    assert "gradients differ by 0.25" in text


def test_says_so_where_nothing_was_found():
    assert "nothing was found" in page(nothing_found()).text


def test_several_findings_have_a_table_of_contents():
    both = dataclasses.replace(bridge(), diagnoses=bridge().diagnoses + in_a_loop().diagnoses)
    assert "#finding-2" in page(both).links
    assert [tag for tag, _ in page(both).elements].count("nav") == 1


def test_equal_reports_give_equal_text():
    assert render_html(hostile(), language="zh") == render_html(hostile(), language="zh")


def test_the_stacks_are_folded():
    text = render_html(two_files(), language="en", cwd=SOURCES)
    assert '<details class="stack">' in text
    assert "<details open" not in text


def test_mixed_is_as_hostile_as_it_says():
    assert all(part in MIXED for part in ('"', "'", "<", "&", "\u202e", "$", "{", "%"))


def test_text_that_utf8_cannot_carry_is_shown_by_its_number():
    text = render_html(dataclasses.replace(bridge(), diagnoses=(label_diagnosis("caf\udce9.py"),)), language="en")
    assert text.encode("utf-8")
    assert "caf⟨U+DCE9⟩.py" in text
