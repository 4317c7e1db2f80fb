"""Every word that a user reads, in English and Chinese, and the functions that return it.

Code carries :class:`gradsan.model.Message` (a key and values); :func:`say` turns it into a sentence. The sentences are
in the ``.toml`` files of ``<language>/``, the pages of ``gradsan explain`` in ``<language>/<CODE>.md``. No torch is
imported, and a program that has nothing to read loads neither.
"""

from typing import TYPE_CHECKING

from gradsan._lazy import names_on_demand

if TYPE_CHECKING:
    from gradsan.text._messages import say
    from gradsan.text._pages import LANGUAGES, CodeEntry, Language, choose_language, codes, language_on, page, resolve

__all__ = ["LANGUAGES", "CodeEntry", "Language", "choose_language", "codes", "language_on", "page", "resolve", "say"]

__getattr__ = names_on_demand(
    __name__,
    {
        "_messages": ("say",),
        "_pages": (
            *("LANGUAGES", "CodeEntry", "Language", "choose_language", "codes", "language_on", "page", "resolve"),
        ),
    },
)
