"""Codes whose first help shows no changed line in ``gradsan run`` on the example of their page, and why there is none.

Every other code shows one. What is not here and shows none is a gap; what is here and shows one has been closed.
"""

from __future__ import annotations

UNSEEN = "gradsan does not see who writes, or the write lies in torch"
MEANT = "several lines are possible, and what was meant decides between them"
ANEW = "a part of the program has to be written anew, or written at all"
ELSEWHERE = "the statement is right and stands in the wrong place; where the right one is, the source does not tell"

WITHOUT_LINE = {
    **dict.fromkeys(["GS121", "GS206", "GS209", "GS605"], UNSEEN),
    **dict.fromkeys(["GS313", "GS314", "GS315", "GS405", "GS406"], MEANT),
    **dict.fromkeys(["GS414", "GS416", "GS514", "GS515", "GS604"], MEANT),
    **dict.fromkeys(["GS307", "GS320", "GS410", "GS412", "GS413"], ANEW),
    **dict.fromkeys(["GS417", "GS418", "GS501", "GS502", "GS506", "GS507", "GS508", "GS509", "GS516"], ANEW),
    **dict.fromkeys(["GS223", "GS504", "GS510", "GS511", "GS519", "GS520"], ELSEWHERE),
}
