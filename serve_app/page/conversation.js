// A chat as a tree of messages: an edited message or another answer is a sibling of the first one. The page
// shows the path from the root to `leaf`.

export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`; // browsers have no UUIDs for http:// on other hosts
}

export function newChat(model, settings) {
  return {
    id: newId(),
    title: "New chat",
    model,
    ...settings, // system, options, tools, think
    changed: Date.now(),
    nodes: {},
    next: 1,
    leaf: 0,
  };
}

// Adds a message below `parent` (0: the root) and makes it the end of the shown path.
export function add(chat, parent, message) {
  const id = chat.next++;
  chat.nodes[id] = { id, parent, ...message };
  chat.leaf = id;
  chat.changed = Date.now();
  if (chat.title === "New chat" && message.role === "user" && message.content.trim()) {
    chat.title = message.content.trim().split("\n")[0].slice(0, 60);
  }
  return chat.nodes[id];
}

export function path(chat) {
  const nodes = [];
  for (let node = chat.nodes[chat.leaf]; node; node = chat.nodes[node.parent]) nodes.push(node);
  return nodes.reverse();
}

export function siblings(chat, node) {
  return Object.values(chat.nodes).filter((other) => other.parent === node.parent);
}

// Shows the newest path through `node`.
export function showBranch(chat, node) {
  let last = node;
  for (;;) {
    const below = Object.values(chat.nodes).filter((other) => other.parent === last.id);
    if (!below.length) break;
    last = below.at(-1);
  }
  chat.leaf = last.id;
}

// Whether the path ends with a message, or with the results of all calls, that has no answer.
export function lacksAnswer(chat) {
  const nodes = path(chat);
  const last = nodes.at(-1);
  if (last?.role !== "tool") return last?.role === "user";
  const calling = nodes.findLastIndex((node) => node.role === "assistant");
  return nodes.length - 1 - calling >= nodes[calling].calls.length;
}

// The body of a request to Ollama's /api/chat for an answer to the path. `thinking`: the model can think.
export function request(chat, thinking) {
  const { model, options, tools, think } = chat;
  return {
    model,
    messages: messages(chat),
    options,
    think: thinking ? think : undefined,
    tools: tools?.length ? tools : undefined,
  };
}

function messages(chat) {
  const result = chat.system?.trim() ? [{ role: "system", content: chat.system }] : [];
  for (const node of path(chat)) {
    const message = { role: node.role, content: node.content };
    if (node.images?.length) message.images = node.images.map((image) => image.data);
    if (node.thinking) message.thinking = node.thinking;
    if (node.calls?.length) message.tool_calls = node.calls;
    if (node.role === "tool") message.tool_name = node.tool;
    result.push(message);
  }
  return result;
}

// Adds a part of a streamed answer to its message.
export function take(node, { message, done, ...rest }) {
  if (message?.content) node.content += message.content;
  if (message?.thinking) node.thinking = (node.thinking ?? "") + message.thinking;
  if (message?.tool_calls) node.calls = [...(node.calls ?? []), ...message.tool_calls];
  if (!done) return;
  node.statistics = {
    prompt: rest.prompt_eval_count,
    tokens: rest.eval_count,
    seconds: rest.eval_duration / 1e9,
    reason: rest.done_reason,
  };
}

// Removes an answer that has failed.
export function remove(from, node) {
  const others = siblings(from, node).filter((other) => other !== node);
  delete from.nodes[node.id];
  from.leaf = node.parent;
  if (others.length) showBranch(from, others.at(-1));
}

// The chat as a Markdown document.
export function asMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.system?.trim()) parts.push("## System", chat.system);
  for (const node of path(chat)) {
    const names = { user: "You", assistant: node.model ?? chat.model, tool: `Result of ${node.tool}` };
    parts.push(`## ${names[node.role]}`);
    for (const image of node.images ?? []) parts.push(`(image: ${image.name})`);
    for (const call of node.calls ?? []) {
      parts.push(`Calls \`${call.function.name}\`: \`${JSON.stringify(call.function.arguments)}\``);
    }
    if (node.content) parts.push(node.content);
  }
  return `${parts.join("\n\n")}\n`;
}
