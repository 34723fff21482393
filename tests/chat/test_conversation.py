"""What is taken back, forgotten and put to a template."""

from __future__ import annotations

from tinyllm.chat.conversation import Conversation, Message


def talk(*contents: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(system, [Message(roles[i % 2], content) for i, content in enumerate(contents)])


def test_a_prompt_begins_with_the_system_message() -> None:
    prompt = talk("a", "b", system="s").prompt(Message("user", "c"))
    assert [(m["role"], m["content"]) for m in prompt] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_fault_25_reasoning_is_no_part_of_what_was_said() -> None:
    """A template decides whether it keeps the reasoning of earlier turns."""
    said = Message("assistant", "b", reasoning="hm")
    assert said.for_template() == {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert "reasoning_content" not in Message("assistant", "b").for_template()


def test_undo_takes_back_a_question_with_its_answer() -> None:
    conversation = talk("a", "b", "c", "d")
    assert conversation.undo() == "c" and len(conversation.messages) == 2
    conversation.messages.append(Message("user", "e"))
    assert conversation.undo() == "e"
    assert conversation.undo() == "a" and conversation.undo() is None


def test_the_oldest_exchange_is_forgotten_whole() -> None:
    conversation = talk("a", "b", "c", "d", "e", system="s")
    for left in (["c", "d", "e"], ["e"], [], []):
        conversation.drop_oldest()
        assert [m.content for m in conversation.messages] == left
    assert conversation.system == "s"


def test_last_words() -> None:
    conversation = talk("a", "b", "c")
    assert conversation.last_question == "c"
    assert conversation.last_answer == Message("assistant", "b")
    assert Conversation().last_question is None and Conversation().last_answer is None


def test_a_message_without_an_answer_is_joined_with_the_next_one() -> None:
    conversation = Conversation("s", [Message("user", "a"), Message("assistant", "b"), Message("user", "c")])
    prompt = conversation.prompt(Message("user", "d"))
    assert [(m["role"], m["content"]) for m in prompt] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c\n\nd"),
    ]
