"""Blocks that are complete stay; the last one is drawn again until it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tinyllm.chat.markdown_stream import MarkdownStream, Tail, last_block, render

TEXT = """# Title

A paragraph with **bold** and `code`,
in two lines.

- one

- two
  - three

```python
def f():

    return "# no title"
```

| a | b |
|---|---|
| 1 | 宽 |

The end: e\u0301 👩‍👩‍👧"""


def plain(width: int = 60) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("width", [24, 60])
def test_pieces_give_what_the_whole_gives(size: int, width: int) -> None:
    whole, streamed = plain(width), plain(width)
    whole.print(render(TEXT))
    stream = MarkdownStream(streamed)
    for start in range(0, len(TEXT), size):
        stream.add(TEXT[start : start + size])
    stream.finish()
    assert words(printed(streamed)) == words(printed(whole))


def test_a_block_is_complete_when_another_has_begun() -> None:
    assert last_block("one") == 0
    assert last_block("one\n\ntwo") == len("one\n\n")
    assert last_block("- a\n\n- b") == 0  # one list
    assert last_block("```\na\n\nb\n") == 0  # a fence that is open
    assert last_block("# a\ntext") == len("# a\n")


def test_the_end_of_what_is_too_high_is_shown() -> None:
    console = Console(file=io.StringIO(), width=20, height=6, force_terminal=True, color_system=None)
    console.print(Tail(render("\n\n".join(f"line {i}" for i in range(30)))))
    assert "line 29" in printed(console) and "line 20" not in printed(console)


CODE = ["def f():", '    return "wider than the terminal is"', "", "    # the end"]


@pytest.mark.parametrize("indent", ["", "   ", "      "])
def test_code_is_printed_as_it_is_copied(indent: str) -> None:
    """Nothing stands before or after a line, in a list neither, and none is broken."""
    console = plain(24)
    lead = {"": "Text:\n\n", "   ": "1. Text:\n", "      ": "1. Text:\n   - More:\n"}[indent]
    stream = MarkdownStream(console)
    stream.add(lead + "\n".join(f"{indent}{line}".rstrip() for line in ["```python", *CODE, "```"]) + "\n\nThe end.")
    stream.finish()
    shown = printed(console).split("\n")
    start = shown.index(CODE[0])
    assert shown[start : start + len(CODE)] == CODE
    assert shown[-2:] == ["The end.", ""]


def test_code_that_is_drawn_again_and_again_is_folded() -> None:
    console = plain(24)
    console.print(Tail(render("\n".join(["```", *CODE, "```"]), fold_code=True)))
    lines = printed(console).splitlines()
    assert max(map(len, lines)) <= 24 and "is" in "".join(lines).split('"')[1]


def test_paragraphs_are_not_padded() -> None:
    console = plain(24)
    console.print(render("one two three four five six seven"))
    assert printed(console).splitlines() == ["one two three four five ", "six seven"]


def test_nothing_is_printed_for_nothing() -> None:
    console = plain()
    stream = MarkdownStream(console)
    stream.add("")
    stream.add("\n \n")
    stream.finish()
    assert printed(console) == ""
