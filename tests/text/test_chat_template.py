import json
from pathlib import Path

import pytest
from text_cases import CHATS, TOOL, tool_chat

from tinyllm.errors import ChatTemplateError
from tinyllm.text import chat_template
from tinyllm.text.chat_template import ChatTemplate, find_templates

DATA = Path(__file__).parent / "data"
USER = {"role": "user", "content": "Hi"}


def render(source, messages=(USER,), **kwargs):
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


# -- equal to transformers

EXPECTED = json.loads((DATA / "rendered.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED["rendered"])
@pytest.mark.parametrize("chat", CHATS)
def test_a_prompt_is_that_of_transformers(name, chat):
    """fault 24, and the rest of what templates do; None where transformers rejects the chat as well."""
    expected = EXPECTED["rendered"][name][chat]
    source = (DATA / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({"default": source}, EXPECTED["special_tokens"])
    if expected is None:
        with pytest.raises(ChatTemplateError, match="rejects the messages"):
            template.render(**CHATS[chat])
    else:
        assert template.render(**CHATS[chat]) == expected


def test_json_is_written_as_it_is():
    """fault 24: no escapes for HTML or other alphabets, keys in their order."""
    tool = {"z": "天気 > 'now'", "a": "<&>"}
    expected = '{"z": "天気 > \'now\'", "a": "<&>"}'
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == expected
    assert render("{{ tools | tojson(indent=4) }}", tools=[tool]) == json.dumps([tool], ensure_ascii=False, indent=4)


def test_the_date_is_todays():
    from datetime import datetime

    before = datetime.now()
    told = render("{{ strftime_now('%d %b %Y') }}")
    assert told in [each.strftime("%d %b %Y") for each in (before, datetime.now())]  # midnight may lie between


def test_blocks_leave_no_line_breaks_behind():
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc") == "a\n  b\nc"


# -- messages


def test_a_template_that_rejects_a_role_speaks_for_itself():
    """fault 22."""
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role\\nnot supported') }}{% endif %}ok"
    with pytest.raises(ChatTemplateError, match="rejects the messages: System role not supported"):
        render(source, [{"role": "system", "content": "x"}, USER])
    assert render(source) == "ok"


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city":"Zürich"}'])
def test_tool_arguments_are_a_mapping_and_a_text(arguments):
    """fault 23: for templates that iterate, that serialise, and that concatenate."""
    call = "messages[2].tool_calls[0].function"
    chat = tool_chat(arguments)
    assert render(
        "{% for k, v in CALL.arguments.items() %}{{ k }}={{ v }}{% endfor %}".replace("CALL", call), chat
    ) == ("city=Zürich")
    assert render("{{ CALL.arguments | tojson }}".replace("CALL", call), chat) == '{"city": "Zürich"}'
    text = arguments if isinstance(arguments, str) else '{"city": "Zürich"}'
    assert render("{{ '<' + CALL.arguments + '>' }}".replace("CALL", call), chat) == f"<{text}>"
    both = "{% if CALL.arguments is string %}{{ CALL.arguments }}{% else %}{{ CALL.arguments | tojson }}{% endif %}"
    assert render(both.replace("CALL", call), chat) == text


@pytest.mark.parametrize("arguments", ['{"city": ', "", "{'city': 1}"])
def test_tool_arguments_that_are_not_json_are_an_error(arguments):
    """fault 23."""
    with pytest.raises(ChatTemplateError, match="arguments of a tool call are not JSON"):
        render("x", tool_chat(arguments))


def test_arguments_of_another_kind_stay_as_they_are():
    assert render("{{ messages[2].tool_calls[0].function.arguments }}", tool_chat("[1]")) == "[1]"
    assert render("{{ messages[2].tool_calls[0].function.arguments }}", tool_chat([1])) == "[1]"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_any_of_its_names(key):
    """fault 25: a turn's reasoning goes back to the template apart from the answer."""
    message = {"role": "assistant", "content": "b", key: "a"}
    assert render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", [message]) == "aa"


def test_what_a_template_reads_is_known_without_rendering():
    switch = ChatTemplate({"default": "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"})
    assert switch.reads("thinking", "enable_thinking") and not switch.reads("thinking")
    own = ChatTemplate(
        {"default": "{% set thinking = 1 %}{% for m in messages %}{{ m.thinking }}{{ thinking }}{% endfor %}"}
    )
    assert own.reads("messages") and not own.reads("thinking")
    with pytest.raises(ChatTemplateError, match="broken in line 1"):
        ChatTemplate({"default": "{% if %}"}).reads("thinking")


def test_messages_are_not_changed():
    chat = tool_chat('{"city": 1}')
    before = json.dumps(chat)
    render("{{ messages[2].tool_calls[0].function.arguments.city }}", chat)
    assert json.dumps(chat) == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [([{"role": "user", "content": object()}], "JSON values only, not object"), (["hi"], "a mapping, not str")],
)
def test_what_is_no_message_is_an_error(messages, message):
    with pytest.raises(ChatTemplateError, match=message):
        render("{{ messages[0].content }}", messages)


@pytest.mark.parametrize("depth", [150, 20_000])
def test_messages_nested_too_deeply_are_an_error(depth):
    content = "x"
    for _ in range(depth):
        content = [content]
    with pytest.raises(ChatTemplateError, match="nested more than 100 deep"):
        render("x", [{"role": "user", "content": content}])


def test_subclasses_are_plain_values_to_a_template():
    class Text(str):
        def shout(self):
            return "!"

    with pytest.raises(ChatTemplateError, match="no attribute 'shout'"):
        render("{{ messages[0].content.shout() }}", [{"role": "user", "content": Text("a")}])


# -- where templates are


def test_no_template_is_found_where_there_is_none(tmp_path):
    """fault 21."""
    assert find_templates(tmp_path, {}) == {}


def test_a_template_is_the_same_inline_beside_and_in_the_older_file(tmp_path):
    """fault 21."""
    source = "{{ messages[0].content }} 日本\n"
    assert find_templates(tmp_path, {"chat_template": source}) == {"default": source}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    assert find_templates(tmp_path, {}) == {"default": source}
    (tmp_path / "chat_template.json").unlink()
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    assert find_templates(tmp_path, {}) == {"default": source}


def test_the_file_beside_comes_before_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    templates = find_templates(tmp_path, {"chat_template": "config"})
    assert templates == {"default": "file", "tool_use": "tools"}


def test_named_templates_are_chosen_by_tools_and_by_name():
    config = {"chat_template": [{"name": n, "template": f"{n}!"} for n in ("default", "tool_use", "rag")]}
    template = ChatTemplate(find_templates(Path("/absent"), config))
    assert template.render([USER]) == "default!"
    assert template.render([USER], tools=[TOOL]) == "tool_use!"
    assert template.render([USER], template="rag") == "rag!"
    with pytest.raises(ChatTemplateError, match=r"named 'x'; the model has: default, rag, tool_use"):
        template.render([USER], template="x")


@pytest.mark.parametrize("entry", [3, [3], [{"name": "x"}], {"a": 1}])
def test_a_config_with_no_template_in_it_is_an_error(entry):
    with pytest.raises(ChatTemplateError, match="neither a text nor a list"):
        find_templates(Path("/absent"), {"chat_template": entry})


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_broken_older_file_is_an_error(tmp_path, content):
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ChatTemplateError, match=r"chat_template\.json"):
        find_templates(tmp_path, {})


def test_a_template_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja cannot be read"):
        find_templates(tmp_path, {})


def test_a_template_that_is_too_large_is_an_error(tmp_path, monkeypatch):
    """fault 54."""
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_BYTES", 10)
    (tmp_path / "chat_template.jinja").write_text("x" * 11)
    with pytest.raises(ChatTemplateError, match="larger than 10 bytes"):
        find_templates(tmp_path, {})
    with pytest.raises(ChatTemplateError, match="larger than 10 bytes"):
        ChatTemplate({"default": "x" * 11})


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a", "{% for x in y %}", "{{ 1 | nosuchfilter }}", "{{ " + "(" * 5000]
)
def test_a_broken_template_is_an_error_of_one_line(source):
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


TEXT_ONLY = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}\n{% endfor %}"
)
PARTS = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]


@pytest.mark.parametrize("source", [TEXT_ONLY, PARTS_ONLY, EITHER], ids=["text", "parts", "either"])
@pytest.mark.parametrize("content", ["Hello you", PARTS], ids=["a text", "parts"])
def test_content_is_given_as_the_template_takes_it(source, content):
    template = ChatTemplate({"default": source})
    assert template.render([{"role": "user", "content": content}]).strip() == "[user] Hello you"


def test_a_part_that_is_no_text_is_refused_by_a_template_of_texts():
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(ChatTemplateError, match="'image_url', and this model's template takes text only"):
        ChatTemplate({"default": TEXT_ONLY}).render([{"role": "user", "content": [*PARTS, image]}])


def test_a_template_that_wants_more_than_one_message_gets_content_as_it_is():
    source = "{% if messages | length < 2 %}{{ raise_exception('more') }}{% endif %}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate({"default": source}).render(messages) == "a"
