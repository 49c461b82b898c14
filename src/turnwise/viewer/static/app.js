// The page: which view the address names, and news of live runs.

import { h } from "./dom.js";
import { exported, fetchNow, startPlace } from "./data.js";
import { clearCharts } from "./chart.js";
import { showOverview } from "./overview.js";
import { showTrajectory } from "./trajectory.js";
import { showStep } from "./steps.js";

const EVERY = 2000;
const main = document.getElementById("main");
const trail = document.getElementById("trail");
const live = document.getElementById("live");
let runs = [];
let view = null;
let asked = 0;

function placeOf(hash) {
  const [path, search] = (hash || startPlace).replace(/^#\/?/, "").split("?");
  const [kind, run, file, index] = path.split("/").map(decodeURIComponent);
  const query = Object.fromEntries(new URLSearchParams(search ?? ""));
  return { kind, run, file, index: index === undefined ? undefined : Number(index), query };
}

function go(hash) {
  if (location.hash === hash) show();
  else location.hash = hash;
}

async function show() {
  const place = placeOf(location.hash);
  if (view?.same?.(place)) {
    view.update(place);
    return;
  }
  const number = ++asked;
  const target = h("div");
  const waiting = setTimeout(() => main.replaceChildren(h("p", { class: "quiet", role: "status" }, "Reading …")), 150);
  clearCharts();
  view = null;
  let made;
  try {
    made = place.kind !== "run" ? await showOverview(target, runs, go)
      : place.index === undefined ? await showStep(target, runs, place, go) : await showTrajectory(target, runs, place, go);
  } catch (error) {
    target.replaceChildren(h("h1", null, "This cannot be shown"), h("p", { class: "error" }, error.message));
    made = { title: "Error", trail: [] };
  }
  clearTimeout(waiting);
  if (number !== asked) return;
  main.replaceChildren(target);
  view = made;
  document.title = `${made.title} · turnwise`;
  trail.replaceChildren(...(made.trail ?? []).flatMap(([text, href]) => [h("span", { "aria-hidden": "true" }, "/"), href ? h("a", { href }, text) : h("span", null, text)]));
  window.scrollTo(0, 0);
}

async function watch() {
  if (document.visibilityState === "visible") {
    try {
      runs = (await fetchNow("/api/runs")).runs;
      await view?.refresh?.(runs);
      const running = runs.some((run) => run.running);
      live.textContent = running ? "watching" : "ended";
      live.className = running ? "live on" : "live";
    } catch (error) {
      live.textContent = error.message;
      live.className = "live error";
    }
  }
  setTimeout(watch, EVERY);
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", show);
window.addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
  view?.key?.(event.key);
});
runs = (await fetchNow("/api/runs")).runs;
await show();
if (exported) live.textContent = "exported";
else setTimeout(watch, EVERY);
