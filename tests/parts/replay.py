"""A checker of rollouts that knows nothing but the HTTP log of their agents: each request, and the message it got.

It shares no code with the gateway: what a trace must hold is written here a second time.
"""

import json
from typing import Any, NamedTuple

from torchtitan_rl.types import Completion, Prompt


class Exchange(NamedTuple):
    """One request for a chat completion, and the policy's message in its answer."""

    request: dict[str, Any]
    answer: dict[str, Any]


def text_of(message: dict[str, Any]) -> str:
    """The text that the small chat template shows of a message: a call is written as the scripted policy writes it."""
    called = message.get("tool_calls") or ()
    calls = [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in called]
    return (message["content"] or "") + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def context_of(request: dict[str, Any], tokenizer) -> list[int]:
    """The tokens that the policy must have read before it answered a request."""
    text = ""
    if request.get("tools"):
        tools = (tool["function"] for tool in request["tools"])
        shown = [f"{tool['name']}({', '.join(tool['parameters']['properties'])})\n" for tool in tools]
        text += f"<|system|>{''.join(shown)}<|endoftext|>"
    for message in request["messages"]:
        text += f"<|{message['role']}|>{text_of(message)}<|endoftext|>"
    return tokenizer(f"{text}<|assistant|>", add_special_tokens=False)["input_ids"]


def sampled_runs(prompt: Prompt, completion: Completion) -> list[tuple[list[int], list[int]]]:
    """(all tokens of the trace before it, its tokens) of each run of sampled tokens."""
    runs = []
    begins = [*(trace.begin for trace in completion.traces), len(completion.token_ids)]
    for number, (begin, end) in enumerate(zip(begins, begins[1:])):
        before = prompt.token_ids.tolist() if number == 0 else []
        place = begin
        while place < end:
            last = place
            while last < end and completion.loss_mask[last] == completion.loss_mask[place]:
                last += 1
            tokens = completion.token_ids[place:last].tolist()
            if completion.loss_mask[place]:
                runs.append(([*before], tokens))
            before += tokens
            place = last
    return runs


def faults(log: list[Exchange], prompt: Prompt, completion: Completion, tokenizer) -> list[str]:
    """What is wrong with a rollout; empty if each answer was trained once, after exactly what its request shows."""
    found = []
    expected = {}
    for exchange in log:
        said = tokenizer(f"{text_of(exchange.answer)}<|endoftext|>", add_special_tokens=False)["input_ids"]
        expected.setdefault(tuple(said), []).append(context_of(exchange.request, tokenizer))
    for before, said in sampled_runs(prompt, completion):
        contexts = expected.get(tuple(said), [])
        if before in contexts:
            contexts.remove(before)
        elif contexts:
            found.append(f"other context of {tokenizer.decode(said)!r}: {tokenizer.decode(before)!r}")
        else:
            found.append(f"no request got {tokenizer.decode(said)!r}, or it is trained twice")
    for said, contexts in expected.items():
        found += [f"not trained: {tokenizer.decode(said)!r}"] * len(contexts)
    return found
