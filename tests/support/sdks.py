"""The vendors' own Python SDKs behind one interface: what they parse of an answer, and raise of a problem.

Their imports take seconds, so each is imported where it is first used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}


class Reply(NamedTuple):
    """What an SDK made of an answer; `calls` are (id, name, arguments); `raw` is its own object."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, Any]]
    stop: str
    prompt_tokens: int
    completion_tokens: int
    raw: Any


class Sdk:
    """A client of one API, in blocking calls. A context manager, which closes it.

    Without `url` it finds address and key in the variables of the environment that its vendor has chosen.

    Attributes:
        base: what follows the gateway's URL in the address that the SDK is given.
    """

    base = ""
    open: Any

    def __init__(self, url="", key="none", retries=0):
        self.client: Any = self.open(url + self.base, key, retries) if url else self.open(None, None, retries)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.client.close()

    def user(self, text):
        return {"role": "user", "content": text}

    def raised(self, error):
        """Return class, status, the vendor's code, and `retry-after` of what the SDK raised."""
        body = error.body if isinstance(error.body, dict) else {}
        headers = error.response.headers
        inner = body.get("error", body)
        return (
            type(error).__name__,
            error.status_code,
            inner.get("code") or inner.get("type"),
            headers.get("retry-after"),
        )

    def raised_in_stream(self, error):
        """Return the same without what only a response has."""
        body = error.body if isinstance(error.body, dict) else {}
        return type(error).__name__, (body.get("error") or body).get("type")


class Chat(Sdk):
    """openai, by Chat Completions."""

    base = "/v1"

    def open(self, url, key, retries):
        import openai

        return openai.OpenAI(base_url=url, api_key=key, max_retries=retries, _strict_response_validation=True)

    def ask(self, history, tools=(), stream=False, **fields):
        if tools:
            functions = [{"name": name, "parameters": SCHEMA} for name in tools]
            fields["tools"] = [{"type": "function", "function": each} for each in functions]
        how = {"model": "m", "messages": history, **fields}
        if stream:
            import openai
            from openai.lib.streaming.chat import ChatCompletionStreamState

            state, reasoning = ChatCompletionStreamState(), ""
            for chunk in self.client.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, **how
            ):
                try:
                    state.handle_chunk(chunk)
                except openai.LengthFinishReasonError:  # it parses nothing of what was cut
                    continue
                for choice in chunk.choices:
                    reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            got: Any = state.current_completion_snapshot
        else:
            got = self.client.chat.completions.create(**how)
            reasoning = getattr(got.choices[0].message, "reasoning_content", None) or ""
        said = got.choices[0].message
        calls = [(each.id, each.function.name, each.function.arguments) for each in said.tool_calls or []]
        usage = got.usage
        return Reply(
            said.content or "", reasoning, calls, got.choices[0].finish_reason, usage.prompt_tokens,
            usage.completion_tokens, said,
        )  # fmt: skip

    def echo(self, reply):
        return [reply.raw.to_dict()]

    def results(self, reply, *texts):
        return [
            {"role": "tool", "tool_call_id": each[0], "content": text}
            for each, text in zip(reply.calls, texts, strict=True)
        ]

    def models(self):
        return [each.id for each in self.client.models.list()], self.client.models.retrieve("policy").id


class ResponseFailed(Exception):
    """The last event of a stream of Responses says that it failed: the SDK raises nothing of its own."""


class Responses(Sdk):
    """openai, by Responses."""

    base = "/v1"
    open = Chat.open
    models = Chat.models

    def ask(self, history, tools=(), stream=False, **fields):
        if tools:
            fields["tools"] = [
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in tools
            ]
        if "max_tokens" in fields:
            fields["max_output_tokens"] = fields.pop("max_tokens")
        if stream:
            with self.client.responses.stream(model="m", input=history, **fields) as events:
                *_, last = events  # the SDK's own last word would refuse one that is incomplete
                got = last.response
            if last.type == "response.failed":
                raise ResponseFailed(got.error.code)
        else:
            got = self.client.responses.create(model="m", input=history, **fields)
        thoughts = [part.text for item in got.output if item.type == "reasoning" for part in item.content]
        calls = [(item.call_id, item.name, item.arguments) for item in got.output if item.type == "function_call"]
        return Reply(
            got.output_text, "".join(thoughts), calls, got.status, got.usage.input_tokens, got.usage.output_tokens, got
        )

    def echo(self, reply):
        return [item.to_dict() for item in reply.raw.output]

    def raised_in_stream(self, error):
        return type(error).__name__, str(error)

    def results(self, reply, *texts):
        return [
            {"type": "function_call_output", "call_id": each[0], "output": text}
            for each, text in zip(reply.calls, texts, strict=True)
        ]

    def count(self, history):
        return self.client.responses.input_tokens.count(model="m", input=history).input_tokens


