/* The runs of a folder, and one run: its curves, its groups and its rollouts, filtered and sorted by the server. */

import { h, fill, firstLine, fold, figures, inSteps, table, number, seconds } from "./dom.js";
import { SOURCE, ask } from "./source.js";
import { learningCurves, rewardCell } from "./charts.js";
import { runHref, rolloutHref } from "./rollout.js";

const PAGE = 100;
const FOLLOW_MS = 2000;
const TYPING_MS = 150;
const ROWS_AT_ONCE = 20;
const FACETS = {
  status: "Status",
  cause: "Cause",
  stop: "Stopped",
  handler: "Handler",
  agent: "Agent",
  family: "Family",
  version: "Policy version",
};
const BOUNDS = { Reward: ["reward_min", "reward_max"], "Sampled tokens": ["tokens_min", "tokens_max"] };
const COLUMNS = [
  ["job_id", "Rollout", ""],
  ["reward", "Reward", "n"],
  ["status", "Status", ""],
  ["stop", "Stopped", ""],
  ["turns", "Turns", "n"],
  ["calls", "Calls", "n"],
  ["sampled", "Sampled", "n"],
  ["tokens", "Tokens", "n"],
  ["logprob", "Log-prob.", "n"],
  ["run_s", "Run", "n"],
  ["eval_s", "Eval", "n"],
  ["waited_s", "Waited", "n"],
];
const SHOWN = {
  run_s: seconds,
  eval_s: seconds,
  waited_s: seconds,
  logprob: (value) => number(value, 3),
  status: (value, row) => (row.cause ? `${value.replace("_", " ")}: ${row.cause}` : value),
  stop: (value) => value.replaceAll("_", " "),
};

/** The list of runs. */
export async function runsPage(main, _route, signal) {
  const { root, runs } = await ask("runs", {}, signal);
  if (signal.aborted) return;
  if (runs.length === 1) {
    location.replace(runHref(runs[0].run));
    return;
  }
  fill(
    main,
    h("h1", {}, "Runs"),
    h("p", { class: "quiet" }, root),
    table(
      "Runs",
      [
        ["Run"],
        ["Kind"],
        ["Tasks"],
        ["Model"],
        ["Rollouts", "n"],
        ["Mean reward", "n"],
        ["Steps", "n"],
        ["Last change"],
      ],
      runs.map((run) => [
        h("a", { href: runHref(run.run), class: "row" }, run.name),
        run.kind,
        run.tasks,
        run.model.split("/").at(-1),
        number(run.rollouts),
        number(run.reward_mean, 3),
        run.steps ? `${run.steps}${run.of ? ` of ${run.of}` : ""}` : "",
        new Date(run.changed_s * 1000).toLocaleString(),
      ]),
    ),
  );
}

