/* One rollout: who said what, its tokens, its time, its segments, its grading; and two of them side by side. */

import {
  h,
  fill,
  fold,
  figures,
  table,
  number,
  seconds,
  size,
  textBlock,
  firstLine,
  chars,
  head,
  inSteps,
  copy,
} from "./dom.js";
import { OFFLINE, ask, addressOf } from "./source.js";
import { rewardCell } from "./charts.js";
import { tokenView } from "./tokens.js";

const TURNS_AT_ONCE = 20;
const OPEN_CHARS = 4000;
const FEW_TURNS = 100;
const TABS = {
  conversation: "Conversation",
  tokens: "Tokens",
  time: "Time",
  segments: "Segments",
  grading: "Grading",
  record: "Record",
};
const SPEAKERS = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };

export const runHref = (run) => `#/run/${encodeURIComponent(run)}`;
export const rolloutHref = (run, job, tab = "", parameters = "") =>
  `${runHref(run)}/rollout/${encodeURIComponent(job)}${tab ? `/${tab}` : ""}${parameters}`;
export const compareHref = (run, one, other) =>
  `${runHref(run)}/compare/${encodeURIComponent(one)}/${encodeURIComponent(other)}`;

/** The page of a rollout. */
export async function rolloutPage(main, { run, job, tab = "conversation", parameters }, signal) {
  const query = { run, job };
  const found = await ask("runs/rollout", query, signal);
  if (signal.aborted) return;
  const body = h("div", { class: "tab" });
  const others = found.siblings.filter(([id]) => id !== job);
  const compare = h(
    "select",
    {
      id: "other",
      onchange: () => {
        if (compare.value) location.hash = compareHref(run, job, compare.value);
      },
    },
    h("option", { value: "" }, "Compare with \u2026"),
    others.map(([id, reward]) => h("option", { value: id }, `${id} (${number(reward)})`)),
  );
  const siblings = h(
    "span",
    { class: "strip" },
    found.siblings.map(([id, reward], place) =>
      rewardCell(
        reward,
        `rollout ${place + 1} of its group, ${id}: reward ${number(reward)}`,
        rolloutHref(run, id, tab === "conversation" ? "" : tab),
      ),
    ),
  );
  siblings.children[found.siblings.findIndex(([id]) => id === job)].setAttribute("aria-current", "true");
  fill(
    main,
    h(
      "div",
      { class: "title" },
      h("h1", {}, job),
      rewardCell(found.reward),
      h("span", { class: `status st-${found.status}` }, found.status.replace("_", " ")),
      h(
        "span",
        { class: "buttons" },
        h(
          "button",
          {
            type: "button",
            onclick: async () => copy(JSON.stringify(await ask("runs/outcome", query), null, 1), "The outcome"),
          },
          "Copy JSON",
        ),
        !OFFLINE &&
          h(
            "button",
            {
              type: "button",
              onclick: () =>
                copy(
                  `curl -H "Authorization: Bearer $TOKEN" '${addressOf("runs/outcome", query).replaceAll("'", "%27")}'`,
                  "The command",
                ),
            },
            "Copy curl",
          ),
      ),
    ),
    found.error && h("p", { class: "error" }, h("strong", {}, `${found.cause}, ${found.error_code}: `), found.error),
    summary(found),
    found.siblings.length > 1 &&
      h(
        "div",
        { class: "bar" },
        h("span", {}, "Group"),
        siblings,
        h("label", { for: "other", class: "unseen" }, "Compare with"),
        compare,
      ),
    h(
      "nav",
      { class: "tabs", "aria-label": "Parts of the rollout" },
      Object.entries(TABS).map(([name, title]) =>
        h(
          "a",
          { href: rolloutHref(run, job, name === "conversation" ? "" : name), "aria-current": name === tab && "page" },
          title,
        ),
      ),
    ),
    body,
  );
  show[tab](body, found, query, signal, parameters);
}

