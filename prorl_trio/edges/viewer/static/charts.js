/* Rewards as colours with their figures, and lines over steps or time. Colours are told apart by colour-blind people. */

import { h, svg, number, fold, table } from "./dom.js";

const SHADES = 5;

/** A reward as a coloured cell: blue is high, orange is low, hatched is none; the figure is in it. */
export function rewardCell(reward, title, href) {
  const shade =
    reward === null || reward === undefined ? "none" : Math.max(0, Math.min(SHADES - 1, Math.floor(reward * SHADES)));
  const shown = reward === null || reward === undefined ? "\u2013" : shortFigure(reward);
  const properties = {
    class: `reward r-${shade}`,
    title: title || `reward ${shown}`,
    "aria-label": title || `reward ${shown}`,
  };
  return href ? h("a", { ...properties, href }, shown) : h("span", { ...properties, role: "img" }, shown);
}

const shortFigure = (reward) =>
  Number.isInteger(reward) ? String(reward) : reward.toFixed(2).replace(/^(-?)0\./, "$1.");

const WIDTH = 420;
const HEIGHT = 180;
const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };

/**
 * Lines over x. Each series has a name and points [x, y]; a y of null is a gap, and is shown as one.
 * Its figures are in a table below, for who does not see it.
 */
export function lineChart(title, series, { xName = "step", min = 0, max = null, height = HEIGHT } = {}) {
  const drawn = series.filter((each) => each.points.some(([, y]) => y !== null));
  const all = drawn.flatMap((each) => each.points);
  if (!all.length)
    return h("figure", { class: "chart" }, h("figcaption", {}, title), h("p", { class: "quiet" }, "Nothing yet."));
  const xs = all.map(([x]) => x);
  const ys = all.map(([, y]) => y).filter((y) => y !== null);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const [low, high] = niceBounds(Math.min(min ?? Infinity, ...ys), Math.max(max ?? -Infinity, ...ys));
  const toX = (x) => MARGIN.left + ((x - left) / (right - left || 1)) * (WIDTH - MARGIN.left - MARGIN.right);
  const toY = (y) => height - MARGIN.bottom - ((y - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
  const ticks = [0, 0.5, 1].map((share) => low + share * (high - low));
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}, by ${xName}` },
    ticks.map((y) => [
      svg("line", { class: "rule", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: toY(y), y2: toY(y) }),
      svg("text", { x: MARGIN.left - 6, y: toY(y) + 4, "text-anchor": "end" }, compact(y)),
    ]),
    [left, right].map((x, place) =>
      svg(
        "text",
        { x: toX(x), y: height - 8, "text-anchor": place ? "end" : "start" },
        xName === "s" ? `${Math.round(x)} s` : `${place ? "" : `${xName} `}${compact(x)}`,
      ),
    ),
    drawn.map((each, place) => svg("path", { class: `line line-${place % 5}`, d: pathOf(each.points, toX, toY) })),
    drawn.flatMap((each, place) =>
      each.points.length > 60
        ? []
        : each.points
            .filter(([, y]) => y !== null)
            .map(([x, y]) =>
              svg(
                "circle",
                { class: `dot line-${place % 5}`, cx: toX(x), cy: toY(y), r: 2.5 },
                svg("title", {}, `${each.name}, ${xName} ${number(x)}: ${number(y, 4)}`),
              ),
            ),
    ),
  );
  const legend = h(
    "p",
    { class: "legend" },
    drawn.map((each, place) => h("span", { class: `key line-${place % 5}` }, each.name)),
  );
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", {}, title),
    picture,
    drawn.length > 1 && legend,
    xName !== "s" &&
      fold("Figures", () =>
        table(
          `${title}, figures`,
          [[xName, "n"], ...drawn.map((each) => [each.name, "n"])],
          [...new Set(xs)]
            .sort((a, b) => a - b)
            .map((x) => [number(x), ...drawn.map((each) => number(each.points.find(([at]) => at === x)?.[1], 4))]),
        ),
      ),
  );
}

function pathOf(points, toX, toY) {
  let pen = "M";
  let path = "";
  for (const [x, y] of points) {
    if (y === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function niceBounds(low, high) {
  if (!(high > low)) return [low, low + 1];
  const step = 10 ** Math.floor(Math.log10(high - low)) / 2;
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step];
}

const compact = (value) => (Math.abs(value) >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toPrecision(3)));

/** The curves of a learning run: see `curve.json`. */
export function learningCurves(curve) {
  const { steps = [], evaluations = [] } = curve;
  const step = (name, field) => ({ name, points: steps.map((each) => [each.step, each[field]]) });
  const held = (name, field) => ({ name, points: evaluations.map((each) => [each.step, each[field]]) });
  const families = Object.keys(evaluations.at(-1)?.by_family ?? {});
  return h(
    "section",
    { "aria-label": "Learning curves" },
    h("h2", {}, "Learning"),
    h(
      "div",
      { class: "charts" },
      lineChart(
        "Reward",
        [
          held("held out, greedy", "greedy"),
          held("held out, sampled", "sampled"),
          step("trained on", "reward"),
          step("all sampled", "reward_sampled"),
        ],
        { max: 1 },
      ),
      lineChart("Informative groups, share", [step("share", "informative_share")], { max: 1 }),
      lineChart("Sampled tokens of a rollout", [step("trained on", "length"), held("held out", "length")]),
      lineChart("Gap of log-probabilities, trainer and engine", [held("held out", "gap")]),
      lineChart("Loss", [step("loss", "loss")], { min: null }),
      lineChart("Seconds of a step", [
        step("rollouts", "wait_s"),
        step("training", "update_s"),
        step("weights", "sync_s"),
        step("held out", "evaluate_s"),
        step("checkpoint", "checkpoint_s"),
      ]),
      families.length > 0 &&
        lineChart(
          "Held-out reward by family",
          families
            .slice(0, 5)
            .map((name) => ({ name, points: evaluations.map((each) => [each.step, each.by_family[name] ?? null]) })),
          { max: 1 },
        ),
    ),
  );
}
