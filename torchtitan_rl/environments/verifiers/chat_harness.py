"""A harness of verifiers that asks the policy in the process of `server.py`: verifiers' own start a process for each turn."""

import json
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Goes on until the policy makes no tool call."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ()
        messages += map(message_to_wire, prompt)
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
            create = (await stack.enter_async_context(client)).chat.completions.create
            tools, places, connections = await connect_mcp(servers, stack)
            request = {"model": ctx.model, **({"tools": tools} if tools else {})}
            calls = True
            while calls:
                reply = (await create(messages=messages, **request)).choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                calls = reply.tool_calls
                for call in calls or ():
                    name, arguments = call.function.name, call.function.arguments
                    try:
                        answer = await call_mcp(connections, places, name, json.loads(arguments))
                    except (ValueError, KeyError) as error:
                        answer = f"error: {error!r}"
                    told = {"role": "tool", "tool_call_id": call.id, "content": answer}
                    messages.append(told)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
