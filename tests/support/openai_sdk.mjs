// Two turns with a tool by OpenAI's own SDK for JavaScript, by both of its APIs, as JSON: what it made of the answers,
// and what it raised. Arguments: the folder of modules, the base URL, the key.
const [modules, baseURL, apiKey] = process.argv.slice(2);
const { default: OpenAI } = await import(`${modules}/openai/index.mjs`);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const parameters = { type: "object", properties: { at: { type: "string" } } };
const RESULTS = ["dark", "light"];

async function chat(messages, stream) {
  const tools = [{ type: "function", function: { name: "look", parameters } }];
  const request = { model: "m", messages, tools };
  if (!stream) return (await client.chat.completions.create(request)).choices[0];
  const run = client.chat.completions.stream(request);
  let reasoning = "";
  for await (const chunk of run) reasoning += chunk.choices[0]?.delta.reasoning_content ?? "";
  const [choice] = (await run.finalChatCompletion()).choices;
  return { ...choice, message: { ...choice.message, reasoning_content: reasoning } };
}

async function chatTurns(name, stream) {
  const history = [{ role: "user", content: `What is there? (${name})` }];
  const { message } = await chat(history, stream);
  const { role, content, tool_calls, reasoning_content } = message;
  history.push({ role, content, tool_calls, reasoning_content });
  tool_calls.forEach((call, at) => history.push({ role: "tool", tool_call_id: call.id, content: RESULTS[at] }));
  const last = await chat(history, stream);
  const calls = tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return { text: content, reasoning: reasoning_content, calls, last: last.message.content, stop: last.finish_reason };
}

async function respond(input, stream) {
  const tools = [{ type: "function", name: "look", parameters, strict: false }];
  const request = { model: "m", input, tools };
  return stream ? client.responses.stream(request).finalResponse() : client.responses.create(request);
}

async function responsesTurns(name, stream) {
  const input = [{ role: "user", content: `What is there? (${name})` }];
  const first = await respond(input, stream);
  input.push(...first.output);
  const called = first.output.filter((item) => item.type === "function_call");
  called.forEach((call, at) => input.push({ type: "function_call_output", call_id: call.call_id, output: RESULTS[at] }));
  const last = await respond(input, stream);
  const [thought] = first.output.filter((item) => item.type === "reasoning");
  const calls = called.map((call) => [call.name, JSON.parse(call.arguments)]);
  const reasoning = thought.content[0].text;
  return { text: first.output_text, reasoning, calls, last: last.output_text, stop: last.status };
}

async function raised(work) {
  try {
    await work();
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
  return [];
}

async function problems(ask) {
  const hi = [{ role: "user", content: "Hi" }];
  const other = (options) => ask(client.withOptions(options), hi);
  return [
    await raised(() => ask(client, [{ role: "user", content: "blah ".repeat(2000) }])),
    await raised(() => other({ apiKey: "another" })),
    await raised(() => other({ baseURL: baseURL.replace("/abc/", "/xyz/") })),
  ];
}

const told = {};
for (const [api, turns] of Object.entries({ chat: chatTurns, responses: responsesTurns })) {
  for (const how of ["whole", "stream"]) told[`${api} ${how}`] = await turns(`${api} ${how}`, how === "stream");
}
told["chat problems"] = await problems((by, messages) => by.chat.completions.create({ model: "m", messages }));
told["responses problems"] = await problems((by, input) => by.responses.create({ model: "m", input }));
console.log(JSON.stringify(told));
