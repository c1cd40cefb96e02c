/* A node or a fleet's head, live: its status every second, and its events as they come. What was missed is a gap. */

import { h, fill, figures, table, number, seconds } from "./dom.js";
import { request } from "./source.js";
import { lineChart } from "./charts.js";

const INTERVAL_MS = 1000;
const RETRY_MS = 3000;
const KEPT = 300;
const SHOWN_EVENTS = 200;
const SHOWN_JOBS = 200;

/** The page of a node. */
export async function livePage(main, _route, signal) {
  const parts = Object.fromEntries(
    ["head", "stages", "charts", "members", "backends", "failures", "jobs", "events"].map((name) => [
      name,
      h("section", { class: `live-${name}` }),
    ]),
  );
  fill(main, Object.values(parts));
  const causes = new Map();
  const events = h("ol", { class: "log", tabindex: 0, "aria-label": "Events" });
  fill(parts.events, h("h2", {}, "Events and warnings"), events);
  const note = (text, bad = false) => {
    events.prepend(h("li", { class: bad ? "bad" : "" }, h("time", {}, new Date().toLocaleTimeString()), ` ${text}`));
    while (events.childElementCount > SHOWN_EVENTS) events.lastChild.remove();
  };
  watch(signal, note, ({ cause }) => {
    if (cause) causes.set(cause, (causes.get(cause) || 0) + 1);
  });
  const samples = [];
  let last = null;
  while (!signal.aborted) {
    const began = performance.now();
    const report = await status(signal);
    if (signal.aborted) return;
    const now = began / 1000;
    const totals = report?.node.totals ?? {
      jobs_ended: sum(report?.node.pipeline?.outcomes),
      tokens_sampled: report?.node.pipeline?.tokens_sampled ?? 0,
    };
    const steady = report && last && report.node.uptime_s >= last.uptime_s;
    const rate = (name) =>
      steady ? Math.max(0, (totals[name] - last.totals[name]) / Math.max(now - last.now, 1e-3)) : null;
    samples.push([now, rate("jobs_ended"), rate("tokens_sampled")]);
    if (samples.length > KEPT) samples.shift();
    last = report && { now, totals, uptime_s: report.node.uptime_s ?? 0 };
    if (!document.hidden) {
      if (report) render(parts, report, causes);
      else
        update(
          parts.head,
          h("h1", {}, "No answer"),
          h(
            "p",
            { class: "error", role: "alert" },
            "The node does not answer; asking again. What follows is its last report.",
          ),
        );
      const since = (place) =>
        samples.map((each) => [each[0] - now, each[place] === null ? null : each[place] * (place === 1 ? 60 : 1)]);
      update(
        parts.charts,
        h("h2", {}, "Throughput"),
        h(
          "div",
          { class: "charts" },
          lineChart("Rollouts ended per minute", [{ name: "rollouts", points: since(1) }], { xName: "s" }),
          lineChart("Sampled tokens per second", [{ name: "tokens", points: since(2) }], { xName: "s" }),
        ),
      );
    }
    await new Promise((done) => setTimeout(done, INTERVAL_MS));
  }
}

/** Put new content into a part, and the focus back where it was. */
function update(part, ...children) {
  const focused = part.contains(document.activeElement);
  const [left, top] = [part.querySelector(".scroll")?.scrollLeft ?? 0, window.scrollY];
  fill(part, ...children);
  part.querySelector(".scroll")?.scrollTo(left, 0);
  if (focused) part.querySelector("[tabindex]")?.focus({ preventScroll: true });
  if (window.scrollY !== top) window.scrollTo(window.scrollX, top);
}

const sum = (counts) => Object.values(counts ?? {}).reduce((all, each) => all + each, 0);

