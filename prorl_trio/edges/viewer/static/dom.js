/* Elements, and text from anybody: it becomes text nodes alone, and what has no shape is spelled out. */

const SHAPELESS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

/**
 * Return a text that does nothing but show: no escape sequence, no change of direction, nothing invisible. What has no
 * shape is spelled as `prorl-trio show` spells it: \x1b, \u202e.
 */
export function inert(text) {
  return String(text).replace(SHAPELESS, (char) => {
    const code = char.codePointAt(0).toString(16);
    return code.length <= 2
      ? `\\x${code.padStart(2, "0")}`
      : code.length <= 4
        ? `\\u${code.padStart(4, "0")}`
        : `\\U${code.padStart(8, "0")}`;
  });
}

/** Make an element. Children are elements or texts; properties are attributes, or listeners if they begin with "on". */
export function h(name, properties = {}, ...children) {
  const made = document.createElement(name);
  set(made, properties);
  add(made, children);
  return made;
}

/** Make an element of SVG. */
export function svg(name, properties = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(made, properties);
  add(made, children);
  return made;
}

function set(made, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "title" || name === "aria-label") made.setAttribute(name, inert(value));
    else made.setAttribute(name, value === true ? "" : value);
  }
}

function add(made, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(inert(child)));
  }
}

/** Put `children` in place of all that an element has. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

export const nextFrame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

/** Render many items a few at a time, so that no task takes long; stop when `signal` is aborted. */
export async function inSteps(items, size, signal, render) {
  for (let at = 0; at < items.length && !signal.aborted; at += size) {
    render(items.slice(at, at + size));
    if (at + size < items.length) await nextFrame();
  }
}

/* ---------------------------------------------------------------- figures */

export const number = (value, digits = 2) =>
  value === null || value === undefined
    ? "\u2013"
    : Number.isInteger(value)
      ? value.toLocaleString("en")
      : value.toFixed(digits);

export function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 100
    ? `${minutes} min ${Math.floor(value % 60)} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const size = (chars) =>
  chars < 10_000
    ? `${chars} characters`
    : chars < 1e6
      ? `${Math.round(chars / 1e3)} k characters`
      : `${(chars / 1e6).toFixed(1)} M characters`;

/** A table. Columns are [title, class]; rows are arrays of cells. */
export function table(caption, columns, rows, properties = {}) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      properties,
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((cells) =>
          h(
            "tr",
            {},
            cells.map((cell, place) => h("td", { class: columns[place][1] }, cell)),
          ),
        ),
      ),
    ),
  );
}

/** Pairs of a name and a figure. */
export function figures(pairs) {
  return h(
    "dl",
    { class: "figures" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** A fold whose body is made when it is opened first. */
export function fold(summary, body, properties = {}) {
  const made = h("details", properties, h("summary", {}, summary));
  const open = () => {
    if (made.open && made.childElementCount === 1) made.append(...[body()].flat());
  };
  made.addEventListener("toggle", open);
  open();
  return made;
}

/* ---------------------------------------------------------------- long texts */

const MORE_CHARS = 64 * 1024;

/**
 * Show a text as it is: a string, or {text, chars, part}, the beginning of a long one.
 * `more(part, offset, limit)` returns a promise of what follows.
 */
export function textBlock(value, more, kind = "") {
  const cut = typeof value !== "string";
  const box = h("div", { class: `text ${kind}` }, h("pre", { dir: "auto" }, cut ? value.text : value));
  if (!cut) return box;
  let shown = value.text.length;
  const rest = h("span", { class: "quiet" });
  const next = h(
    "button",
    {
      type: "button",
      onclick: async () => {
        next.disabled = true;
        const { text } = await more(value.part, shown, MORE_CHARS);
        shown += text.length;
        buttons.before(h("pre", { dir: "auto" }, text));
        next.disabled = false;
        told();
      },
    },
    "Show more",
  );
  const save = h(
    "button",
    {
      type: "button",
      onclick: async () => {
        const { text } = await more(value.part, 0, value.chars);
        const link = h("a", {
          href: URL.createObjectURL(new Blob([text], { type: "text/plain" })),
          download: `${value.part}.txt`,
        });
        link.click();
        URL.revokeObjectURL(link.href);
      },
    },
    "Save as a file",
  );
  const buttons = h("p", { class: "more" }, next, save, rest);
  const told = () => {
    fill(rest, `${size(value.chars - shown)} of ${size(value.chars)} are left`);
    next.hidden = shown >= value.chars;
  };
  told();
  box.append(buttons);
  return box;
}

export const chars = (value) => (typeof value === "string" ? value.length : value.chars);
export const head = (value) => (typeof value === "string" ? value : value.text);

/** The first line of a text that has one, for a summary. */
export function firstLine(value, most = 110) {
  const text = head(value).trimStart();
  const line = text.slice(0, most).split("\n", 1)[0];
  return line.length < text.length ? `${line} \u2026` : line;
}

/** Put a text on the clipboard, and say so. */
export async function copy(text, what) {
  await navigator.clipboard.writeText(text);
  say(`${what} copied`);
}

let clearNote = 0;

/** Say something for a while. */
export function say(text) {
  fill(document.getElementById("note"), text);
  clearTimeout(clearNote);
  clearNote = setTimeout(() => fill(document.getElementById("note")), 4000);
}