/** One run. The filter is in the address, so that a link has it. */
export async function runPage(main, { run, parameters }, signal) {
  const about = await ask("runs/about", { run }, signal);
  if (signal.aborted) return;
  const filter = Object.fromEntries(parameters);
  const list = h("div", { class: "list", "aria-busy": "true" });
  const counted = h("span", { class: "quiet", role: "status" });
  const heading = h("div");
  const describe = (now) =>
    fill(
      heading,
      figures([
        ["Kind", now.kind],
        ["Tasks", now.tasks],
        ["Model", now.model.split("/").at(-1)],
        ["Rollouts", number(now.rollouts)],
        ["Mean reward", number(now.reward_mean, 3)],
        ["Steps", now.steps ? `${now.steps}${now.of ? ` of ${now.of}` : ""}` : ""],
        ...Object.entries(now.facets.status ?? {}).map(([status, count]) => [status.replace("_", " "), number(count)]),
      ]),
    );
  describe(about);
  const curves = h(
    "div",
    {},
    Object.keys(about.figures).length > 0 &&
      fold("Report", () =>
        table(
          "Report",
          [["figure"], ["value", "n"]],
          Object.entries(about.figures).map(([name, value]) => [
            name,
            typeof value === "number" ? number(value, 3) : String(value ?? "\u2013"),
          ]),
        ),
      ),
  );
  const draw = (curve) => {
    if (Object.keys(curve).length > 0) fill(curves, learningCurves(curve));
  };
  draw(about.curve);
  fill(
    main,
    h("h1", {}, about.name),
    heading,
    curves,
    about.recorded
      ? [filters(about, filter, change), h("div", { class: "bar" }, viewChoice(filter, change), counted), list]
      : h("p", { class: "quiet" }, "This run recorded no trajectories of its own."),
  );

  let timer = 0;
  function change(changed, soon = false) {
    Object.assign(filter, changed, "offset" in changed ? {} : { offset: "" });
    clearTimeout(timer);
    timer = setTimeout(
      () => {
        const kept = new URLSearchParams(
          Object.entries(filter).filter(([, value]) => value !== "" && value !== undefined),
        );
        history.replaceState(null, "", `${runHref(run)}${kept.size ? `?${kept}` : ""}`);
        refresh();
      },
      soon ? TYPING_MS : 0,
    );
  }

  let asked = 0;
  async function refresh() {
    const { by, ...wanted } = filter;
    const mine = ++asked;
    const began = performance.now();
    try {
      const found = await ask(
        by === "rollout" ? "runs/rollouts" : "runs/groups",
        { ...wanted, run, limit: PAGE },
        signal,
      );
      if (mine !== asked || signal.aborted) return;
      const what = by === "rollout" ? "rollouts" : "groups";
      fill(counted, `${number(found.total)} ${what}, found in ${Math.round(performance.now() - began)} ms`);
      const [shown, body, rows] =
        by === "rollout"
          ? rolloutTable(run, found.rows, filter, change)
          : groupTable(run, found.groups, filter, change);
      fill(list, shown, pager(found.total, filter, change));
      await inSteps(rows, ROWS_AT_ONCE, signal, (some) => {
        if (mine === asked) body.append(...some.map((row) => row()));
      });
    } catch (error) {
      if (!signal.aborted) fill(list, h("p", { class: "error" }, error.message));
    }
    list.setAttribute("aria-busy", "false");
  }
  if (about.recorded) await refresh();
  if (SOURCE !== "follow") return;
  follow(run, about, signal, (now) => {
    describe(now);
    draw(now.curve);
    if (about.recorded) refresh();
  });
}

async function follow(run, about, signal, changed) {
  let last = about;
  while (!signal.aborted) {
    await new Promise((done) => setTimeout(done, FOLLOW_MS));
    const now = signal.aborted || document.hidden ? last : await ask("runs/about", { run }, signal).catch(() => last);
    if (now.rollouts !== last.rollouts || now.steps !== last.steps) changed(now);
    last = now;
  }
}

function viewChoice(filter, change) {
  const choose = (by) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String((filter.by || "group") === by),
        onclick: (event) => {
          event.target.parentElement
            .querySelectorAll("button")
            .forEach((each) => each.setAttribute("aria-pressed", String(each === event.target)));
          change({ by: by === "group" ? "" : by });
        },
      },
      by === "group" ? "Groups" : "Rollouts",
    );
  return h("span", { class: "choice", role: "group", "aria-label": "Show" }, choose("group"), choose("rollout"));
}

function filters(about, filter, change) {
  const field = (label, input) => h("label", { class: "field" }, h("span", {}, label), input);
  const text = h("input", {
    type: "search",
    id: "search",
    value: filter.text || "",
    placeholder: "in all that was said",
    "aria-keyshortcuts": "/",
    oninput: () => change({ text: text.value }, true),
  });
  const selects = Object.entries(FACETS)
    .filter(([name]) => Object.keys(about.facets[name] ?? {}).some((value) => value !== ""))
    .map(([name, label]) => {
      const choice = h(
        "select",
        { onchange: () => change({ [name]: choice.value }) },
        h("option", { value: "" }, "any"),
        Object.entries(about.facets[name]).map(([value, count]) =>
          h(
            "option",
            { value: value || "-", selected: filter[name] === (value || "-") },
            `${(value || "none").replaceAll("_", " ")} (${count})`,
          ),
        ),
      );
      return field(label, choice);
    });
  const bounds = Object.entries(BOUNDS).map(([label, names]) =>
    h(
      "div",
      { class: "field", role: "group", "aria-label": label },
      h("span", {}, label),
      h(
        "span",
        { class: "pair" },
        names.map((name, place) => {
          const input = h("input", {
            type: "number",
            step: "any",
            class: "short",
            "aria-label": `${label}, ${place ? "at most" : "at least"}`,
            placeholder: place ? "to" : "from",
            value: filter[name] || "",
            oninput: () => change({ [name]: input.value }, true),
          });
          return input;
        }),
      ),
    ),
  );
  const clear = h("button", { type: "reset" }, "Clear");
  return h(
    "form",
    {
      class: "filters",
      role: "search",
      onsubmit: (event) => event.preventDefault(),
      onreset: () => {
        change(
          Object.fromEntries(
            ["text", ...Object.keys(FACETS), ...Object.values(BOUNDS).flat()].map((name) => [name, ""]),
          ),
        );
        text.form.querySelectorAll("input, select").forEach((each) => {
          each.value = "";
        });
      },
    },
    field("Text", text),
    selects,
    bounds,
    clear,
  );
}

