// The page /docs: shows /openapi.json as text, tables and examples.

import { withCode } from "./code.js";
import { element } from "./dom.js";
import { exampleNodes } from "./examples.js";
import { askKey, setUp } from "./preferences.js";
import * as server from "./server.js";

const $ = (id) => document.getElementById(id);
const REF = "#/components/schemas/";
const METHODS = ["get", "post", "put", "delete", "head"];

function folded(kind, id, title, content) {
  const node = element("details", "", kind);
  node.id = id;
  const summary = element("summary");
  summary.append(...title);
  node.append(summary, ...content);
  return node;
}

function operation(method, path, described, keyed) {
  const name = element("span", method.toUpperCase(), "method");
  const title = [name, " ", element("code", path), ` — ${described.summary}`];
  const content = [];
  if (described.description) {
    const text = element("p");
    text.append(...withCode(described.description));
    content.push(text);
  }
  if (described.parameters?.length) {
    const rows = described.parameters.map((one) => [one.name, typeOf(one.schema), `in the ${one.in}`]);
    content.push(table(["Parameter", "Type", "Meaning"], rows));
  }
  for (const [media, { schema }] of Object.entries(described.requestBody?.content ?? {})) {
    content.push(paragraph("Body", media, schema));
  }
  for (const [status, response] of Object.entries(described.responses)) {
    const bodies = Object.entries(response.content ?? {});
    if (!bodies.length) content.push(element("p", `${status}: ${response.description}, without a body`));
    for (const [media, { schema }] of bodies) {
      content.push(paragraph(`${status}: ${response.description}`, media, schema));
    }
  }
  content.push(...exampleNodes(method, path, described, keyed));
  return folded("operation", described.operationId, title, content);
}

function paragraph(text, media, schema) {
  const node = element("p", `${text}, `);
  node.append(element("code", media), ...(schema ? [", ", ...typeOf(schema)] : []));
  return node;
}

function schemaNode(name, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, described]) => [
    required.has(field) ? `${field} (required)` : field,
    typeOf(described),
    meaning(described),
  ]);
  const content = rows.length ? [table(["Field", "Type", "Meaning"], rows)] : [element("p", "Any object.")];
  return folded("schema", `schema-${name}`, [element("code", name)], content);
}

// Nodes and texts that name the type of a schema; other schemas as links.
function typeOf(schema = {}) {
  if (schema.$ref) return [linked(schema.$ref.replace(REF, ""))];
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return joined(choices.map(typeOf), " or ");
  if (schema.enum) return ["one of ", element("code", schema.enum.map((each) => JSON.stringify(each)).join(" "))];
  if (schema.const !== undefined) return [element("code", JSON.stringify(schema.const))];
  if (schema.type === "array" || schema.items) return ["list of ", ...typeOf(schema.items)];
  return [[schema.type ?? "any"].flat().join(" or ")];
}

function meaning(schema) {
  const limits = {
    minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below",
    maxLength: "characters at most", minLength: "characters at least", maxItems: "entries at most",
    minItems: "entries at least", pattern: "pattern",
  };
  const found = Object.entries(limits)
    .filter(([key]) => schema[key] !== undefined)
    .map(([key, text]) => `${text} ${schema[key]}`);
  if (schema.default !== undefined && schema.default !== null) found.unshift(`default ${JSON.stringify(schema.default)}`);
  return withCode([schema.description, found.join(", ")].filter(Boolean).join(" "));
}

function linked(name) {
  const link = element("a", name);
  link.href = `#schema-${name}`;
  return link;
}

function joined(lists, between) {
  return lists.flatMap((list, index) => (index ? [between, ...list] : list));
}

function table(titles, rows) {
  const node = element("table", "", "fields");
  const head = element("tr");
  for (const title of titles) {
    const cell = element("th", title);
    cell.scope = "col";
    head.append(cell);
  }
  node.append(element("thead"), element("tbody"));
  node.tHead.append(head);
  for (const [name, ...cells] of rows) {
    const row = element("tr");
    const first = element("td");
    first.append(element("code", name));
    row.append(first);
    for (const cell of cells) {
      const made = element("td");
      made.append(...[cell].flat());
      row.append(made);
    }
    node.tBodies[0].append(row);
  }
  return node;
}

function show(document) {
  const { title, version, description = "" } = document.info;
  $("about").replaceChildren(`${title} ${version}. `, ...withCode(description));
  const groups = (document.tags ?? []).map(({ name }) => {
    const group = element("section");
    group.append(element("h2", name));
    for (const [path, item] of Object.entries(document.paths)) {
      for (const method of METHODS) {
        const described = item[method];
        if (!described?.tags?.includes(name)) continue;
        const keyed = needsKey(described.security ?? document.security ?? []);
        group.append(operation(method, path, described, keyed));
      }
    }
    return group;
  });
  $("operations").replaceChildren(...groups);
  const schemas = Object.entries(document.components?.schemas ?? {});
  $("schemas").replaceChildren(...schemas.map(([name, schema]) => schemaNode(name, schema)));
  find();
  openTarget();
}

// Whether none of the ways to authenticate is to send nothing.
function needsKey(security) {
  return security.length > 0 && security.every((way) => Object.keys(way).length > 0);
}

function find() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const node of document.querySelectorAll(".operation, .schema")) {
    const text = node.textContent.toLowerCase();
    node.hidden = !words.every((word) => text.includes(word));
    found += !node.hidden && node.matches(".operation");
  }
  $("found").textContent = `${found} operations`;
}

// Opens the section that the fragment of the address names, as links to types do.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target?.matches("details")) return;
  target.hidden = false;
  target.open = true;
  target.scrollIntoView();
  target.querySelector("summary").focus();
}

async function load() {
  try {
    show(await server.get("/openapi.json"));
    $("problem").textContent = "";
  } catch (error) {
    if (error.status === 401) askKey("This server needs an API key.");
    else $("problem").textContent = `The description cannot be loaded: ${error.message}`;
  }
}

$("find").addEventListener("input", find);
addEventListener("hashchange", openTarget);
setUp(load);
load();
