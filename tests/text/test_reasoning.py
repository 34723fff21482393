import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.text.reasoning import FORMATS, ReasoningSplitter

BY_NAME = {fmt.name: fmt for fmt in FORMATS}
THINK, HARMONY = BY_NAME["think"], BY_NAME["harmony"]


def split(fmt, *pieces, opened=False):
    splitter = ReasoningSplitter(fmt, opened=opened)
    given = [*map(splitter.add, pieces), splitter.finish()]
    return "".join(part.reasoning for part in given), "".join(part.answer for part in given)


def test_a_block_at_the_start_is_reasoning():
    assert split(THINK, "<think>\nTwo.\n</think>\n\nFour.\n") == ("Two.", "Four.\n")


def test_the_reasoning_that_the_prompt_opened_needs_no_opening_mark():
    """fault 25."""
    assert split(THINK, "a</think>b", opened=True) == ("a", "b")
    assert split(THINK, "<think>a</think>b", opened=True) == ("a", "b")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_tells_whether_it_opened_the_reasoning(prompt, opened):
    """fault 25."""
    assert THINK.opened_by(prompt) is opened


def test_marks_within_an_answer_are_text():
    text = "Write <think> and </think> around it."
    assert split(THINK, text) == ("", text)
    assert split(THINK, "<think>a</think>b </think> c") == ("a", "b </think> c")


def test_text_is_given_as_soon_as_it_is_known():
    splitter = ReasoningSplitter(THINK)
    pieces = ["<th", "ink>", "\n", "one", "\n", "two</", "think", ">", "\n\n", "yes", "\n"]
    given = [tuple(splitter.add(piece)) for piece in pieces]
    assert given == [("", "")] * 3 + [("one", ""), ("", ""), ("\ntwo", "")] + [("", "")] * 3 + [
        ("", "yes"), ("", "\n")
    ]  # fmt: skip
    assert not splitter.in_reasoning


def test_reasoning_that_never_closes_stays_reasoning():
    assert split(THINK, "<think>a\n</th") == ("a\n</th", "")


def test_an_answer_that_only_begins_like_a_mark_is_whole():
    assert split(THINK, " <thi", "s>") == ("", " <this>")
    assert split(THINK, "\n<thi") == ("", "\n<thi")


def test_without_a_format_all_is_answer():
    assert split(None, "<think>a</think>b") == ("", "<think>a</think>b")


@pytest.mark.parametrize("name", ["think", "magistral", "seed", "kimi", "exaone", "apertus", "gemma4"])
def test_every_family_has_its_marks(name):
    opening, closing = BY_NAME[name].marks
    assert split(BY_NAME[name], f"{opening}a{closing}b") == ("a", "b")


def test_command_a_answers_between_marks_of_its_own():
    text = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>"
    assert split(BY_NAME["command-a"], text) == ("a", "b")


def test_harmony_channels_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait. <|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert split(HARMONY, text) == split(HARMONY, *text) == ("Think.", "Wait. Done.")


MARKS = ["<think>", "</think>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "\n", "a", " "]


@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(MARKS), max_size=8), st.booleans())
def test_the_result_is_the_same_for_any_pieces(fmt, parts, opened):
    text = "".join(parts)
    assert split(fmt, *parts, opened=opened) == split(fmt, *text, opened=opened) == split(fmt, text, opened=opened)


@given(st.text("ab<>/\n think", max_size=20), st.text("ab<>/\n think", max_size=20))
def test_pieces_rejoin(reasoning, answer):
    """Nothing is lost but the marks and the line breaks beside them."""
    if THINK.opening in reasoning or "</think>" in reasoning:
        return
    assert split(THINK, f"<think>{reasoning}</think>{answer}") == (reasoning.strip("\n"), answer.lstrip("\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hunyuan", "<think>\na\n</think>\n<answer>\nb\n</answer>"),
        ("solar", "<|think|>a<|end|><|begin|>assistant<|content|>b"),
        ("gemma4", "<|channel>thought\na<channel|>b"),
    ],
)
def test_marks_of_several_parts_are_found_in_any_pieces(name, text):
    assert split(BY_NAME[name], text) == ("a", "b")
    assert split(BY_NAME[name], *text) == ("a", "b")


def test_control_tokens_that_are_a_part_of_a_mark_are_shown():
    assert BY_NAME["gemma4"].shown == {"<|channel>", "<|channel>thought", "<channel|>"}
