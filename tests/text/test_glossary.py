"""The Chinese of gradsan: one word for each term, in sentences, pages and documentation."""

import itertools
import re
from pathlib import Path

from cases import each
from gradsan.text._messages import sentences

ROOT = Path(__file__).parents[2]
TERMS = {
    "张量": r"tensors?",
    "叶子张量": r"leaf(?! Node)|叶节点|叶张量",
    "原地": r"in-place|inplace|就地",
    "非原地": r"out-of-place",
    "版本计数器": r"version counter|版本号|版本計",
    "副本": r"(?<!深)拷贝",
    "反向传播": r"backward(?! hook)",
    "前向传播": r"forward",
    "诊断码": r"错误码|错误代码",
}
"""Each term, and the words that stand for it nowhere else than in code."""

KEPT = re.compile(
    r"`[^`]*`|\{[^{}]*\}|\]\([^)]*\)|<!--.*?-->|https?://\S+|"
    r"saved[- ]tensors? hooks?|inference tensors?|double backward|full backward|module[- ]hook|backward hooks?|"
    r"[\w.]*\.(?:backward|forward)\b|\b(?:backward|forward)\([^)]*\)"
)
"""Code, and names of PyTorch's own that have no other."""

FENCED = re.compile(r"^```.*?^```$|^---\n.*?^---$", re.MULTILINE | re.DOTALL)
PAGES = [*sorted((ROOT / "src/gradsan/text/zh").glob("*.md")), *sorted((ROOT / "docs").rglob("*.zh.md"))]


def strangers(text):
    prose = KEPT.sub(" ", text)
    return {
        term: found
        for term, other in TERMS.items()
        if (found := re.findall(rf"(?<![\w./=-])(?:{other})(?![\w/=(-]|\.\w)", prose, re.ASCII))
    }


def test_sentences_have_one_word_for_each_term():
    found = {key: strangers(text) for key, text in sentences("zh").items() if not key.startswith("cli.takes")}
    assert {key: words for key, words in found.items() if words} == {}


@each("page", PAGES, ids=lambda page: page.name)
def test_pages_have_one_word_for_each_term(page):
    assert "reference" in page.parts or strangers(FENCED.sub("", page.read_text(encoding="utf-8"))) == {}


def test_a_stranger_is_seen():
    wrong = [
        "这个 tensor 的值",
        "in-place 写入",
        "它的 version counter",
        "这次 backward 需要它",
        "写到拷贝里",
        "leaf 的梯度",
    ]
    right = ["`tensor` 的值", "调用 loss.backward()", "backward hook", "{backward}", "深拷贝", "叶子张量"]
    assert all(map(strangers, wrong))
    assert not any(map(strangers, itertools.chain(right, TERMS)))
