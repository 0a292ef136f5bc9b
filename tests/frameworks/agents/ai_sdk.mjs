// The AI SDK: generateText or streamText with a tool, as its docs write it.
import { readFileSync, writeFileSync } from 'node:fs';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const model = process.env.AI_SDK_API === 'responses' ? openai.responses('policy') : openai.chat('policy');
const scenario = process.env.SCENARIO ?? '';
const multiply = tool({ description: 'Multiply.', inputSchema: z.object({ a: z.number(), b: z.number() }), execute: async ({ a, b }) => String(a * b) });
const options = { model, tools: { multiply }, prompt: JSON.parse(readFileSync(process.env.AGENT_TASK)), stopWhen: stepCountIs(6) };
if (scenario === 'trimmed history') options.prepareStep = ({ messages }) => ({ messages: messages.length > 3 ? [messages[0], ...messages.slice(-2)] : messages });
const text = scenario === 'stream' ? await streamText(options).text : (await generateText(options)).text;
writeFileSync(process.env.AGENT_RESULT, JSON.stringify({ reward: Number(text.includes('12')) }));
