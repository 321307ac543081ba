"""The documents name what there is: every option, every spelling, every known tokenizer split."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from stepahead.config import ALIASES, EngineConfig
from stepahead.text.gguf_tokenizer import PRE_TOKENIZERS

ROOT = Path(__file__).parents[2]
USAGE = (ROOT / "docs" / "usage.md").read_text("utf-8")
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]


def test_usage_lists_every_option_and_its_other_spellings() -> None:
    table = USAGE[USAGE.index("| option |") : USAGE.index("What was settled")]
    named = set(re.findall(r"`(\w+)`", table))
    options = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert options <= named
    assert set(ALIASES) <= named


def test_usage_lists_the_known_pre_tokenizers_and_no_other() -> None:
    listed = USAGE[USAGE.index("refused by name:\n") : USAGE.index("- `toy` is")]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_is_left_to_be_filled_in(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert "@@" not in text
    assert "TODO" not in text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files(name: str) -> None:
    folder = (ROOT / name).parent
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text("utf-8"))
    assert [target for target in targets if not (folder / target).exists()] == []