function summary({ row, trajectory, attempt }) {
  return figures([
    ["Instance", row.instance_id],
    ["Handler", row.handler],
    ["Family", row.family],
    ["Agent", row.agent],
    ["Stopped", row.stop.replaceAll("_", " ")],
    ["Turns", number(row.turns)],
    ["Tool calls", number(row.calls)],
    ["Sampled tokens", number(row.sampled)],
    ["All tokens", number(row.tokens)],
    ["Mean log-probability", number(row.logprob, 3)],
    ["Policy versions", row.versions.join(", ")],
    ["Run", seconds(row.run_s)],
    ["Attempt", attempt > 1 ? attempt : null],
    ["Prefix breaks", trajectory?.prefix_breaks || null],
  ]);
}

const nothing = (body) => fill(body, h("p", { class: "quiet" }, "No trajectory was recorded."));
const more = (query) => (part, offset, limit) =>
  ask("runs/text", { ...query, part, offset, limit: Math.min(limit, 1 << 20) });

const show = {
  conversation: (body, found, query, signal) =>
    found.trajectory ? conversation(body, found.trajectory, query, signal) : nothing(body),

  tokens: (body, found, query, signal, parameters) => {
    if (!found.trajectory) return nothing(body);
    const { segments } = found.trajectory;
    const index = Math.min(Number(parameters.get("segment") || 0), segments.length - 1);
    const choice = h(
      "select",
      {
        id: "segment",
        onchange: () => {
          location.hash = rolloutHref(query.run, query.job, "tokens", `?segment=${choice.value}`);
        },
      },
      segments.map((segment, place) =>
        h("option", { value: place, selected: place === index }, segmentName(segment, place)),
      ),
    );
    return fill(
      body,
      segments.length > 1 && h("div", { class: "bar" }, h("label", { for: "segment" }, "Segment"), choice),
      !found.decoded &&
        h(
          "p",
          { class: "quiet" },
          "The model's folder is not known, so tokens are shown by their ids; name it by --model.",
        ),
      tokenView(query, segments, index, Number(parameters.get("at") || 0), signal),
    );
  },

  time: (body, { timing, attempts, trajectory }) =>
    fill(
      body,
      timeline(timing, trajectory),
      attempts.length > 0 && [
        h("h2", {}, "Attempts before this one"),
        table(
          "Attempts before this one",
          [["attempt", "n"], ["status"], ["cause"], ["error", "wide"], ["init", "n"], ["run", "n"], ["eval", "n"]],
          attempts.map((each) => [
            each.attempt,
            each.status,
            each.cause,
            each.error,
            seconds(each.timing.init_s),
            seconds(each.timing.run_s),
            seconds(each.timing.eval_s),
          ]),
        ),
      ],
    ),

  segments: (body, { trajectory }, query) =>
    trajectory ? fill(body, segmentTree(trajectory, query), accounting(trajectory)) : nothing(body),

  grading: (body, found, query) =>
    fill(
      body,
      figures([
        ["Reward", number(found.reward, 4)],
        ["Evaluation", seconds(found.timing.eval_s)],
        ["Graded again", found.regraded && "yes"],
      ]),
      h("h2", {}, "Log"),
      found.evaluation_log
        ? textBlock(found.evaluation_log, more(query))
        : h("p", { class: "quiet" }, "The grader wrote no log."),
      h("h2", {}, "Details"),
      textBlock(found.details, more(query)),
    ),

  record: (body, found, query) =>
    fill(
      body,
      figures([
        ["Job", found.job_id],
        ["Group", found.group_id],
        ["Instance", found.instance_id],
        ["Attempt", found.attempt],
        ...Object.entries(found.tags).map(([name, value]) => [`Tag ${name}`, value]),
      ]),
      found.trajectory?.tools &&
        fold("Tools that the policy was offered", () => textBlock(found.trajectory.tools, more(query)), { open: true }),
    ),
};

const segmentName = (segment, index) =>
  `${index}: ${number(segment.tokens)} tokens${segment.reason ? `, ${segment.reason.replaceAll("_", " ")} of ${segment.parent}` : ""}${segment.agent_type || segment.agent ? `, ${segment.agent_type || segment.agent}` : ""}`;

/* ---------------------------------------------------------------- who said what */

