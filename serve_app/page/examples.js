// The examples of an operation of /openapi.json: commands for curl, and the replies to them.

import { CodeBlock, withCode } from "./code.js";
import { element } from "./dom.js";
import { address } from "./server.js";

const WIDTH = 76; // characters of a line of JSON, if it can be split
const JSON_TYPE = "application/json";
const PLAIN = /^[\w.:/@%+=,-]+$/; // what a shell takes as it is

// Nodes for each example: a note, the request and the reply. `keyed`: the server requires API keys.
export function exampleNodes(method, path, described, keyed) {
  const requests = described.requestBody?.content?.[JSON_TYPE]?.examples ?? {};
  const contents = Object.values(described.responses).map(({ content }) => content ?? {});
  const replies = Object.assign(
    {}, ...contents.flatMap(Object.values).map(({ examples }) => examples ?? {}),
  );
  const names = [...new Set([...Object.keys(requests), ...Object.keys(replies)])];
  const place = filled(path, described.parameters ?? []);
  return names.flatMap((name) => {
    const { summary = "", description = "" } = requests[name] ?? replies[name];
    const kind = names.length > 1 ? `, ${summary.toLowerCase()}` : "";
    const command = curl(method, place, requests[name]?.value, keyed);
    const nodes = [new CodeBlock(command, "shell", `Request${kind}`).node];
    if (description) nodes.unshift(paragraph(description));
    if (replies[name]) nodes.push(new CodeBlock(shown(replies[name].value), "json", `Reply${kind}`).node);
    return nodes;
  });
}

function paragraph(text) {
  const node = element("p");
  node.append(...withCode(text));
  return node;
}

function filled(path, parameters) {
  return parameters.reduce((text, { name, example }) => text.replace(`{${name}}`, example), path);
}

function curl(method, path, body, keyed) {
  const usual = body === undefined ? "get" : "post";
  const parts = [`curl ${method === usual ? "" : `-X ${method.toUpperCase()} `}${quoted(address(path).href)}`];
  if (keyed) parts.push('-H "Authorization: Bearer $CARAVAN_API_KEY"');
  if (body !== undefined) parts.push(`-H 'Content-Type: ${JSON_TYPE}'`, `-d ${quoted(shown(body))}`);
  return parts.join(" \\\n  ");
}

function quoted(text) {
  return PLAIN.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

// Texts, such as streams, as they are; other values as JSON.
function shown(value) {
  return typeof value === "string" ? value.trimEnd() : indented(value);
}

// JSON whose lists and objects are split only if they are too long for a line. `before`: the number
// of characters in front of the value.
function indented(value, indent = "", before = 0) {
  const line = oneLine(value);
  const whole = indent.length + before + line.length <= WIDTH;
  if (whole || typeof value !== "object" || value === null) return line;
  const inner = `${indent}  `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((each) => indented(each, inner))
    : Object.entries(value).map(([key, each]) => {
        const name = `${JSON.stringify(key)}: `;
        return name + indented(each, inner, name.length);
      });
  return `${open}\n${inner}${parts.join(`,\n${inner}`)}\n${indent}${close}`;
}

// Line breaks in texts are escaped, so that all that are found here are between values.
function oneLine(value) {
  return JSON.stringify(value, null, 1)
    .replace(/([[{])\n\s*/g, "$1")
    .replace(/\n\s*([\]}])/g, "$1")
    .replace(/\n\s*/g, " ");
}
