/* Addresses, keys and themes. */

import { h, fill, inert, say } from "./dom.js";
import { SOURCE, takeToken } from "./source.js";
import { rolloutPage, comparePage, runHref } from "./rollout.js";
import { runsPage, runPage } from "./runs.js";
import { livePage } from "./live.js";

const THEMES = ["auto", "light", "dark"];
const THEME = "prorl-theme";
const SLOW_MS = 400;
const KEYS = [
  ["j, k", "the next or the previous row, turn or fold"],
  ["Enter", "open it"],
  ["Escape", "go up, or leave a field"],
  ["/", "search"],
  ["g", "groups or rollouts"],
  ["[, ]", "the previous or the next rollout of the group"],
  ["t", "theme"],
  ["?", "these keys"],
];
const main = document.getElementById("main");
const keys = document.getElementById("keys");
const lists = new Map();
let leaving = new AbortController();

/** Return what an address asks for: its page, its names, and the way to it. */
function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const names = path.split("/").filter(Boolean).map(decodeURIComponent);
  const parameters = new URLSearchParams(query);
  if (SOURCE === "node") return { page: livePage, trail: [] };
  if (names[0] !== "run" || !names[1]) return { page: runsPage, trail: [] };
  const run = names[1];
  const trail = [[run === "." ? "Run" : run, lists.get(run) ?? runHref(run)]];
  if (names[2] === "rollout")
    return { page: rolloutPage, run, job: names[3], tab: names[4], parameters, trail: [...trail, [names[3], null]] };
  if (names[2] === "compare")
    return { page: comparePage, run, jobs: [names[3], names[4]], trail: [...trail, ["Two rollouts", null]] };
  return { page: runPage, run, parameters, trail };
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const route = routeOf(location.hash);
  const start = SOURCE === "node" ? "Node" : "Runs";
  fill(
    document.getElementById("trail"),
    h("a", { href: "#/", class: "home" }, "prorl-trio"),
    h("a", { href: "#/" }, start),
    route.trail.map(([name, href]) => (href ? h("a", { href }, name) : h("span", { "aria-current": "page" }, name))),
  );
  document.title = inert([...route.trail.map(([name]) => name).reverse(), "prorl-trio"].join(" \u00b7 "));
  window.scrollTo(0, 0);
  main.setAttribute("aria-busy", "true");
  const slow = setTimeout(() => say("Loading \u2026"), SLOW_MS);
  try {
    await route.page(main, route, signal);
  } catch (error) {
    if (!signal.aborted)
      fill(main, h("h1", {}, "This cannot be shown"), h("p", { class: "error", role: "alert" }, error.message));
  }
  clearTimeout(slow);
  if (signal.aborted) return;
  main.setAttribute("aria-busy", "false");
  if (document.activeElement === document.body) main.focus({ preventScroll: true });
}

/* ---------------------------------------------------------------- keys */

const stops = () =>
  [...main.querySelectorAll("a.row, .turns .assistant header a, .turns summary")].filter((each) => each.offsetParent);

function step(by) {
  const all = stops();
  const at = all.indexOf(document.activeElement);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function up() {
  const { trail } = routeOf(location.hash);
  const above = trail.filter(([, href]) => href);
  location.hash = trail.length > above.length ? above.at(-1)[1] : "#/";
}

function sibling(by) {
  const all = [...main.querySelectorAll(".bar .strip a")];
  all[all.findIndex((each) => each.hasAttribute("aria-current")) + by]?.click();
}

const PRESSED = {
  j: () => step(1),
  k: () => step(-1),
  Escape: up,
  "?": () => keys.showModal(),
  t: () => turnTheme(),
  "/": () => main.querySelector("input[type=search]")?.focus(),
  "[": () => sibling(-1),
  "]": () => sibling(1),
  g: () => main.querySelector(".choice button[aria-pressed=false]")?.click(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (!PRESSED[event.key]) return;
  event.preventDefault();
  PRESSED[event.key]();
});

/* ---------------------------------------------------------------- theme */

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function stored() {
  try {
    return localStorage.getItem(THEME) || "auto";
  } catch {
    return "auto";
  }
}

function turnTheme() {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  try {
    localStorage.setItem(THEME, next);
  } catch {
    /* a page from a disk may have no storage */
  }
  say(`Theme: ${next}`);
}

setTheme(stored());
document.getElementById("theme").addEventListener("click", turnTheme);
document.getElementById("help").addEventListener("click", () => keys.showModal());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
fill(
  keys,
  h("h2", {}, "Keys"),
  h(
    "dl",
    {},
    KEYS.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does))),
  ),
  h("form", { method: "dialog" }, h("button", {}, "Close")),
);
window.addEventListener("hashchange", ({ oldURL }) => {
  const left = routeOf(new URL(oldURL).hash);
  if (left.page === runPage) lists.set(left.run, new URL(oldURL).hash);
  takeToken();
  show();
});
takeToken();
show();
