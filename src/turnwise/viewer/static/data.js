// Answers of the server, or those inside an exported page.

const element = document.getElementById("embedded");
const inside = element ? JSON.parse(element.textContent) : null;
const MOST_KEPT = 24;
const kept = new Map();

export const exported = inside !== null;
export const startPlace = inside?.start ?? "#/";

export async function fetchNow(path) {
  if (inside) {
    const known = path.endsWith("/tokens") ? inside.answers.tokens : inside.answers[path.split("?")[0]];
    if (known === undefined) throw new Error("this file does not contain it");
    return known;
  }
  return answerTo(path);
}

// Ask the server; `request` is sent as JSON.
export async function answerTo(path, request) {
  let response;
  try {
    response = await fetch(path, request && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(request) });
  } catch {
    throw new Error("the viewer does not answer: is `turnwise view` still running?");
  }
  if (!response.ok) {
    const text = await response.text();
    let detail = text;
    try {
      detail = JSON.parse(text).detail ?? text;
    } catch { /* plain text */ }
    throw new Error(typeof detail === "string" ? detail : JSON.stringify(detail));
  }
  return response.json();
}

export function runPath(run, rest = "") {
  return `/api/runs/${encodeURIComponent(run)}${rest}`;
}

// Trajectories and their tokens do not change while a page is open; the last ones are kept.
export function keep(path) {
  if (!kept.has(path)) {
    const answer = fetchNow(path);
    answer.catch(() => kept.delete(path));
    kept.set(path, answer);
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  return kept.get(path);
}

// The rows of each run's metrics, read on from where the last reading ended.
const metrics = new Map();

export async function readMetrics(run) {
  const known = metrics.get(run) ?? { rows: [], offset: "" };
  metrics.set(run, known);
  if (inside && known.rows.length) return known.rows;
  const more = await fetchNow(runPath(run, `/metrics?offset=${known.offset}`));
  if (more.reset) known.rows.length = 0;
  known.rows.push(...more.rows);
  known.offset = more.offset;
  return known.rows;
}

// The step files are links: "#/run/NAME/FILE/INDEX?key=value".
export function link(run, file, index, query) {
  const parts = [run, file, index].filter((part) => part !== undefined && part !== null);
  const search = new URLSearchParams(query ?? {}).toString();
  return `#/run/${parts.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

export function trajectoryPath(run, file, index) {
  return runPath(run, `/files/${encodeURIComponent(file)}${index === undefined ? "" : `/${index}`}`);
}

// The address of an image in a file's folder; undefined if an exported page has left it out.
export function imageAddress(run, file, name) {
  const path = `${trajectoryPath(run, file)}/images/${encodeURIComponent(name)}`;
  return inside ? inside.answers[path] : path;
}