/** Every turn, in lanes: agents that another one asked are further to the right. */
function conversation(body, { turns, segments }, query, signal) {
  const list = h("ol", { class: "turns" });
  fill(body, list);
  let before = null;
  return inSteps(
    turns.map((turn, place) => [turn, place]),
    TURNS_AT_ONCE,
    signal,
    (some) => {
      for (const [turn, place] of some) {
        const segment = segments[turn.segment];
        if (turn.segment !== before && (segments.length > 1 || segment.agent_type)) {
          list.append(
            h("li", { class: `lane lane-${Math.min(segment.lane, 3)} lane-head` }, laneName(segment, turn.segment)),
          );
        }
        before = turn.segment;
        list.append(turnItem(turn, place, segment, query));
      }
    },
  );
}

function laneName({ agent, agent_type: type, reason, parent, shared }, index) {
  const who = type || agent ? `${[type, agent].filter(Boolean).join(" ")}: ` : "";
  return `${who}segment ${index}${reason ? `, ${reason.replaceAll("_", " ")} of segment ${parent}` : ""}${shared ? `, whose first ${number(shared)} tokens it shares` : ""}`;
}

function turnItem(turn, place, segment, query) {
  const fetchMore = more(query);
  const facts = [
    `${number(turn.end - turn.start)} tokens`,
    turn.logprob_mean !== null &&
      `log-probability ${number(turn.logprob_mean, 2)}, least ${number(turn.logprob_min, 2)}`,
    `${seconds(turn.inference_s)} inference`,
    turn.tools_s > 0 && `${seconds(turn.tools_s)} tools`,
    turn.finish_reason,
    turn.dropped_tokens > 0 && `${turn.dropped_tokens} tokens dropped after the call`,
  ];
  return h(
    "li",
    { class: `lane lane-${Math.min(segment.lane, 3)}`, id: `turn-${place}` },
    turn.messages.map((message) => spoken(message.role, message.name, message.content, fetchMore, message.calls)),
    h(
      "article",
      { class: "said assistant" },
      h(
        "header",
        {},
        h("span", { class: "who" }, "Policy"),
        h("span", { class: "quiet" }, `turn ${place + 1} \u00b7 ${facts.filter(Boolean).join(" \u00b7 ")}`),
        h(
          "a",
          { href: rolloutHref(query.run, query.job, "tokens", `?segment=${turn.segment}&at=${turn.start}`) },
          "tokens",
        ),
      ),
      textBlock(turn.text, fetchMore),
      turn.calls.map((call, at) => callFold(call, turn.tool_results[at], turn.observations[at], fetchMore)),
      turn.observations.slice(turn.calls.length).map((text) => spoken("tool", null, text, fetchMore)),
      fold(
        [
          "What the engine received before it ",
          h("span", { class: "quiet" }, `${number(turn.received[1] - turn.received[0])} tokens`),
        ],
        () => received(place, turn, query),
      ),
    ),
  );
}

function spoken(role, name, content, fetchMore, calls = []) {
  const long = chars(content) > OPEN_CHARS || role === "system" || role === "tool";
  const who = [h("span", { class: "who" }, SPEAKERS[role], name && ` ${name}`)];
  const body = () => [textBlock(content, fetchMore), calls.map((call) => textBlock(call, fetchMore, "call"))].flat();
  return h(
    "article",
    { class: `said ${role}` },
    long
      ? fold([who, h("span", { class: "quiet" }, ` ${size(chars(content))} \u00b7 ${firstLine(content)}`)], body)
      : [h("header", {}, who), body()],
  );
}

function callFold(call, result, observation, fetchMore) {
  const outcome = call.error ? "malformed" : (result?.outcome ?? (observation === undefined ? "not answered" : "ok"));
  const code = result?.exit_code === undefined ? "" : `, exit code ${result.exit_code}`;
  const told =
    observation === undefined ? "" : ` \u00b7 ${size(chars(observation))} \u00b7 ${firstLine(observation, 70)}`;
  return fold(
    [
      h("span", { class: "who" }, call.name || "call"),
      h("span", { class: "mono" }, ` ${firstLine(head(call.arguments).replace(/\s+/g, " "), 70)} `),
      h("span", { class: `outcome ${outcome === "ok" ? "" : "bad"}` }, `${outcome.replace("_", " ")}${code}`),
      h("span", { class: "quiet" }, told),
    ],
    () =>
      [
        call.error && h("p", { class: "error" }, call.error),
        h("h3", {}, "Arguments"),
        textBlock(call.arguments, fetchMore),
        observation !== undefined && [h("h3", {}, "Result"), textBlock(observation, fetchMore)],
      ]
        .flat()
        .filter(Boolean),
    { class: "call" },
  );
}

