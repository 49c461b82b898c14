// Runs laid over each other: curves, alarms, and the keys in which they differ.

import { chip, counted, h, mean, runColor, short } from "./dom.js";
import { fetchNow, link, readMetrics, runPath } from "./data.js";
import { barChart, chart, clearCharts } from "./chart.js";

const PHASES = ["idle", "train", "write", "weights", "evaluate", "save"];
const POOLS = ["fresh", "mixed", "mastered", "hopeless"];
const BARS = 60;

const perTrajectory = (row) => (row.trajectories && row.sampled_tokens !== null && row.sampled_tokens !== undefined ? row.sampled_tokens / row.trajectories : null);

function meanStaleness(row) {
  const entries = Object.entries(row.staleness ?? {});
  const tokens = entries.reduce((sum, [, count]) => sum + count, 0);
  return tokens ? entries.reduce((sum, [age, count]) => sum + Number(age) * count, 0) / tokens : null;
}

function failedCalls(row) {
  const events = row.events ?? {};
  const called = (events.tool_call ?? 0) + (events.tool_malformed ?? 0);
  const failed = Object.entries(events).filter(([name]) => name.startsWith("tool_") && name !== "tool_call");
  return called ? failed.reduce((sum, [, count]) => sum + count, 0) / called : null;
}

function notCompleted(row) {
  if (!row.statuses || !row.trajectories) return null;
  return 1 - (row.statuses.completed ?? 0) / row.trajectories;
}

// Title, unit, [[label, value of a row], ...], options. The second value of a chart is dashed.
const CHARTS = [
  ["Reward", "mean of the trajectories", [["reward", (row) => (row.step ? row.reward_mean : null)]], { alarm: ["flat_steps", "reward_left", "no_signal"] }],
  ["Accuracy", "held-out problems", [["accuracy", (row) => row.accuracy_heldout], ["95 % from", (row) => row.heldout?.accuracy_low ?? null], ["to", (row) => row.heldout?.accuracy_high ?? null]], { low: 0, high: 1, sparse: true }],
  ["Loss", "supervised, nats per token", [["train", (row) => (row.reward_mean === undefined ? row.loss : null)], ["held out", (row) => row.loss_heldout]], { low: 0, sparse: true }],
  ["Length", "sampled tokens of a trajectory", [["tokens", perTrajectory]], { alarm: ["truncated"] }],
  ["Turns", "of a trajectory", [["turns", (row) => row.turns_mean]], {}],
  ["Entropy", "nats per token", [["entropy", (row) => row.entropy]], { low: 0, alarm: ["entropy_left"] }],
  ["Log-prob difference", "engine and trainer", [["mean", (row) => row.step ? row.logprob_diff_mean : null], ["max", (row) => row.step ? row.logprob_diff_max : null]], { log: true, alarm: ["logprob_growth"] }],
  ["KL divergence", "from the reference, and from the teacher", [["reference", (row) => row.kl], ["teacher", (row) => row.teacher_kl]], {}],
  ["Importance ratio", "percentiles", [["p99", (row) => row.ratio_p99], ["p1", (row) => row.ratio_p1]], {}],
  ["Clipped tokens", "share", [["clipped", (row) => row.clip_fraction]], { low: 0 }],
  ["Gradient norm", "", [["norm", (row) => row.grad_norm]], { low: 0 }],
  ["Staleness", "optimizer steps", [["mean", meanStaleness], ["max", (row) => (row.step ? row.staleness_max : null)]], { low: 0, high: 1, alarm: ["stale"] }],
  ["Groups without signal", "of a step", [["groups", (row) => row.groups_without_signal]], { low: 0, alarm: ["no_signal"] }],
  ["Resting rows", "of the curriculum", [["rows", (row) => row.pools?.resting]], { low: 0 }],
  ["Failed tool calls", "share", [["failed", failedCalls]], { low: 0, alarm: ["tool_errors"] }],
  ["Not completed", "share of the trajectories", [["share", notCompleted]], { low: 0, alarm: ["truncated", "dropped"] }],
  ["Throughput", "tokens per second", [["rollout", (row) => row.rollout_tokens_per_s], ["train", (row) => row.train_tokens_per_s || null]], { low: 0 }],
  ["Step", "seconds", [["step", (row) => row.step_seconds]], { low: 0, alarm: ["idle"] }],
  ["Exact tokens", "% of the trained", [["exact", (row) => (row.trained_tokens === 0 ? null : row.exact_percent)]], { high: 100, most: 100 }],
];

