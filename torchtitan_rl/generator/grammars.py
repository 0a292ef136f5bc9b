"""Grammars of the policy's turns, for what agents ask with `response_format`, `tool_choice` and `structured_outputs`.

The engine gives the tokens that a grammar does not allow the logit -inf. `KeptTokens` records the others, so that the trainer
scores with the distribution that was sampled from.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from llguidance.torch import allocate_token_bitmask
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import check_json_nesting
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 32_768
"""Maximum length of a request's schemas."""

MOST_COUNT = 10_000
"""Maximum of a schema's counts of items and properties: the time to compile a grammar grows with them."""

MOST_SPACES = 32
"""White space that JSON may have in one place. Without a limit, a policy may write nothing else."""

LARGEST = 10**18
"""Largest absolute value of a number. Without a limit, a policy may write 1e999, which is no finite number."""

_LIMITS = LLParserLimits(max_grammar_size=50_000, verbose_errors=False)

_ANY = "any-json"
_ANY_JSON = {"$ref": f"#/$defs/{_ANY}"}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_WITHIN = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_ELSEWHERE = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
"""Keywords that say where a schema's values are described."""

_NAMING = {"$ref", "anyOf", "oneOf", "allOf", "properties", "patternProperties", "required"}
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")


class Grammars:
    """Makes and compiles the grammars of one engine, in the place of vLLM's backend. Several threads may use it."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tool_call_parser: str,
        end_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`vocab_size` is the model's. Raises ValueError if the tokenizer has no fast form."""
        self.vocab_size = max(vocab_size, len(tokenizer))
        self.tokenizer = from_tokenizer(tokenizer, self.vocab_size, eos_token=list(end_token_ids))
        template = str(tokenizer.chat_template)
        self._thinks = "</think>" in template
        self._calls = call_form(tool_call_parser, template)

    def compile_grammar(
        self, kind: Any, grammar: str, stop_token_ids: Collection[int] = ()
    ) -> GuidanceGrammar:
        """Returns what a request starts with: after the tokens "begun" of a turn that goes on."""
        rules = json.loads(grammar)
        begun = rules.pop("begun", ())
        matcher = LLMatcher(self.tokenizer, json.dumps(rules), log_level=0, limits=_LIMITS)
        matcher.consume_tokens(list(begun))
        return GuidanceGrammar(matcher, self.tokenizer, self.vocab_size)

    def allocate_token_bitmask(self, rows: int) -> Tensor:
        """Returns a bitmask [rows, ceil(V / 32)]."""
        return allocate_token_bitmask(rows, self.vocab_size)

    def destroy(self) -> None:
        """Nothing is open."""

    def of(
        self,
        schema: Any,
        tools: Sequence[Mapping[str, Any]],
        *,
        texts: Sequence[str] = (),
        begins_thinking: bool = False,
    ) -> str:
        """Returns the grammar of a turn that is JSON as `schema` asks, one of `texts`, or calls of `tools`: see `Answer`.

        Args:
            schema: a JSON schema; None: no JSON.
            tools: the functions that may be called; none: no calls.
            begins_thinking: whether the turn begins inside a `<think>` block.

        Raises:
            ValueError: in words, if no grammar follows them.
        """
        request = json.dumps([schema, *tools, *texts])
        if len(request) > MOST_CHARACTERS:
            raise ValueError(
                f"schemas of {len(request):,} characters; expected at most {MOST_CHARACTERS:,}"
            )
        try:
            check_json_nesting(request)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from None
        forms, schemas = [json.dumps(text) for text in texts], {}
        if schema is not None:
            forms.append("@json")
            schemas["json"] = json_as(schema)
        if tools:
            forms.append(self._form_of_calls(tools, schemas))
        rules = f"form: {' | '.join(forms)}\n"
        if begins_thinking or self._thinks:
            begin = "" if begins_thinking else '"<think>" '
            rules += f'thoughts[lazy]: THOUGHTS\nTHOUGHTS: {begin}/(.|\\n)*/ "</think>"\n'
            rules += f"start: thoughts{'' if begins_thinking else '?'} /[ \\n]*/ form\n"
        else:
            rules += "start: form\n"
        grammar = _grammar(rules, schemas)
        self._check(grammar)
        return grammar

    def _check(self, grammar: str) -> None:
        """Raises ValueError if this is no grammar, or one that no text follows."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ValueError(f"no grammar follows it: {' '.join(matcher.get_error().split())}")
        matcher.compute_bitmask()  # finds that the first token has no choice
        if matcher.is_stopped():
            raise ValueError("no text follows it")

    def _form_of_calls(self, tools: Sequence[Mapping[str, Any]], schemas: dict[str, Any]) -> str:
        """Returns the form of calls of these tools, with arguments as their schemas ask where a grammar can follow them.

        Adds the arguments' schemas to `schemas`.
        """
        if self._calls is None:
            raise ValueError(
                "there is no grammar here for the form in which the policy writes tool calls"
            )
        begin, end, separator = self._calls
        calls: list[str] = []
        for number, tool in enumerate(tools):
            function, arguments = tool["function"], json_as({"type": "object"})
            with contextlib.suppress(ValueError):
                asked = json_as(function.get("parameters") or {"type": "object"})
                self._check(_grammar("start: @json\n", {"json": asked}))
                arguments = asked
            schemas[f"arguments{number}"] = arguments
            begins = json.dumps(begin % json.dumps(function["name"]))
            calls.append(f"{begins} @arguments{number} {json.dumps(end)}")
        call = f"({' | '.join(calls)})"
        return f"{call} ({json.dumps(separator)} {call})*"


def _grammar(rules: str, schemas: Mapping[str, Any]) -> str:
    """Rules in Lark's notation, with JSON by the name of its schema."""
    parts = [{"name": name, "json_schema": schema} for name, schema in schemas.items()]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *parts]})


