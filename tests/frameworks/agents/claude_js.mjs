// @anthropic-ai/sdk: its toolRunner, which asks without a thread once that is refused.
import fs from "fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
const question = JSON.parse(fs.readFileSync(process.env.AGENT_TASK, "utf8"));
const client = new Anthropic();
const multiply = betaZodTool({ name: "multiply", description: "Multiply.", inputSchema: z.object({ a: z.number(), b: z.number() }), run: ({ a, b }) => String(a * b) });
const message = await client.beta.messages.toolRunner({ model: "policy", max_tokens: 99, messages: [{ role: "user", content: question }], tools: [multiply] }).runUntilDone();
const text = message.content.map((b) => b.text ?? "").join("");
fs.writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: text.includes("12") ? 1 : 0 }));
