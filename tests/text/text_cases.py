"""Texts and chats that the tokenizer tests and `make_expected.py` share."""

from __future__ import annotations

from typing import Any

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, two trailing  ",
    "The capital of France is Paris.\n\nThe capital of Japan is 東京。",
    "Grüße aus Zürich – naïve café, 100 % „richtig“",
    "Привет, мир! Γειά σου Κόσμε! שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก 안녕하세요 세계",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 🏳️‍🌈 and e\u0301 combined",
    "def f(x: int) -> int:\n    if x > 0:\n\t\treturn x ** 2  # squared\n    return -x\n",
    '{"key": [1, 2.5, -3e10, null], "quote": "\\"", "html": "<b>&amp;</b>"}',
    "1234567890 3.14159 1,000,000 0xFF",
    "don't DON'T we'll I'm they've",
    "tabs\t\ttabs\r\nwindows\r\n\r\n\r\nline breaks\n \n  \n",
    "a" * 100 + " " * 50 + "!" * 20,
    "\u3000全角スペース\u00a0and no-break\u200bzero width",
    "<b>bold</b> </think> [INST] ▁ Ġ <0x0A> ##ing",
]

SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "What is 2 + 2? <b>&'\" 東京"}
ASSISTANT = {"role": "assistant", "content": "4"}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather > now, in Kelvin's unit: 天気",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "a city & its <country>"}},
            "required": ["city"],
        },
    },
}


def tool_chat(arguments: Any) -> list[dict[str, Any]]:
    """A chat with a call of a tool whose arguments are a mapping, or its JSON text."""
    call = {"id": "call_0001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        SYSTEM,
        {"role": "user", "content": "How is Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0001", "name": "get_weather", "content": '{"kelvin": 290}'},
    ]


CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "history": {"messages": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "And 3 + 3?"}]},
    "no prompt": {"messages": [USER, ASSISTANT], "add_generation_prompt": False},
    "thoughts": {"messages": [USER, THOUGHT, {"role": "user", "content": "  sure?\n"}]},
    "no thinking": {"messages": [USER], "enable_thinking": False},
    "reasoning": {"messages": [USER, ASSISTANT | {"reasoning_content": "Count."}, USER, ASSISTANT, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "tool call": {"messages": tool_chat({"city": "Zürich", "days": 2}), "tools": [TOOL]},
    "tool call as text": {"messages": tool_chat('{"city":"Zürich","days":2}'), "tools": [TOOL]},
    "none values": {"messages": [USER, ASSISTANT | {"tool_calls": None}, USER]},
}
