// Curves over steps, of several runs, with alarms; one step under the pointer in all charts.

import { h, runColor, short, svg } from "./dom.js";

const WIDTH = 400;
const HEIGHT = 170;
const LEFT = 44;
const BOTTOM = 20;
const TOP = 8;
const listeners = new Set();

export function clearCharts() {
  listeners.clear();
}

function announceStep(step) {
  for (const listener of listeners) listener(step);
}

// `series`: [{ label, color, second, points: [[step, value], ...] }].
export function chart({ title, unit, series, alarms, log, low, high, most, open }) {
  const drawn = series.map((one) => ({ ...one, ...withoutGaps(one.points, log) }))
    .filter((one) => one.points.length);
  if (!drawn.length) return null;
  const all = drawn.flatMap((one) => one.points);
  const steps = [...new Set(all.map((point) => point[0]))].sort((a, b) => a - b);
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const scale = log ? Math.log10 : (value) => value;
  let bottom = Math.min(...all.map((point) => scale(point[1])), ...(low === undefined ? [] : [low]));
  let top = Math.max(...all.map((point) => scale(point[1])), ...(high === undefined ? [] : [high]));
  if (bottom === top) {
    const room = Math.abs(top || 1) * 0.1;
    [bottom, top] = [bottom === low ? bottom : bottom - room, top + room];
  }
  if (most !== undefined) top = Math.min(top, most);
  if (log) [bottom, top] = [Math.floor(bottom), Math.ceil(top)];
  const x = (step) => LEFT + ((step - first) / Math.max(1, last - first)) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - (scale(value) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  const marked = (alarms ?? []).filter((alarm) => alarm.step >= first && alarm.step <= last);
  const warned = marked.map((alarm) => ` Alarm${alarm.run ? ` of ${alarm.run}` : ""} at step ${alarm.step}: ${alarm.message}.`).join("");
  const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0",
    "aria-label": `${title}: ${drawn.map((one) => `${one.label} from ${short(one.points[0][1])} at step ${one.points[0][0]} to ${short(one.points.at(-1)[1])} at step ${one.points.at(-1)[0]}`).join("; ")}.${warned} Arrow keys read steps.` });
  addGrid(image, ticks(bottom, top, log).map((part) => (log ? 10 ** part : part)), y);
  for (const step of new Set([first, steps[Math.floor((steps.length - 1) / 2)], last])) {
    image.append(svg("text", { x: x(step), y: HEIGHT - 4, "text-anchor": step === last && last !== first ? "end" : step === first ? "start" : "middle" }, step));
  }
  for (const alarm of marked) {
    // Marks of several runs at one step stand side by side.
    const before = marked.slice(0, marked.indexOf(alarm)).filter((each) => each.step === alarm.step).length;
    const at = x(alarm.step) + 6 * before;
    const color = alarm.color && { fill: alarm.color, stroke: alarm.color };
    image.append(svg("line", { class: "alarm", style: color && { stroke: alarm.color }, x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }),
      svg("path", { class: "alarm-head", style: color, d: `M${at - 5} ${TOP - 7}h10l-5 8z` }, svg("title", null, `${alarm.run ? `${alarm.run}, ` : ""}step ${alarm.step}: ${alarm.message}`)));
  }
  for (const one of drawn) {
    // "h0" draws a dot, which is all that there is of a point between two gaps.
    const d = one.points.map(([step, value]) => `${one.begins.has(step) ? "M" : "L"}${x(step).toFixed(1)} ${y(value).toFixed(1)}${one.begins.has(step) ? "h0" : ""}`).join("");
    image.append(svg("path", { class: one.second ? "curve second" : "curve", d, stroke: one.color }));
    if (one.points.length < 25) {
      for (const [step, value] of one.points) image.append(svg("circle", { cx: x(step), cy: y(value), r: 2.4, fill: one.color }));
    }
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  image.append(cross);
  const readout = h("div", { class: "readout" });
  let current = null;
  const show = (step) => {
    current = step;
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) {
      cross.setAttribute("x1", x(step));
      cross.setAttribute("x2", x(step));
    }
    const values = drawn.map((one) => {
      const point = step === null ? one.points.at(-1) : one.points.find((each) => each[0] === step);
      return h("span", null, h("i", { class: "swatch", style: { background: one.color, opacity: one.second ? "0.5" : "1" } }), `${one.label} ${point ? short(point[1]) : "–"}`);
    });
    readout.replaceChildren(step === null ? "" : h("span", null, `step ${step}`), ...values);
  };
  show(null);
  listeners.add((step) => show(step === null || !steps.includes(step) ? null : step));
  const nearest = (event) => {
    const box = image.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    return steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
  };
  image.addEventListener("pointermove", (event) => announceStep(nearest(event)));
  image.addEventListener("pointerleave", () => announceStep(null));
  image.addEventListener("click", (event) => open?.(nearest(event)));
  image.addEventListener("blur", () => announceStep(null));
  image.addEventListener("keydown", (event) => {
    const index = current === null ? steps.length - 1 : steps.indexOf(current);
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Enter" && current !== null) open?.(current);
    if (next === undefined) return;
    event.preventDefault();
    announceStep(steps[Math.min(steps.length - 1, Math.max(0, next))]);
    readout.setAttribute("aria-live", "polite");
  });
  return h("figure", { class: "chart panel" },
    h("figcaption", null, h("h3", null, title), h("span", { class: "quiet small" }, unit ?? "")), image, readout);
}

