"""The page at `/docs`: self-contained, reads `/openapi.json`, and loads nothing else."""

from __future__ import annotations

from typing import Final

DOCS_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>prorl-trio: REST</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
  summary { cursor: pointer; }
  code, pre { font: 13px/1.4 ui-monospace, monospace; }
  pre { background: #f5f5f5; padding: .6rem; overflow: auto; }
  .method { display: inline-block; width: 4.5rem; font-weight: 600; }
  table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
  @media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } pre { background: #262626; } }
</style>
<h1>prorl-trio: REST</h1>
<p>Send the node's token as <code>Authorization: Bearer TOKEN</code>. Errors are
<code>{"error": {"code", "message", "path", "retry_after_s"}}</code>. The same as a file:
<a href="/openapi.json">openapi.json</a>.</p>
<div id="operations">Loading.</div>
<h2>Types</h2>
<div id="types"></div>
<script>
"use strict";
const element = (name, text, ...children) => {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
};
const row = (...cells) => element("tr", "", ...cells.map(cell => element("td", cell)));
const json = value => element("pre", JSON.stringify(value, null, 2));
const show = (method, path, operation) => {
  const head = element("summary", "");
  const word = element("span", method.toUpperCase());
  word.className = "method";
  head.append(word, element("code", path));
  const box = element("details", "", head, element("p", operation.summary));
  const table = element("table", "");
  for (const p of operation.parameters) table.append(row(p.name, p.in, JSON.stringify(p.schema)));
  box.append(table);
  if (operation.requestBody) box.append(element("h4", "Body"), json(operation.requestBody.content));
  box.append(element("h4", "Answers"), json(operation.responses));
  return box;
};
fetch("/openapi.json").then(answer => answer.json()).then(api => {
  const operations = document.getElementById("operations");
  operations.textContent = "";
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods)) operations.append(show(method, path, operation));
  for (const [name, schema] of Object.entries(api.components.schemas))
    document.getElementById("types").append(element("details", "", element("summary", name), json(schema)));
});
</script>
</html>
"""
