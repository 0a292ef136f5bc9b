// @mastra/core: its Agent over an OpenAI-compatible address.
import { readFileSync, writeFileSync } from 'node:fs';
import { Agent } from '@mastra/core/agent';
import { createTool } from '@mastra/core/tools';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';

const provider = createOpenAICompatible({ name: 'run', baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const multiply = createTool({
  id: 'multiply', description: 'Multiply.', inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => ({ product: a * b }),
});
const agent = new Agent({ id: 'player', name: 'player', instructions: 'Be short.', model: provider('policy'), tools: { multiply } });
const question = JSON.parse(readFileSync(process.env.AGENT_TASK));
const text = process.env.SCENARIO === 'stream' ? await (await agent.stream(question)).text : (await agent.generate(question)).text;
writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: Number(text.includes('12')) }));
process.exit(0);
