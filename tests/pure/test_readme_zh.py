"""README.zh-CN.md keeps step with README.md: the same blocks, line by line, in another language.

Blocks are what empty lines part: headings, paragraphs, tables, pictures, fenced code.  The n-th of
one file is the n-th of the other and has as many lines, so that a change here is a change there in
the same place.  A failure names both places and says what to change.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
HAN = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\d+(?:[.,/]\d+)*")
LINK = re.compile(r"(!?)\[[^]]*\]\(([^)]+)\)")
CODE = re.compile(r"`[^`]+`")
# a comma, colon and so on of ours right behind a Chinese character
NARROW = re.compile(r"[\u4e00-\u9fff][,;:?!]")


@dataclass(frozen=True)
class Block:
    """Lines that stand together; `line` is where they begin, from 1."""

    line: int
    text: str

    @property
    def kind(self) -> str:
        if level := re.match(r"(#+) ", self.text):
            return f"a heading of level {len(level[1])}"
        for begin, name in (
            ("```", "code"),
            ("|", "a table"),
            ("![", "a picture"),
            ("- ", "a list"),
        ):
            if self.text.startswith(begin):
                return name
        return "a paragraph"

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    kept: list[str] = []
    fenced = False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fenced ^= line.startswith("```")
        if line or fenced:
            kept.append(line)
        elif kept:
            found.append(Block(number - len(kept), "\n".join(kept)))
            kept = []
    return found


def links(text: str) -> Counter[str]:
    """What is pointed to; each README points to the other."""
    targets = [mark + target for mark, target in LINK.findall(text)]
    return Counter("the other" if target in (ENGLISH, CHINESE) else target for target in targets)


def numbers(line: str) -> Counter[str]:
    """Numbers outside of code and links, where those are compared as they are."""
    return Counter(NUMBER.findall(CODE.sub("", LINK.sub("", line))))


def words_in_code(text: str) -> Counter[str]:
    return Counter(CODE.findall(text))


def difference(english: Block, chinese: Block) -> str | None:
    """What is to be changed in the Chinese block, None if it keeps step."""
    if english.kind != chinese.kind:
        return f"this is {chinese.kind}, and should be {english.kind}"
    if english.kind == "code":
        return None if english.text == chinese.text else "copy the code from there, byte for byte"
    if len(english.lines) != len(chinese.lines):
        return f"give it {len(english.lines)} lines, as there; it has {len(chinese.lines)}"
    if missing := differing(links(english.text), links(chinese.text)):
        return f"links and pictures: {missing}"
    if missing := differing(
        Counter(CODE.findall(english.text)), Counter(CODE.findall(chinese.text))
    ):
        return f"words in `code`: {missing}"
    for place, (there, here) in enumerate(zip(english.lines, chinese.lines, strict=True)):
        if english.kind == "a table" and (wrong := differing_cells(there, here)):
            return f"row {place + 1}: {wrong}"
    if missing := differing(numbers(english.text), numbers(chinese.text)):
        return f"numbers: {missing}"
    if re.search(r"[a-z]{3}", CODE.sub("", LINK.sub("", english.text))) and not HAN.search(
        chinese.text
    ):
        # but for a bare list of names
        return None if english.text == chinese.text == "# stepahead" else "it is not in Chinese"
    narrow = NARROW.search(chinese.text)
    return f"write the Chinese sign: {narrow[0]!r}" if narrow else None


def differing(there: Counter[str], here: Counter[str]) -> str:
    words = []
    if more := there - here:
        words.append(f"put in {', '.join(sorted(more.elements()))}")
    if more := here - there:
        words.append(f"take out {', '.join(sorted(more.elements()))}")
    return "; ".join(words)


def differing_cells(there: str, here: str) -> str:
    theirs, ours = (line.strip("|").split("|") for line in (there, here))
    if len(theirs) != len(ours):
        return f"{len(theirs)} cells, as there; it has {len(ours)}"
    for cell, own in zip(theirs, ours, strict=True):
        if wrong := differing(numbers(cell), numbers(own)):
            return f"the cell {own.strip()!r}: {wrong}"
    return ""


def compared(english: str, chinese: str) -> str:
    """All that is to be changed, a line each; nothing if they keep step."""
    theirs, ours = blocks(english), blocks(chinese)
    told = []
    for there, here in zip(theirs, ours, strict=False):
        if what := difference(there, here):
            told.append(f"{CHINESE}:{here.line} (as {ENGLISH}:{there.line}): {what}")
            if there.kind != here.kind:
                break  # one was put in or taken out, and all that follow are shifted
    else:
        rest = theirs[len(ours) :] or ours[len(theirs) :]
        if rest:
            file, what = (CHINESE, "missing") if len(theirs) > len(ours) else (CHINESE, "too many")
            told.append(f"{file}: {what}: {rest[0].kind}, {rest[0].lines[0]!r}")
    return "\n".join(told)


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_chinese_readme_keeps_step_with_the_english_one() -> None:
    assert compared(read(ENGLISH), read(CHINESE)) == ""


def test_the_readmes_point_to_each_other() -> None:
    assert f"]({CHINESE})" in read(ENGLISH)
    assert f"]({ENGLISH})" in read(CHINESE)


def test_what_is_out_of_step_is_told_with_its_place() -> None:
    chinese = read(CHINESE)
    lines = chinese.split("\n")
    heading = next(i for i, line in enumerate(lines) if line.startswith("## "))
    code = next(i for i, line in enumerate(lines) if line.startswith(".venv/bin/stepahead chat"))
    row = next(i for i, line in enumerate(lines) if line.startswith("| 每多一行"))
    changes = {
        heading: ("#" + lines[heading], "a heading of level 3, and should be a heading of level 2"),
        code: (lines[code] + " ", "byte for byte"),
        row: (lines[row].replace("0.010", "0.011"), "put in 0.010; take out 0.011"),
    }
    for place, (line, words) in changes.items():
        told = compared(read(ENGLISH), "\n".join([*lines[:place], line, *lines[place + 1 :]]))
        assert told.startswith(f"{CHINESE}:")
        assert words in told
        assert told.count("\n") == 0
    assert "missing" in compared(read(ENGLISH) + "\n\nOne more.", chinese)
    assert "the other" in compared(read(ENGLISH), chinese.replace(f"]({ENGLISH})", "](x.md)"))
    assert "not in Chinese" in compared(read(ENGLISH), read(ENGLISH))