/** What was said beside what the engine received for it. */
function received(place, turn, query) {
  const box = h("div", {}, "Loading.");
  ask("runs/text", { ...query, part: `received.${place}`, offset: 0, limit: 1 << 16 }).then(
    ({ text, chars: all }) => {
      const said = turn.messages.map((each) => `${each.role}: ${head(each.content)}`).join("\n\n");
      fill(
        box,
        h(
          "div",
          { class: "sides" },
          h(
            "div",
            {},
            h("h3", {}, "Said, as messages"),
            h("pre", { dir: "auto" }, said || "The results of the calls above."),
          ),
          h(
            "div",
            {},
            h("h3", {}, "Received, as tokens"),
            textBlock(all > text.length ? { text, chars: all, part: `received.${place}` } : text, more(query)),
          ),
        ),
      );
    },
    (error) => fill(box, error.message),
  );
  return box;
}

/* ---------------------------------------------------------------- time, segments, tokens */

const STAGES = [
  ["queued_init_s", "waits for INIT", "wait"],
  ["init_s", "INIT", "init"],
  ["queued_run_s", "waits for RUN", "wait"],
  ["run_s", "RUN", "run"],
  ["queued_eval_s", "waits for EVAL", "wait"],
  ["eval_s", "EVAL", "eval"],
];

function timeline(timing, trajectory) {
  const stages = STAGES.map(([field, name, kind]) => [name, timing[field], kind]);
  const turns = (trajectory?.turns ?? []).flatMap((turn, place) => [
    [`turn ${place + 1}, inference`, turn.inference_s, "inference"],
    [`turn ${place + 1}, tools`, turn.tools_s, "tools"],
  ]);
  const used = turns.reduce((sum, [, spent]) => sum + spent, 0);
  const rest = Math.max(0, timing.run_s - used);
  const inside = [...turns, ["waits, pauses, and the handler's own time", rest, "wait"]];
  return [
    h("h2", {}, "Stages"),
    bars("Stages", stages),
    table(
      "Seconds of the stages",
      [["stage"], ["seconds", "n"]],
      stages.map(([name, spent]) => [name, seconds(spent)]),
    ),
    turns.length > 0 && [
      h("h2", {}, "Inside RUN"),
      bars("Inside RUN", inside),
      h(
        "p",
        { class: "legend" },
        [
          ["inference", "inference"],
          ["tools", "tools"],
          ["wait", "waits, pauses, and the handler's own time, which are not recorded turn by turn"],
        ].map(([kind, name]) => h("span", { class: `key bar-${kind}` }, name)),
      ),
      fold("Seconds of the turns", () => turnTable(trajectory.turns), { open: trajectory.turns.length <= FEW_TURNS }),
    ],
  ];
}

function turnTable(turns) {
  return table(
    "Seconds of the turns",
    [
      ["turn", "n"],
      ["inference", "n"],
      ["tools", "n"],
      ["tokens", "n"],
      ["tokens/s", "n"],
    ],
    turns.map((turn, place) => [
      place + 1,
      seconds(turn.inference_s),
      seconds(turn.tools_s),
      number(turn.end - turn.start),
      turn.inference_s > 0 ? number((turn.end - turn.start) / turn.inference_s, 1) : "\u2013",
    ]),
  );
}

function bars(name, parts) {
  const all = parts.reduce((sum, [, spent]) => sum + spent, 0) || 1;
  return h(
    "div",
    {
      class: "timeline",
      role: "img",
      "aria-label": `${name}: ${parts
        .filter(([, spent]) => spent > 0)
        .slice(0, 12)
        .map(([part, spent]) => `${part} ${seconds(spent)}`)
        .join(", ")}`,
    },
    parts
      .filter(([, spent]) => spent > 0)
      .map(([part, spent, kind]) => {
        const bar = h("span", { class: `bar-${kind}`, title: `${part}: ${seconds(spent)}` });
        bar.style.flexGrow = spent / all;
        return bar;
      }),
  );
}

