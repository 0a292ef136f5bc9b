"""The agents of conversations.py in one process of their own: it plays a conversation for each connection.

It prints its port. A connection sends one line of JSON, and gets an empty one at the conversation's end.
"""

import asyncio
import json
import random
from typing import Any

from openai import AsyncOpenAI


async def slow_agent(client: AsyncOpenAI, task: dict[str, Any]) -> None:
    """Asks the policy, and answers each turn after a random time, as SlowTool does."""
    dice, messages = random.Random(task["seed"]), [{"role": "user", "content": "begin"}]
    tools = {"tools": task["tools"]} if task.get("tools") else {}
    for _ in range(task["turns"]):
        response = await client.chat.completions.create(model="policy", messages=messages, **tools)
        message = response.choices[0].message
        await asyncio.sleep(dice.uniform(0, task["most_seconds"]))
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            messages.append({"role": "user", "content": task["says"]})
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": task["says"]})


async def main() -> None:
    shared = AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each session", timeout=None, max_retries=0)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        given = json.loads(await reader.readline())
        await slow_agent(shared.with_options(**given["address"]), given["task"])
        writer.write(b"\n")
        writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