// The points that have a value, and the steps at which a line begins: the first, and those after a gap.
function withoutGaps(all, log) {
  const begins = new Set();
  const points = [];
  let gap = true;
  for (const [step, value] of all) {
    if (value === null || value === undefined) gap = true;
    else if (!log || value > 0) {
      if (gap) begins.add(step);
      gap = false;
      points.push([step, value]);
    }
  }
  return { points, begins };
}

export function ticks(bottom, top, log) {
  if (log) {
    const every = Math.max(1, Math.ceil((top - bottom) / 4));
    return range(bottom, top, every);
  }
  const rough = (top - bottom) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((factor) => factor * size).find((step) => step >= rough);
  return range(Math.ceil(bottom / every - 1e-9) * every, top + every * 1e-6, every);
}

function range(start, end, every) {
  const found = [];
  for (let value = start; value <= end; value += every) found.push(Number(value.toPrecision(10)));
  return found;
}

function addGrid(image, values, y) {
  const labels = labelsOf(values);
  values.forEach((value, index) => {
    const at = y(value);
    image.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: at, y2: at }),
      svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, labels[index]));
  });
}

// Labels of the ticks of an axis, with as many digits as tell them apart.
export function labelsOf(values) {
  let labels = values.map(short);
  for (let digits = 4; digits <= 10 && new Set(labels).size < labels.length; digits += 1) {
    labels = values.map((value) => String(Number(value.toPrecision(digits))));
  }
  return labels;
}

// Bars, one for each step, divided by name; `value` returns the part of a row with a name.
export function barChart({ title, unit, rows, names, value, part }) {
  const of = (row, name) => value(row, name) ?? 0;
  const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0",
    "aria-label": `${title}: ${names.map((name) => `${name} ${short(rows.reduce((sum, row) => sum + of(row, name), 0) / rows.length)} ${part} on average`).join("; ")}` });
  const top = Math.max(...rows.map((row) => names.reduce((sum, name) => sum + of(row, name), 0)));
  const height = (size) => (size / top) * (HEIGHT - TOP - BOTTOM);
  addGrid(image, ticks(0, top, false), (tick) => HEIGHT - BOTTOM - height(tick));
  const width = (WIDTH - LEFT - 8) / rows.length;
  rows.forEach((row, index) => {
    let base = HEIGHT - BOTTOM;
    names.forEach((name, color) => {
      const size = height(of(row, name));
      base -= size;
      image.append(svg("rect", { x: LEFT + index * width + width * 0.08, y: base, width: width * 0.84, height: size, fill: runColor(color) },
        svg("title", null, `step ${row.step}: ${name} ${short(of(row, name))} ${part}`)));
    });
  });
  image.append(svg("text", { x: LEFT, y: HEIGHT - 4 }, rows[0].step), svg("text", { x: WIDTH - 8, y: HEIGHT - 4, "text-anchor": "end" }, rows.at(-1).step));
  const legend = names.map((name, color) => h("span", null, h("i", { class: "swatch", style: { background: runColor(color) } }), `${name} ${short(of(rows.at(-1), name))}`));
  return h("figure", { class: "chart panel" }, h("figcaption", null, h("h3", null, title), h("span", { class: "quiet small" }, unit)), image, h("div", { class: "readout" }, legend));
}
