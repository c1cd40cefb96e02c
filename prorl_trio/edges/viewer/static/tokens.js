/* A segment's tokens. A hundred thousand are shown as chunks, which are filled when they come near the screen. */

import { h, fill, inert, number, nextFrame } from "./dom.js";
import { ask } from "./source.js";

const CHUNK = 250;
const NEAR = "600px";
const GUESSED_PX = 160;
export const KINDS = {
  s: "sampled",
  t: "template",
  o: "tool output",
  m: "message",
  g: "given",
  "=": "shared with the parent",
};
export const COLOURS = { kind: "Kind", logprob: "Log-probability", version: "Policy version", mask: "Loss mask" };
const HEAT = [-0.02, -0.11, -0.36, -0.7, -2.3, -5];
const HEAT_NAMES = ["p \u2265 .98", "\u2265 .9", "\u2265 .7", "\u2265 .5", "\u2265 .1", "\u2265 .007", "below"];
const VERSIONS = 6;

const heatOf = (logprob) => {
  const found = HEAT.findIndex((bound) => logprob !== null && logprob >= bound);
  return found < 0 ? HEAT.length : found;
};

/** Show the tokens of segment `index`, from `at` on. Returns an element; `signal` ends its requests. */
export function tokenView(query, segments, index, at, signal) {
  const segment = segments[index];
  const versions = [...new Set(segments.flatMap((each) => each.spans.map((span) => span.policy_version)))];
  const facts = h("p", { class: "facts", "aria-live": "polite" }, "Click a token for its figures.");
  const legend = h("p", { class: "legend" });
  const body = h("div", {
    class: "tokens by-kind",
    tabindex: 0,
    role: "region",
    "aria-label": `tokens of segment ${index}`,
    dir: "ltr",
  });
  const chunks = [];
  for (let start = 0; start < segment.tokens; start += CHUNK) {
    const chunk = h("div", { class: "chunk", "data-start": start });
    chunk.style.minHeight = `${GUESSED_PX}px`;
    chunks.push(chunk);
  }
  body.append(...chunks);

  const observer = new IntersectionObserver(
    (entries) => entries.forEach((entry) => (entry.isIntersecting ? show(entry.target) : drop(entry.target))),
    { rootMargin: NEAR },
  );
  signal.addEventListener("abort", () => observer.disconnect());
  chunks.forEach((chunk) => observer.observe(chunk));

  async function show(chunk) {
    if (chunk.childElementCount || chunk.wanted) return;
    chunk.wanted = true;
    try {
      const found = await ask(
        "runs/tokens",
        { ...query, segment: index, offset: chunk.dataset.start, limit: CHUNK },
        signal,
      );
      await nextFrame();
      if (chunk.wanted) render(chunk, found);
    } catch (error) {
      if (!signal.aborted) fill(chunk, `These tokens could not be loaded: ${error.message}`);
    }
    chunk.wanted = false;
  }

  /** Empty a chunk that is far away, and keep its place. */
  function drop(chunk) {
    if (chunk.childElementCount) chunk.style.minHeight = `${chunk.offsetHeight}px`;
    chunk.wanted = false;
    chunk.replaceChildren();
  }

  function render(chunk, { start, ids, texts, logprobs, kinds }) {
    const parts = document.createDocumentFragment();
    let place = 0;
    for (const id of ids) {
      const token = document.createElement("span");
      const kind = kinds[place];
      const span =
        kind === "s" ? segment.spans.findIndex((each) => start + place >= each.start && start + place < each.end) : -1;
      const version = span < 0 ? "" : ` v${versions.indexOf(segment.spans[span].policy_version) % VERSIONS}`;
      token.className = kind === "s" ? `k-s h${heatOf(logprobs[place])}${version}` : `k-${kind === "=" ? "p" : kind}`;
      token.textContent = texts === null ? `${id} ` : shownText(texts[place]);
      token.facts = [start + place, id, logprobs[place], kind, span];
      parts.append(token);
      place += 1;
    }
    chunk.style.minHeight = "0";
    chunk.replaceChildren(parts);
  }

  const tell = (token) => {
    const [place, id, logprob, kind, span] = token.facts;
    const parts = [`place ${number(place)}`, `id ${id}`, KINDS[kind], JSON.stringify(token.textContent)];
    if (kind === "s" && logprob !== null) parts.push(`log-probability ${logprob.toFixed(4)}`, `p ${Math.exp(logprob).toFixed(4)}`);
    if (span >= 0) {
      const { policy_version: version, engine, temperature = 1, constraint } = segment.spans[span];
      parts.push(`version ${version}`, engine, `temperature ${temperature}`);
      if (constraint) parts.push(`kept to ${constraint}`);
    }
    return parts.join(" \u00b7 ");
  };
  body.addEventListener("pointerover", (event) => {
    if (event.target.facts && !event.target.title) event.target.title = inert(tell(event.target));
  });
  body.addEventListener("click", (event) => {
    if (!event.target.facts) return;
    body.querySelector(".chosen")?.classList.remove("chosen");
    event.target.classList.add("chosen");
    fill(facts, tell(event.target));
  });

  const colour = h(
    "select",
    { id: "colour", onchange: () => paint(colour.value) },
    Object.entries(COLOURS).map(([value, name]) => h("option", { value }, name)),
  );
  function paint(by) {
    body.className = `tokens by-${by}`;
    const keys = {
      kind: Object.entries(KINDS).map(([kind, name]) => [`k-${kind === "=" ? "p" : kind}`, name]),
      logprob: HEAT_NAMES.map((name, place) => [`k-s h${place}`, name]),
      version: versions.map((version, place) => [`k-s v${place % VERSIONS}`, `version ${version}`]),
      mask: [
        ["k-s", "1: trained on"],
        ["k-g", "0"],
      ],
    }[by];
    fill(
      legend,
      h(
        "span",
        { class: `tokens-key by-${by}` },
        keys.map(([kind, name]) => h("span", { class: kind }, name)),
      ),
    );
  }
  paint("kind");

  const jump = h("input", {
    id: "jump",
    type: "number",
    min: 0,
    max: Math.max(0, segment.tokens - 1),
    onchange: () => go(Number(jump.value)),
  });
  const go = (place) =>
    chunks[Math.min(chunks.length - 1, Math.floor(place / CHUNK))]?.scrollIntoView({ block: "start" });
  if (at > 0) requestAnimationFrame(() => go(at));
  return [
    h(
      "div",
      { class: "bar" },
      h("label", { for: "colour" }, "Colour by"),
      colour,
      h("label", { for: "jump" }, "Go to token"),
      jump,
      legend,
    ),
    facts,
    body,
  ];
}

const shownText = (text) => (text === "" ? "\u00b7" : inert(text).replaceAll("\n", "\u23ce\n"));