async function status(signal) {
  try {
    const answer = await request("v1/status", {}, { signal });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

/** Read the node's server-sent events, again and again; what was missed between two connections, or dropped, is told. */
async function watch(signal, note, ended) {
  let first = true;
  while (!signal.aborted) {
    try {
      const answer = await request("v1/events", { logs: true }, { signal });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      if (!first) note("gap: the stream was interrupted, and events of that time are missing", true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let pending = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (pending + value).split("\n\n");
        pending = blocks.pop();
        for (const block of blocks) tell(block, note, ended);
      }
    } catch (error) {
      if (!signal.aborted) note(`no events: ${error.message}`, true);
    }
    first = false;
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function tell(block, note, ended) {
  const [, kind, data] = /^event: (.*)\ndata: (.*)$/.exec(block) ?? [];
  if (!kind) return;
  const facts = JSON.parse(data);
  if (kind === "dropped") note(`gap: ${facts.count} events did not fit the buffer`, true);
  else if (kind === "log") note(`${facts.level} ${facts.logger}: ${facts.message}`, true);
  else if (kind === "job_ended") {
    ended(facts);
    note(
      `${facts.job_id} ${facts.status}, reward ${number(facts.reward)}${facts.cause ? `, ${facts.cause}: ${facts.error}` : ""}`,
      facts.status !== "completed",
    );
  } else if (kind === "job_moved") note(`${facts.job_id} is ${facts.status}${facts.detail ? `: ${facts.detail}` : ""}`);
  else
    note(
      `${facts.job_id} turn ${facts.turn}: ${facts.completion_tokens} tokens, ${facts.finish_reason}${facts.tools.length ? `, ${facts.tools.join(", ")}` : ""}`,
    );
}

function render(parts, { node, sessions }, causes) {
  const { pipeline = {}, sandboxes = {}, loop = {}, jobs = [] } = node;
  update(
    parts.head,
    h("h1", {}, node.node_id),
    node.draining && h("p", { class: "error" }, "Draining: it takes no more jobs."),
    figures([
      ["Up", node.uptime_s === undefined ? null : seconds(node.uptime_s)],
      ["Jobs", number(pipeline.jobs ?? node.live ?? jobs.length)],
      [
        "Model",
        String(node.model?.model_dir ?? node.model?.family ?? "")
          .split("/")
          .at(-1),
      ],
      [
        "Sandboxes",
        sandboxes.live === undefined
          ? null
          : `${sandboxes.live} live, ${sandboxes.warm ?? 0} warm, ${sandboxes.failed_total ?? 0} failed`,
      ],
      ["Event loop, p99", loop.p99_ms === undefined ? null : `${number(loop.p99_ms, 1)} ms`],
      [
        "Sessions",
        Object.values(sessions ?? {}).filter((each) => each.connected || each.running || each.undelivered).length,
      ],
    ]),
  );
  update(
    parts.stages,
    h("h2", {}, "Stages"),
    table(
      "Stages",
      [["stage"], ["at work", "n"], ["workers", "n"], ["queued", "n"], ["load", "wide"]],
      Object.entries(pipeline.stages ?? {}).map(([name, stage]) => [
        name.toUpperCase(),
        number(stage.busy),
        number(stage.workers),
        number(stage.queued),
        h("meter", {
          min: 0,
          max: stage.workers || 1,
          value: stage.busy,
          "aria-label": `${name}: ${stage.busy} of ${stage.workers} workers are busy`,
        }),
      ]),
    ),
  );
  const members = Object.entries(node.members ?? {});
  const leftOut = Object.entries(node.left_out ?? {});
  update(
    parts.members,
    members.length + leftOut.length > 0 && [
      h("h2", {}, "Members"),
      table(
        "Members",
        [["node"], ["host"], ["jobs", "n"], ["free places", "n"], ["up", "n"], ["state", "wide"]],
        [
          ...members.map(([name, each]) => [
            ...[name, each.host, number(each.held_jobs), number(each.free_places), seconds(each.uptime_s)],
            each.connected
              ? each.behind || (each.draining ? "draining" : "takes jobs")
              : h("span", { class: "bad" }, "lost"),
          ]),
          ...leftOut.map(([name, why]) => [...[name, "", "", "", ""], h("span", { class: "bad" }, `left out: ${why}`)]),
        ],
      ),
    ],
  );
  const backends = node.backends?.backends ?? [];
  update(
    parts.backends,
    h("h2", {}, "Backends"),
    backends.length === 0
      ? h("p", { class: "quiet" }, "There are none.")
      : table(
          "Backends",
          [
            ["address"],
            ["state"],
            ["version"],
            ["tasks", "n"],
            ["limit", "n"],
            ["running", "n"],
            ["waiting", "n"],
            ["KV cache", "n"],
            ["why it is down", "wide"],
          ],
          backends.map((each) => [
            each.url,
            h(
              "span",
              { class: each.suspended || each.state !== "active" ? "bad" : "" },
              each.suspended ? "suspended" : each.state,
            ),
            each.policy_version,
            number(each.in_flight),
            each.max_tasks || "\u2013",
            number(each.engine_running),
            number(each.engine_waiting),
            each.kv_usage === null || each.kv_usage === undefined ? "\u2013" : `${Math.round(100 * each.kv_usage)} %`,
            each.error,
          ]),
        ),
  );
  const outcomes = Object.entries(pipeline.outcomes ?? {});
  update(
    parts.failures,
    h("h2", {}, "Ended"),
    figures(outcomes.map(([name, count]) => [name.replace("_", " "), number(count)])),
    causes.size > 0 && [
      h("h3", {}, "Failures by cause, since this page was opened"),
      figures([...causes].map(([cause, count]) => [cause, number(count)])),
    ],
  );
  const order = [...jobs].sort(
    (a, b) =>
      Number(b.stuck) - Number(a.stuck) ||
      Number(a.status === "queued") - Number(b.status === "queued") ||
      b.last_progress_s - a.last_progress_s,
  );
  update(
    parts.jobs,
    h("h2", {}, "Jobs"),
    jobs.length === 0
      ? h("p", { class: "quiet" }, "None is live.")
      : table(
          `Jobs, ${jobs.length}`,
          [
            ["job"],
            ["stage"],
            ["waits for", "wide"],
            ["turns", "n"],
            ["age", "n"],
            ["quiet for", "n"],
            ["session"],
            ["agent"],
            ["node"],
          ],
          order
            .slice(0, SHOWN_JOBS)
            .map((job) => [
              job.job_id,
              h("span", { class: job.stuck ? "bad" : "" }, job.stuck ? `${job.status}, stuck` : job.status),
              [job.waiting_on || "(computing)", ...(job.other_waits ?? [])].join("; "),
              number(job.turns),
              seconds(job.age_s),
              seconds(job.last_progress_s),
              job.session_id,
              job.agent,
              job.node_id ?? node.node_id,
            ]),
        ),
  );
}
