// @openai/agents: its run over responses or chat completions.
import fs from "fs";
import { Agent, run, tool, setTracingDisabled, setOpenAIAPI } from "@openai/agents";
import { z } from "zod";
setTracingDisabled(true);
setOpenAIAPI(process.env.API || "responses");
const question = JSON.parse(fs.readFileSync(process.env.AGENT_TASK, "utf8"));
const multiply = tool({ name: "multiply", description: "Multiply.", parameters: z.object({ a: z.number(), b: z.number() }), execute: async ({ a, b }) => String(a * b) });
const agent = new Agent({ name: "bot", instructions: "Be short.", tools: [multiply], model: "policy" });
const result = await run(agent, question, { stream: process.env.SCENARIO === "stream" });
if (process.env.SCENARIO === "stream") { for await (const _ of result) {} await result.completed; }
fs.writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: String(result.finalOutput).includes("12") ? 1 : 0 }));
