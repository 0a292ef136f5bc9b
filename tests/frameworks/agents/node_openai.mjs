// openai for Node: runTools over chat completions.
import fs from "fs";
import OpenAI from "openai";
const question = JSON.parse(fs.readFileSync(process.env.AGENT_TASK, "utf8"));
const client = new OpenAI();
const stream = process.env.SCENARIO === "stream";
const runner = client.chat.completions.runTools({ model: "policy", stream, messages: [{ role: "user", content: question }], tools: [{ type: "function", function: { name: "multiply", description: "Multiply.", function: ({ a, b }) => String(a * b), parse: JSON.parse, parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] } } }] });
const answer = await runner.finalContent();
fs.writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: String(answer).includes("12") ? 1 : 0 }));
