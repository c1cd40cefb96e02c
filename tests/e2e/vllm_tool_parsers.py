"""Reads turns with vLLM's own tool parsers, in the engine's environment: JSON lines in, JSON lines out.

A line of stdin is `[parser, text]`, by the parser's name in `--tool-call-parser`; a line of stdout is the calls that it
finds, as pairs of name and arguments, or why it fails. The tokenizer is a stand-in that has a token for each byte and
for each marker of `stdin`'s first line: a model's own has them, too.
"""

from __future__ import annotations

import json
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


def make_tokenizer(markers):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main():
    markers, tools = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(markers)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
    for line in sys.stdin:
        name, text = json.loads(line)
        try:
            parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
            found = parser.extract_tool_calls(text, request=parser.adjust_request(request))
            reply = [[each.function.name, json.loads(each.function.arguments)] for each in found.tool_calls]
        except Exception as exc:  # whatever it is, it is the parser's answer
            reply = f"{type(exc).__name__}: {exc}"
        sys.stdout.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
