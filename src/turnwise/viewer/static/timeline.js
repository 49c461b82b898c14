// When each turn was asked for and sampled: one trajectory's, beside others of its step.

import { h, short, svg } from "./dom.js";
import { runColor } from "./color.js";

const SPAN = 1000;
const NAMES = 70;
const OTHERS = 60;
const THIN = 4;

// A call is [turn, asked, first token, ended, worker]; `all` has those of each trajectory.
export function timelineView(all, index, summaries) {
  const calls = all[index];
  const from = Math.max(0, Math.min(index - OTHERS / 2, all.length - OTHERS));
  const near = all.slice(from, from + OTHERS);
  const times = near.flat();
  const start = Math.min(...times.map((call) => call[1]));
  const length = Math.max(...times.map((call) => call[3])) - start || 1;
  const workers = [...new Set(times.map((call) => call[4]))].sort();
  const x = (time) => NAMES + ((time - start) / length) * (SPAN - NAMES - 8);
  const top = 52;
  const height = top + near.length * THIN + 22;
  const image = svg("svg", { viewBox: `0 0 ${SPAN} ${height}`, role: "img", "aria-label": `Turns of this trajectory and of ${near.length - 1} others of the step, over ${short(length)} seconds. The table has the same times.` });
  for (let part = 0; part <= 4; part++) {
    const at = x(start + (length * part) / 4);
    image.append(svg("line", { class: "grid", x1: at, x2: at, y1: 14, y2: height - 18 }),
      svg("text", { x: at, y: height - 4, "text-anchor": part === 4 ? "end" : "middle" }, `${short((length * part) / 4)} s`));
  }
  image.append(svg("text", { x: 0, y: 33 }, "this one"), svg("text", { x: 0, y: top + 12 }, "the step"));
  const bars = (call, y, size, kind) => {
    const [turn, asked, first, ended, worker] = call;
    const color = runColor(workers.indexOf(worker));
    const begin = first ?? asked;
    return svg("g", { class: kind },
      svg("title", null, `turn ${turn}${worker ? `, ${worker}` : ""}: ${first === null ? "" : `${short(first - asked)} s to the first token, `}${short(ended - begin)} s of sampling`),
      svg("rect", { class: "wait", x: x(asked), y, width: Math.max(0.5, x(begin) - x(asked)), height: size, fill: color }),
      svg("rect", { x: x(begin), y, width: Math.max(0.5, x(ended) - x(begin)), height: size, fill: color }));
  };
  for (const call of calls) image.append(bars(call, 20, 18, null));
  near.forEach((each, row) => {
    const y = top + row * THIN;
    if (from + row === index) image.append(svg("rect", { class: "here", x: NAMES, y: y - 1, width: SPAN - NAMES - 8, height: THIN }));
    for (const call of each) image.append(bars(call, y, THIN - 2, from + row === index ? null : "other"));
  });
  const lines = calls.map(([turn, asked, first, ended, worker], row) => h("tr", null, h("td", null, `turn ${turn}`),
    [asked - start, first === null ? null : first - asked, ended - (first ?? asked), calls[row + 1] ? calls[row + 1][1] - ended : null].map((value) => h("td", { class: "number" }, value === null ? "–" : short(Math.max(0, value)))),
    h("td", null, worker || "–")));
  const heads = ["Asked at", "To the first token", "Sampling", "Tools, then the next turn"];
  return h("div", { class: "timeline stack" },
    h("div", { class: "panel" }, image),
    h("p", { class: "quiet small" }, workers.filter(Boolean).map((name) => [h("i", { class: "swatch", style: { background: runColor(workers.indexOf(name)) } }), ` ${name}  `]), `Pale: the wait for the first token, where it is known. Gaps: tools and the environment. ${summaries.length > near.length ? `${near.length} of ${summaries.length} trajectories are shown.` : ""}`),
    h("div", { class: "wide" }, h("table", null, h("thead", null, h("tr", null, h("th", { scope: "col" }, "Seconds"), heads.map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col" }, "Worker"))), h("tbody", null, lines))));
}