// The reward and the accuracy of each environment, and the accuracy of each held-out set, in runs with several.
function environmentCharts(rows) {
  const namesOf = (key) => [...new Set(rows.flat().flatMap((row) => Object.keys(row[key] ?? {})))].sort();
  const accuracy = (name, value) => [`Accuracy of ${name}`, "its held-out problems", [["accuracy", value]], { low: 0, high: 1, sparse: true }];
  return [
    ...namesOf("environments").flatMap((name) => [
      [`Reward of ${name}`, "mean of its trajectories", [["reward", (row) => row.environments?.[name]?.reward_mean]], {}],
      accuracy(name, (row) => row.environments?.[name]?.heldout?.accuracy),
    ]),
    ...namesOf("heldout_sets").map((name) => accuracy(name, (row) => row.heldout_sets?.[name]?.accuracy)),
  ];
}

export async function showOverview(main, runs, go) {
  const figures = h("div", { class: "charts" });
  const notes = h("div", { class: "stack" });
  const top = h("div", { class: "stack" });
  const differences = h("div");
  const state = { alarms: {}, counts: "" };

  async function draw(current) {
    const rows = await Promise.all(current.map((run) => readMetrics(run.name)));
    // An evaluation may come later than the line of its step.
    const counts = JSON.stringify([rows.map((each) => [each.length, each.filter((row) => (row.accuracy_heldout ?? null) !== null).length]), current.map((run) => Object.keys(run.files))]);
    if (counts === state.counts) return;
    state.counts = counts;
    const alarms = await Promise.all(current.map((run) => fetchNow(runPath(run.name, "/alarms"))));
    const active = document.activeElement?.closest?.(".chart")?.querySelector("h3")?.textContent;
    clearCharts();
    top.replaceChildren(h("h1", null, current.length > 1 ? `${current.length} runs` : current[0].name), runTable(current, rows));
    notes.replaceChildren(...alarmList(current, alarms));
    const many = current.length > 1;
    const made = [...CHARTS.slice(0, 2), ...environmentCharts(rows), ...CHARTS.slice(2)].map(([title, unit, values, options]) => {
      const series = current.flatMap((run, index) => values.map(([label, value], second) => ({
        label: many ? (values.length > 1 ? `${run.name} ${label}` : run.name) : label,
        color: runColor(index), second: second > 0,
        points: rows[index].map((row) => [row.step, value(row)]).filter(([, known]) => !options.sparse || (known !== null && known !== undefined)),
      })));
      const here = alarms.flatMap((each, index) => each.alarms.filter((alarm) => options.alarm?.includes(alarm.name)).map((alarm) => (many ? { ...alarm, run: current[index].name, color: runColor(index) } : alarm)));
      const open = (step) => {
        const name = `step-${String(step).padStart(4, "0")}`;
        const run = current.find((each) => name in each.files);
        if (run) go(link(run.name, name));
      };
      return chart({ title, unit, series, alarms: here, open, ...options });
    });
    const bars = (run, index, title, key, known, unit, part) => {
      const shown = rows[index].filter((row) => row.step && row[key]).slice(-BARS);
      const names = known.filter((name) => shown.some((row) => row[key][name]));
      return names.length ? barChart({ title: many ? `${title} of ${run.name}` : title, unit, rows: shown, names, value: (row, name) => row[key][name], part }) : null;
    };
    const divided = current.flatMap((run, index) => [
      bars(run, index, "Pools", "pools", POOLS, "rows by their last group", "rows"),
      bars(run, index, "Phases", "phase_seconds", PHASES, "seconds of a step", "seconds"),
    ]);
    figures.replaceChildren(...[...made, ...divided].filter(Boolean));
    if (!figures.children.length) figures.append(h("p", { class: "quiet" }, "No step is finished yet. This page updates by itself."));
    if (active) [...figures.querySelectorAll("h3")].find((title) => title.textContent === active)?.closest(".chart").querySelector("svg").focus();
  }

  main.replaceChildren(h("div", { class: "stack" }, top, notes, figures, differences));
  await draw(runs);
  differences.replaceChildren(await configTable(runs));
  return { title: "Overview", trail: [], refresh: draw };
}

