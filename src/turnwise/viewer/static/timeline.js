// When each turn was asked for and sampled: one trajectory's, beside others of its step.

import { h, short, svg } from "./dom.js";
import { ticks } from "./chart.js";
import { runColor } from "./color.js";

const SPAN = 1000;
const NAMES = 70;
const OTHERS = 60;
const THIN = 4;

function readCall([turn, asked, first, ended, worker, queued, tools]) {
  return { turn, asked, first, ended, worker, queued: queued ?? null, tools: tools ?? null };
}

// `recorded` has, for each trajectory, [turn, asked, first token, ended, worker, queued, tools] of each turn.
export function timelineView(recorded, index, summaries) {
  const all = recorded.map((calls) => calls.map(readCall));
  const calls = all[index];
  const from = Math.max(0, Math.min(index - OTHERS / 2, all.length - OTHERS));
  const near = all.slice(from, from + OTHERS);
  const times = near.flat();
  const start = Math.min(...times.map((call) => call.asked));
  const length = Math.max(...times.map((call) => call.ended + (call.tools ?? 0))) - start || 1;
  const workers = [...new Set(times.map((call) => call.worker))].sort();
  const x = (time) => NAMES + ((time - start) / length) * (SPAN - NAMES - 8);
  const top = 52;
  const height = top + near.length * THIN + 22;
  const image = svg("svg", { viewBox: `0 0 ${SPAN} ${height}`, role: "img", "aria-label": `Turns of this trajectory and of ${near.length - 1} others of the step, over ${short(length)} seconds. The table has the same times.` });
  for (const seconds of ticks(0, length, false)) {
    const at = x(start + seconds);
    image.append(svg("line", { class: "grid", x1: at, x2: at, y1: 14, y2: height - 18 }),
      svg("text", { x: at, y: height - 4, "text-anchor": at > SPAN - 30 ? "end" : "middle" }, `${short(seconds)} s`));
  }
  image.append(svg("text", { x: 0, y: 33 }, "this one"), svg("text", { x: 0, y: top + 12 }, "the step"));
  const bars = (call, y, size, kind) => {
    const { turn, asked, first, ended, worker, queued, tools } = call;
    const color = runColor(workers.indexOf(worker));
    const scheduled = asked + (queued ?? 0);
    const begin = Math.max(scheduled, first ?? asked);
    const bar = (name, from, to) => svg("rect", { class: name, x: x(from), y, width: Math.max(0.5, x(to) - x(from)), height: size, fill: color });
    const said = [queued !== null && `${short(queued)} s queued`, first !== null && `${short(first - asked)} s to the first token`, `${short(ended - begin)} s of sampling`, tools && `${short(tools)} s of tools and environment`];
    return svg("g", { class: kind },
      svg("title", null, `turn ${turn}${worker ? `, ${worker}` : ""}: ${said.filter(Boolean).join(", ")}`),
      queued ? bar("queued", asked, scheduled) : null, bar("wait", scheduled, begin), bar(null, begin, ended),
      tools ? bar("tools", ended, ended + tools) : null);
  };
  for (const call of calls) image.append(bars(call, 20, 18, null));
  near.forEach((each, row) => {
    const y = top + row * THIN;
    if (from + row === index) image.append(svg("rect", { class: "here", x: NAMES, y: y - 1, width: SPAN - NAMES - 8, height: THIN }));
    for (const call of each) image.append(bars(call, y, THIN - 2, from + row === index ? null : "other"));
  });
  const lines = calls.map((call, row) => {
    const { turn, asked, first, ended, worker, queued, tools } = call;
    const later = calls[row + 1];
    const seconds = [asked - start, queued, first === null ? null : first - asked, ended - (first ?? asked), ended - asked, tools, later ? later.asked - ended - (tools ?? 0) : null];
    return h("tr", null, h("th", { scope: "row" }, `turn ${turn}`), seconds.map((value) => h("td", { class: "number" }, value === null ? "–" : short(Math.max(0, value)))), h("td", null, worker || "–"));
  });
  const heads = ["Asked at", "Queued", "To the first token", "Sampling", "In all", "Tools, environment", "Until the next turn"];
  const unknown = calls.every((call) => call.queued === null) && "The time in the engine's queue is known with engine.metrics: true; without it, it is part of the wait for the first token. ";
  return h("div", { class: "timeline stack" },
    h("div", { class: "panel" }, image),
    h("p", { class: "quiet small" }, workers.filter(Boolean).map((name) => [h("i", { class: "swatch", style: { background: runColor(workers.indexOf(name)) } }), ` ${name} `]), "· Palest: in the queue. Pale: until the first token. Grey: tools and environment. ", unknown, `${summaries.length > near.length ? `${near.length} of ${summaries.length} trajectories are shown.` : ""}`),
    h("div", { class: "wide" }, h("table", null, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Seconds"), heads.map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col" }, "Worker"))), h("tbody", null, lines))));
}