class Messages(Sdk):
    """anthropic."""

    def open(self, url, key, retries):
        import anthropic

        return anthropic.Anthropic(base_url=url, api_key=key, max_retries=retries, _strict_response_validation=True)

    def ask(self, history, tools=(), stream=False, **fields):
        if tools:
            fields["tools"] = [{"name": name, "input_schema": SCHEMA} for name in tools]
        how = {"model": "m", "messages": history, "max_tokens": 200, **fields}
        if stream:
            with self.client.messages.stream(**how) as events:
                got = events.get_final_message()
        else:
            got = self.client.messages.create(**how)
        text = "".join(block.text for block in got.content if block.type == "text")
        thoughts = "".join(block.thinking for block in got.content if block.type == "thinking")
        calls = [(block.id, block.name, block.input) for block in got.content if block.type == "tool_use"]
        usage = got.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        return Reply(text, thoughts, calls, got.stop_reason, prompt, usage.output_tokens, got)

    def echo(self, reply):
        return [{"role": "assistant", "content": reply.raw.content}]

    def results(self, reply, *texts):
        blocks = [
            {"type": "tool_result", "tool_use_id": each[0], "content": text}
            for each, text in zip(reply.calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def count(self, history):
        return self.client.messages.count_tokens(model="m", messages=history).input_tokens

    def models(self):
        return [each.id for each in self.client.models.list()], self.client.models.retrieve("policy").id


class Google(Sdk):
    """google-genai."""

    def open(self, url, key, retries):
        from google import genai
        from google.genai import types

        patient = types.HttpRetryOptions(attempts=retries + 1)
        options = types.HttpOptions(base_url=url, retry_options=patient if retries else None)
        return genai.Client(api_key=key, http_options=options)

    def user(self, text):
        from google.genai import types

        return types.UserContent(text)

    def ask(self, history, tools=(), stream=False, **fields):
        from google.genai import types

        functions = [types.FunctionDeclaration(name=name, parameters_json_schema=SCHEMA) for name in tools]
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=functions)] if tools else None,
            max_output_tokens=fields.get("max_tokens"),
            stop_sequences=fields.get("stop"),
        )
        how = {"model": "m", "contents": history, "config": config}
        made = self.client.models
        chunks = list(made.generate_content_stream(**how)) if stream else [made.generate_content(**how)]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
        calls = [
            (each.function_call.id, each.function_call.name, each.function_call.args)
            for each in parts
            if each.function_call
        ]
        usage = chunks[-1].usage_metadata
        return Reply(
            "".join(part.text for part in parts if part.text and not part.thought),
            "".join(part.text for part in parts if part.text and part.thought),
            calls,
            chunks[-1].candidates[0].finish_reason.name,
            usage.prompt_token_count,
            (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
            types.ModelContent(parts),
        )

    def echo(self, reply):
        return [reply.raw]

    def results(self, reply, *texts):
        from google.genai import types

        return [
            types.UserContent(
                [
                    types.Part(
                        function_response=types.FunctionResponse(id=each[0], name=each[1], response={"output": text})
                    )
                    for each, text in zip(reply.calls, texts, strict=True)
                ]
            )
        ]

    def count(self, history):
        return self.client.models.count_tokens(model="m", contents=history).total_tokens

    def models(self):
        return [each.name for each in self.client.models.list()], self.client.models.get(model="policy").name

    def raised(self, error):
        response = error.response
        return type(error).__name__, error.code, error.status, response.headers.get("retry-after")

    def raised_in_stream(self, error):
        return type(error).__name__, error.status


SDKS = {"chat": Chat, "responses": Responses, "messages": Messages, "google": Google}