function runTable(runs, rows) {
  const body = runs.map((run, index) => {
    const trained = rows[index].filter((row) => row.step);
    const measured = rows[index].filter((row) => row.accuracy_heldout !== null && row.accuracy_heldout !== undefined);
    const files = Object.keys(run.files);
    const last = trained.at(-1);
    return h("tr", null,
      h("td", null, h("i", { class: "swatch", style: { background: runColor(index) } }), ` ${run.name}`),
      h("td", { class: "number" }, last ? last.step : 0),
      h("td", { class: "number" }, last && last.reward_mean !== undefined ? short(mean(trained.slice(-5).map((row) => row.reward_mean))) : "–"),
      h("td", { class: "number" }, measured.length ? `${short(measured[0].accuracy_heldout)} → ${short(measured.at(-1).accuracy_heldout)}` : "–"),
      h("td", { class: "number" }, last ? short(last.step_seconds) : "–"),
      h("td", null, files.length ? h("a", { href: link(run.name, files.filter((name) => name.startsWith("step-")).at(-1) ?? files.at(-1)) }, `Open ${files.filter((name) => name.startsWith("step-")).at(-1) ?? files.at(-1)}`) : h("span", { class: "quiet" }, "no trajectories yet")));
  });
  return h("div", { class: "wide" }, h("table", null,
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Run"), ...["Steps", "Reward, last 5", "Held-out accuracy", "Seconds per step"].map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col" }, "Trajectories"))),
    h("tbody", null, body)));
}

function alarmList(runs, alarms) {
  const found = alarms.flatMap((each, index) => each.alarms.map((alarm) => [index, alarm]));
  const lists = [];
  if (found.length) {
    lists.push(h("section", { class: "panel", "aria-label": "Alarms" }, h("h2", null, counted(found.length, "alarm", "alarms")),
      h("ul", { class: "alarms" }, found.map(([index, alarm]) => h("li", null,
        runs.length > 1 && h("i", { class: "swatch", style: { background: runColor(index) } }),
        stepOfAlarm(runs[index], alarm), h("span", null, alarm.message))))));
  }
  alarms.forEach((each, index) => {
    if (each.error) lists.push(h("p", { class: "quiet small" }, `Alarms of ${runs[index].name} are not known: ${each.error}`));
  });
  return lists;
}

// The step of an alarm; a link where its trajectories are kept.
function stepOfAlarm(run, alarm) {
  const file = `step-${String(alarm.step).padStart(4, "0")}`;
  const shown = chip("step", alarm.step, true);
  return file in run.files ? h("a", { href: link(run.name, file), "aria-label": `Open step ${alarm.step} of ${run.name}` }, shown) : shown;
}

async function configTable(runs) {
  const configs = await Promise.all(runs.map((run) => fetchNow(runPath(run.name, "/config"))));
  const keys = [...new Set(configs.flatMap(Object.keys))];
  const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const wanted = runs.length > 1 ? keys.filter((key) => new Set(configs.map((config) => text(config[key]))).size > 1) : keys;
  const title = runs.length > 1 ? counted(wanted.length, "key differs", "keys differ") : "Configuration";
  const table = h("div", { class: "wide" }, h("table", null,
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Key"), runs.map((run) => h("th", { scope: "col" }, run.name)))),
    h("tbody", null, wanted.map((key) => h("tr", null, h("td", { class: "mono" }, key), configs.map((config) => h("td", { class: "mono" }, text(config[key]))))))));
  return h("details", { class: "panel", open: runs.length > 1 }, h("summary", null, h("h2", { style: { display: "inline" } }, title)), table);
}
