/* Where everything comes from: the server that sent this page, or the data in it. */

import { h } from "./dom.js";

export const SOURCE = document.documentElement.dataset.source;
export const OFFLINE = SOURCE === "file";
const TOKEN = "prorl-token";

/** Keep the token of the address, and take it out of there. */
export function takeToken() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(found[1]));
  history.replaceState(null, "", `${location.pathname}#/`);
}

/** Ask for the token. The page waits behind. */
function askForToken() {
  return new Promise((done) => {
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
    const form = h(
      "form",
      {
        class: "ask",
        onsubmit: (event) => {
          event.preventDefault();
          sessionStorage.setItem(TOKEN, field.value.trim());
          box.remove();
          done();
        },
      },
      h("h2", { id: "ask" }, "This server needs its token"),
      h("p", {}, "It is kept in this tab alone, and is sent to nobody else."),
      h("label", { for: "token" }, "Token"),
      field,
      h("button", { type: "submit" }, "Continue"),
    );
    const box = h("dialog", { "aria-labelledby": "ask", oncancel: (event) => event.preventDefault() }, form);
    document.body.append(box);
    box.showModal();
  });
}

let asking = null;

/** Send a request with the token. */
export async function request(path, parameters = {}, options = {}) {
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  );
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    if (token) {
      const headers = { Authorization: `Bearer ${token}` };
      const answer = await fetch(`${path}?${query}`, { ...options, headers, cache: "no-store" });
      if (answer.status !== 401) return answer;
    }
    asking ??= askForToken().finally(() => {
      asking = null;
    });
    await asking;
  }
}

/** Return the answer to a question, decoded. The names are those of the server's paths below /v1/. */
export async function ask(name, parameters = {}, signal = undefined) {
  if (OFFLINE) return offline[name.replace("runs/", "")](parameters);
  const answer = await request(`v1/${name}`, parameters, { signal });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : `the server answered ${answer.status}`);
  return body;
}

export const addressOf = (name, parameters) =>
  new URL(`v1/${name}?${new URLSearchParams(parameters)}`, location.href.split("#")[0]).href;

/* ---------------------------------------------------------------- the data of an exported file */

const data = OFFLINE ? JSON.parse(document.getElementById("data").textContent) : null;
const FIELDS = ["status", "cause", "stop", "handler", "agent", "family"];
const MESSAGES = ["text", "observations", "messages"];

const runOf = (id) => data.runs.find((each) => each.about.run === id);
const rolloutOf = ({ run, job }) => runOf(run).rollouts.find((each) => each.job_id === job);
const plain = (value) => (value.content === undefined ? value : value.content);
const inside = (value, low, high) =>
  (low === undefined || low === "" || value >= low) && (high === undefined || high === "" || value <= high);

function searched(rollout) {
  rollout.searched ??= [
    rollout.job_id,
    rollout.instance_id,
    rollout.error,
    rollout.evaluation_log,
    rollout.details,
    ...(rollout.trajectory ? rollout.trajectory.turns : []).flatMap((turn) =>
      MESSAGES.flatMap((name) => [turn[name]].flat().map(plain)),
    ),
  ]
    .join("\0")
    .toLowerCase();
  return rollout.searched;
}

/** Select and sort rows as the server does: see `OutcomeIndex.select`. */
function select(query) {
  const run = runOf(query.run);
  const bounded = (name) => (query[name] ?? "") !== "";
  const rows = run.rows.filter(
    (row, place) =>
      (!query.text || searched(run.rollouts[place]).includes(query.text.toLowerCase())) &&
      FIELDS.every((name) => !query[name] || row[name] === (query[name] === "-" ? "" : query[name])) &&
      (!query.group || row.group_id === query.group) &&
      (!query.version || row.versions.includes(query.version)) &&
      (!(bounded("reward_min") || bounded("reward_max")) ||
        (row.reward !== null && inside(row.reward, query.reward_min, query.reward_max))) &&
      inside(row.sampled, query.tokens_min, query.tokens_max),
  );
  return sorted(rows, query.sort || "place", query.descending);
}

function sorted(rows, by, descending) {
  const way = String(descending) === "true" ? -1 : 1;
  const known = rows
    .filter((row) => row[by] !== null)
    .sort((a, b) => way * (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : 0));
  return [...known, ...rows.filter((row) => row[by] === null)];
}

function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const name = row.group_id || row.job_id;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return [...groups].map(([group, members]) => {
    const rewards = members.map((row) => row.reward).filter((reward) => reward !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
    return {
      group,
      instance: members[0].instance_id,
      task: members[0].task,
      mean,
      spread:
        mean === null ? null : Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean) ** 2, 0) / rewards.length),
      sampled: members.reduce((sum, row) => sum + row.sampled, 0),
      rollouts: members.map((row) => [row.job_id, row.reward, row.cause || row.stop, row.sampled]),
    };
  });
}

const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer;

/** Decode a segment's tokens, once. */
function unpacked(packed) {
  if (packed.kindOf) return packed;
  packed.idArray = new Int32Array(bytes(packed.ids));
  const logprobs = new Float32Array(bytes(packed.logprobs));
  packed.kindOf = packed.kinds.map(([kind, count]) => kind.repeat(count)).join("");
  let next = 0;
  packed.logprobArray = Array.from(packed.kindOf, (kind) => (kind === "s" ? logprobs[next++] : 0));
  return packed;
}

function windowOf(packed, start, count) {
  const { idArray, logprobArray, kindOf, texts } = unpacked(packed);
  const ids = [...idArray.subarray(start, start + count)];
  const said = ids.map((id, place) => texts[start + place] ?? data.vocabulary[id]);
  return {
    start,
    ids,
    texts: said.includes(undefined) ? null : said,
    logprobs: logprobArray.slice(start, start + count),
    kinds: kindOf.slice(start, start + count),
  };
}

function received(query) {
  const turn = rolloutOf(query).trajectory.turns[Number(query.part.split(".")[1])];
  const [from, to] = turn.received;
  const found = windowOf(rolloutOf(query).tokens[turn.segment], from, to - from);
  return (found.texts || found.ids).join(found.texts ? "" : ", ");
}

const page = (found, query) =>
  found.slice(Number(query.offset || 0), Number(query.offset || 0) + Number(query.limit || 100));

const offline = {
  runs: () => ({ root: data.root, runs: data.runs.map((run) => run.about) }),
  about: ({ run }) => runOf(run).about,
  rollouts: (query) => {
    const rows = select(query);
    return { total: rows.length, rows: page(rows, query) };
  },
  groups: (query) => {
    const by = { reward: "mean", sampled: "sampled" }[query.sort];
    const groups = groupsOf(select(query));
    return { total: groups.length, groups: page(by ? sorted(groups, by, query.descending) : groups, query) };
  },
  rollout: (query) => {
    const { rows } = runOf(query.run);
    const row = rows.find((each) => each.job_id === query.job);
    const siblings = rows.filter((each) => each === row || (row.group_id && each.group_id === row.group_id));
    return { ...rolloutOf(query), row, siblings: siblings.map((each) => [each.job_id, each.reward]) };
  },
  tokens: (query) => windowOf(rolloutOf(query).tokens[query.segment], Number(query.offset), Number(query.limit)),
  text: (query) => {
    const text = received(query);
    return { text: text.slice(query.offset, query.offset + query.limit), chars: text.length };
  },
  outcome: (query) => {
    const { searched: _, tokens: __, ...rest } = rolloutOf(query);
    return rest;
  },
};