/** A head of a column that sorts by it. */
function sorter(name, title, kind, filter, change) {
  const now = filter.sort === name ? (filter.descending === "true" ? "descending" : "ascending") : "none";
  return h(
    "th",
    { scope: "col", class: kind, "aria-sort": now },
    h(
      "button",
      {
        type: "button",
        onclick: () =>
          change(
            now === "none"
              ? { sort: name, descending: kind === "n" ? "true" : "" }
              : now === (kind === "n" ? "descending" : "ascending")
                ? { descending: kind === "n" ? "" : "true" }
                : { sort: "", descending: "" },
          ),
      },
      title,
      h("span", { "aria-hidden": "true" }, { ascending: " \u2191", descending: " \u2193", none: "" }[now]),
    ),
  );
}

/** A table, its body, and what makes its rows: many at once would take the page too long. */
function sortedTable(caption, heads, rows) {
  const body = h("tbody");
  return [
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), body),
    ),
    body,
    rows,
  ];
}

function rolloutTable(run, rows, filter, change) {
  return sortedTable(
    "Rollouts",
    COLUMNS.map(([name, title, kind]) => sorter(name, title, kind, filter, change)),
    rows.map(
      (row) => () =>
        h(
          "tr",
          { title: row.error },
          COLUMNS.map(([name, , kind]) =>
            h(
              "td",
              { class: kind },
              name === "job_id"
                ? h("a", { href: rolloutHref(run, row.job_id), class: "row" }, row.job_id)
                : name === "reward"
                  ? rewardCell(row.reward)
                  : (SHOWN[name] || number)(row[name], row),
            ),
          ),
        ),
    ),
  );
}

function groupTable(run, groups, filter, change) {
  const heads = [
    sorter("group_id", "Group", "", filter, change),
    h("th", { scope: "col" }, "Rewards"),
    sorter("reward", "Mean", "n", filter, change),
    h("th", { scope: "col", class: "n" }, "Spread"),
    sorter("sampled", "Sampled", "n", filter, change),
    h("th", { scope: "col" }, "Asked"),
  ];
  return sortedTable(
    "Groups",
    heads,
    groups.map(
      (group) => () =>
        h(
          "tr",
          {},
          h("td", {}, h("a", { href: rolloutHref(run, group.rollouts[0][0]), class: "row" }, group.group)),
          h(
            "td",
            { class: "strip" },
            group.rollouts.map(([job, reward, end, sampled]) =>
              rewardCell(
                reward,
                `${job}: reward ${number(reward)}, ${end.replaceAll("_", " ")}, ${number(sampled)} sampled tokens`,
                rolloutHref(run, job),
              ),
            ),
          ),
          h("td", { class: "n" }, number(group.mean)),
          h("td", { class: "n" }, number(group.spread)),
          h("td", { class: "n" }, number(group.sampled)),
          h("td", { class: "quiet", title: group.instance }, firstLine(group.task)),
        ),
    ),
  );
}

function pager(total, filter, change) {
  const offset = Number(filter.offset || 0);
  if (total <= PAGE) return null;
  const go = (to, title, possible) =>
    h(
      "button",
      {
        type: "button",
        disabled: !possible,
        onclick: () => {
          change({ offset: to ? String(to) : "" });
          window.scrollTo(0, 0);
        },
      },
      title,
    );
  return h(
    "nav",
    { class: "bar", "aria-label": "Pages" },
    go(Math.max(0, offset - PAGE), "Before", offset > 0),
    h(
      "span",
      { class: "quiet" },
      `${number(offset + 1)} to ${number(Math.min(total, offset + PAGE))} of ${number(total)}`,
    ),
    go(offset + PAGE, "Next", offset + PAGE < total),
  );
}
