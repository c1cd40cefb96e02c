"""What is remembered of a dialogue is the same whether it is shortened once or as it grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl_trio.chat.history import RECALLS, remembered, shape

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "long"}}}
OTHERS = st.sampled_from(["system", "user", "tool"]).flatmap(
    lambda role: st.sampled_from([{"role": role, "content": "a"}, {"role": role, "content": "b", "name": "f"}])
)
SPOKEN = st.sampled_from(
    [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "assistant", "content": "b", "thinking": "c", "reasoning_content": "c"},
    ]
)
TURNS = st.lists(st.tuples(SPOKEN, st.lists(OTHERS, max_size=3)), max_size=12)


@given(opening=st.lists(OTHERS, min_size=1, max_size=3), turns=TURNS)
def test_shortened_as_it_grows_or_at_once(opening, turns):
    for history in dict.fromkeys(recall.history for recall in RECALLS):
        dialogue, grown = list(opening), remembered(opening, history)
        for spoken, new in turns:
            dialogue += [spoken, *new]
            grown = remembered([*grown, spoken, *new], history)
            assert grown == remembered(dialogue, history)


@given(opening=st.lists(OTHERS, min_size=1, max_size=3), turns=TURNS)
def test_kinds_are_all_there_the_last_round_is_the_last_and_the_number_of_rounds_is_bounded(opening, turns):
    dialogue = [*opening, *(message for spoken, new in turns for message in (spoken, *new))]
    kept = remembered(dialogue, "kinds")
    kinds = {(message["role"], *message) for message in dialogue}
    assert {(message["role"], *message) for message in kept} == kinds
    last = shape(dialogue)[-1 - len(turns[-1][1]) :] if turns else shape(dialogue)
    assert kept[-len(last) :] == last
    assert sum(message["role"] == "assistant" for message in kept) <= len(kinds) + 1
    assert "long" not in repr(kept)
