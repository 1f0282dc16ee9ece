"""Harmony, the channels of gpt-oss. The format shapes the whole reply, so it brings its own router."""

from __future__ import annotations

from firn.text.harmony import CALL, CHANNEL, CONTROL, MESSAGE, HarmonyCall, HarmonyRouter
from firn.text.parsers import Clues, ToolFormat


def _matches(clues: Clues) -> bool:
    return (CHANNEL in clues.template and MESSAGE in clues.template) or all(
        map(clues.has_token, (CHANNEL, MESSAGE, CALL))
    )


FORMATS = (
    ToolFormat(
        name="harmony",
        parser=HarmonyCall,
        router=HarmonyRouter,
        opens=(),
        tokens=CONTROL,
        aliases=("gpt_oss", "openai"),
        example=f"{CHANNEL}commentary to=functions.get_weather <|constrain|>json{MESSAGE}"
        f'{{"city": "Paris", "days": 3}}{CALL}',
        matches=_matches,
        rank=20,
    ),
)
