// @voltagent/core: its Agent over the AI SDK's chat completions.
import { readFileSync, writeFileSync } from 'node:fs';
import { Agent, createTool } from '@voltagent/core';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const multiply = createTool({
  name: 'multiply', description: 'Multiply.', parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a * b),
});
const agent = new Agent({ name: 'player', instructions: 'Be short.', model: openai.chat('policy'), tools: [multiply] });
const question = JSON.parse(readFileSync(process.env.AGENT_TASK));
const text = process.env.SCENARIO === 'stream' ? await (await agent.streamText(question)).text : (await agent.generateText(question)).text;
writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: Number(text.includes('12')) }));
process.exit(0);
