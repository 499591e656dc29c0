// Requests to the server that the page came from.

import { local, session } from "./site_data.js";

const KEY = "caravan-key";

export function apiKey() {
  return session.getItem(KEY) ?? local.getItem(KEY) ?? "";
}

// `remember`: keep the key after the browser is closed.
export function setApiKey(key, remember) {
  local.removeItem(KEY);
  session.removeItem(KEY);
  if (key) (remember ? local : session).setItem(KEY, key);
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Of a path of the server: relative to this file, since an application may be mounted below a prefix.
export function address(path) {
  return new URL(`..${path}`, import.meta.url);
}

export async function request(path, body, signal) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(address(path), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new ServerError(response.status, await reason(response));
  return response;
}

export async function get(path) {
  return (await request(path)).json();
}

export async function show(model) {
  return (await request("/api/show", { model })).json();
}

// The JSON objects of a streamed answer of /api/chat, as they arrive.
export async function* chat(body, signal) {
  const response = await request("/api/chat", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.trim()) continue;
      const part = JSON.parse(line);
      if (part.error) throw new ServerError(500, part.error);
      yield part;
    }
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error?.message ?? error ?? text;
  } catch {
    return text.slice(0, 500) || `The server answered with status ${response.status}.`;
  }
}