function segmentTree({ segments, turns, echoes }, query) {
  return [
    h("h2", {}, "Segments"),
    table(
      "Segments",
      [
        ["segment", "n"],
        ["continues"],
        ["reason"],
        ["agent"],
        ["shared", "n"],
        ["tokens", "n"],
        ["sampled", "n"],
        ["turns", "n"],
        ["versions"],
      ],
      segments.map((segment, index) => [
        h(
          "a",
          {
            href: rolloutHref(query.run, query.job, "tokens", `?segment=${index}`),
            class: `lane-${Math.min(segment.lane, 3)}`,
          },
          String(index),
        ),
        segment.parent === null ? "nothing" : `segment ${segment.parent}`,
        (segment.reason ?? "").replaceAll("_", " "),
        [segment.agent_type, segment.agent].filter(Boolean).join(" "),
        number(segment.shared),
        number(segment.tokens),
        number(segment.sampled),
        number(turns.filter((turn) => turn.segment === index).length),
        [...new Set(segment.spans.map((span) => span.policy_version))].join(", "),
      ]),
    ),
    Object.keys(echoes).length > 0 && [
      h("h2", {}, "How turns came back in later requests"),
      table(
        "Echoes",
        [["how"], ["turns", "n"]],
        Object.entries(echoes).map(([how, count]) => [how.replaceAll("_", " "), number(count)]),
      ),
    ],
  ];
}

function accounting({ segments, turns, undelivered_tokens: lost, drift_tokens: drift }) {
  const delivered = segments.reduce((all, segment) => all + segment.sampled, 0);
  const dropped = turns.reduce((all, turn) => all + turn.dropped_tokens, 0);
  return [
    h("h2", {}, "Tokens"),
    table(
      "Tokens that were sampled, and where they are",
      [["tokens"], ["count", "n"]],
      [
        ["sampled for it by the engine", number(delivered + dropped + lost)],
        ["= delivered, in its segments", number(delivered)],
        ["+ dropped, sampled after a complete call", number(dropped)],
        ["+ undelivered: a defect, if not 0", number(lost)],
        ["recorded otherwise than sampled: a defect, if not 0", number(drift)],
      ],
    ),
  ];
}

/* ---------------------------------------------------------------- two of them */

const COMPARED = [
  ["Reward", "reward"],
  ["Status", "status"],
  ["Stopped", "stop"],
  ["Turns", "turns"],
  ["Tool calls", "calls"],
  ["Sampled tokens", "sampled"],
  ["All tokens", "tokens"],
  ["Mean log-probability", "logprob"],
  ["Run, s", "run_s"],
  ["Evaluation, s", "eval_s"],
  ["Waited, s", "waited_s"],
];

/** Two rollouts side by side. */
export async function comparePage(main, { run, jobs }, signal) {
  const found = await Promise.all(jobs.map((job) => ask("runs/rollout", { run, job }, signal)));
  if (signal.aborted) return;
  const shown = (value) => (typeof value === "number" ? number(value, 3) : (value ?? "\u2013"));
  const columns = found.map(() => h("section", { class: "column" }));
  fill(
    main,
    h("h1", {}, "Two rollouts"),
    table(
      "Figures of both",
      [["figure"], ...jobs.map((job) => [job, "n"])],
      COMPARED.map(([name, field]) => [
        name,
        ...found.map(({ row }) =>
          h("span", { class: found[0].row[field] === found[1].row[field] ? "" : "differs" }, shown(row[field])),
        ),
      ]),
    ),
    h("div", { class: "columns" }, columns),
  );
  columns.forEach((column, place) => {
    const body = h("div");
    fill(
      column,
      h("h2", {}, h("a", { href: rolloutHref(run, jobs[place]) }, jobs[place]), " ", rewardCell(found[place].reward)),
      body,
    );
    show.conversation(body, found[place], { run, job: jobs[place] }, signal);
  });
}
