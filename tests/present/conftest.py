import pytest
import sample_reports
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from gradsan import text


class GoldenText(SingleFileSnapshotExtension):
    """One readable file per report. `pytest tests/present --snapshot-update` writes them anew."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.fixture
def golden(snapshot):
    return snapshot.use_extension(GoldenText)


@pytest.fixture(autouse=True)
def _sample_words(monkeypatch):
    """Let the sample reports speak their own words: these tests judge presenters, not the wording of causes."""
    real = text.say

    def say(message, language):
        return (sample_reports.say_sample if message.key.startswith("sample.") else real)(message, language)

    monkeypatch.setenv("GRADSAN_TEXT", "strict")
    monkeypatch.setattr(text, "say", say)