def call_form(tool_call_parser: str, template: str) -> tuple[str, str, str] | None:
    """Returns what the policy writes before the arguments of a call of %s, after them, and between calls; None if unknown."""
    line = "\n" if "<tool_call>" in template else ""
    hermes = f'<tool_call>{line}{{"name": %s, "arguments": ', f"}}{line}</tool_call>", "\n"
    llama = '{"name": %s, "parameters": ', "}", "; "
    is_known = line or "tool_calls" not in template
    auto = llama if 'parameters": dictionary' in template else hermes if is_known else None
    return {"auto": auto, "hermes": hermes, "llama3_json": llama}.get(tool_call_parser)


def json_as(schema: Any) -> dict[str, Any]:
    """Returns a schema of values that `schema` asks for and every reader of JSON takes.

    Numbers are finite. Objects with named properties have no others, unless the schema puts schemas together.

    Raises:
        ValueError: if it is no schema, or the grammar of its counts would be too large.
    """
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {schema!r:.80}; expected an object")
    narrowed = json.loads(json.dumps(schema))
    parts = list(_schemas(narrowed))
    for part in parts:
        for key in _COUNTS:
            if isinstance(part.get(key), int | float) and part[key] > MOST_COUNT:
                raise ValueError(f"{key} {part[key]:,}; expected at most {MOST_COUNT:,}")
    steps = [part["multipleOf"] for part in parts if "multipleOf" in part]
    if not all(isinstance(step, int) for step in steps) or math.lcm(*steps) > MOST_COUNT:
        raise ValueError(
            f"multipleOf {steps!r:.80}; expected integers whose multiple is at most {MOST_COUNT:,}"
        )
    if any(map(_is_combined, parts)):
        for part in parts:  # two schemas at once may not have arrays of any depth
            _narrow(part, rest=True, anything={"minimum": -LARGEST, "maximum": LARGEST})
    else:
        any_json: dict[str, Any] = {}
        for part in (*parts, any_json):
            _narrow(part, rest=False, anything=_ANY_JSON)
        if isinstance(narrowed.setdefault("$defs", {}), dict):
            narrowed["$defs"][_ANY] = any_json
    space = f"[ \\n\\r\\t]{{0,{MOST_SPACES}}}"
    narrowed["x-guidance"] = {
        "whitespace_flexible": False,
        "item_separator": f"{space},{space}",
        "key_separator": f"{space}:{space}",
        "coerce_one_of": True,
    }
    return narrowed


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself first. Those that are True become {}."""
    yield schema
    for key in schema.keys() & {*_BY_NAME, *_WITHIN}:
        value, places = schema[key], [(schema, key)]
        if isinstance(value, list):
            places = [(value, number) for number in range(len(value))]
        elif isinstance(value, dict) and key in _BY_NAME:
            places = [(value, name) for name in value]
        for container, place in places:
            if container[place] is True:
                container[place] = {}
            if isinstance(container[place], dict):
                yield from _schemas(container[place])


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Whether the properties of its values are named in several places."""
    named, parts = len(schema.keys() & _NAMING), schema.get("allOf")
    if isinstance(parts, list):
        named += len(parts) - 1
    return named > 1 and bool(schema.keys() & _ELSEWHERE)


def _narrow(schema: dict[str, Any], *, rest: bool, anything: Mapping[str, Any]) -> None:
    """Limit what a schema alone leaves open: numbers, and what is in arrays and objects.

    Args:
        rest: whether there may be keys and items beside those that are named.
        anything: the schema of keys and items without one.
    """
    if schema.keys() & _ELSEWHERE:
        return
    kinds = schema.get("type", ["array", "number", "object"])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "number" in kinds or "integer" in kinds:
        if "exclusiveMinimum" not in schema:
            schema.setdefault("minimum", -LARGEST)
        if "exclusiveMaximum" not in schema:
            schema.setdefault("maximum", LARGEST)
    if "array" in kinds:
        is_list = isinstance(schema.get("items"), list)
        others = rest or not (is_list or "prefixItems" in schema)
        schema.setdefault("additionalItems" if is_list else "items", others and anything)
    if "object" in kinds:
        others = rest or not (schema.get("properties") or schema.get("patternProperties"))
        schema.setdefault("additionalProperties", others and anything)
