// The trajectories of one step: a histogram, filters, groups, and one problem's samples side by side.

import { chip, counted, deviation, h, mean, rewardColor, runColor, select, short, svg, VirtualList } from "./dom.js";
import { exported, fetchNow, keep, link, runPath, startPlace, trajectoryPath } from "./data.js";
import { messageCard, picturesOf } from "./chat.js";

// The address has the file that is compared with in each run: "beside:RUN=FILE", or nothing for none.
const BESIDE = "beside:";
const NONE = "";

function titleOf(file) {
  const [kind, number] = file.split("-");
  if (number === undefined) return file;
  return kind === "step" ? `Step ${Number(number)}` : `Held-out, step ${Number(number)}`;
}

// `members` are the summaries of the samples of the problem in the file that the address names.
async function showGroup(main, runs, place, members, go) {
  const { run, file } = place;
  const problem = place.query.group;
  const others = exported ? [] : await Promise.all(runs.map(async ({ name }, color) => {
    const found = await fetchNow(runPath(name, `/problem?name=${encodeURIComponent(problem)}`));
    const files = found.files.filter((each) => name !== run || each !== file);
    // The same step of another run, where it has the problem, is shown without being asked for.
    const wanted = place.query[BESIDE + name] ?? (name === run ? NONE : file);
    return { name, color, files, chosen: files.includes(wanted) ? wanted : NONE };
  }));
  const groups = [{ name: run, file, members, color: runs.findIndex((each) => each.name === run) }];
  for (const { name, color, chosen } of others.filter((each) => each.chosen)) {
    const { trajectories } = await fetchNow(trajectoryPath(name, chosen));
    trajectories.forEach((one, index) => { one.index = index; });
    groups.push({ name, file: chosen, color, members: trajectories.filter((one) => one.problem === problem) });
  }
  const rewards = groups.flatMap((group) => group.members.map((one) => one.reward)).filter((reward) => reward !== null);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const address = (name, value) => link(run, file, null, { ...place.query, [BESIDE + name]: value });
  const choices = others.filter((each) => each.files.length || each.name !== run).map(({ name, files, chosen }) => (files.length
    ? select(name === run ? "Another step of this run" : `Beside ${name}`, [[NONE, "none"], ...files.map((each) => [each, titleOf(each)])], chosen, (value) => go(address(name, value)))
    : h("span", { class: "quiet small" }, `${name} has no trajectory of it`)));
  main.replaceChildren(h("div", { class: "stack" },
    h("div", { class: "row spread" }, h("h1", null, problem), h("a", { href: link(run, file) }, `All of ${file}`)),
    choices.length > 0 && h("div", { class: "row" }, choices),
    h("div", { class: groups.length > 1 ? "beside" : null }, groups.map((group) => samplesOf(group, groups.length > 1, low, high)))));
  return { title: problem, trail: [[run, null], [file, link(run, file)], [problem, null]] };
}

// The samples of a run's group, the best first; each is read when it comes into sight.
function samplesOf({ name, file, members, color }, several, low, high) {
  const rewards = members.map((one) => one.reward ?? 0);
  const columns = h("div", { class: several ? "stack" : "columns", tabindex: several ? null : "0", role: "list", "aria-label": several ? `Samples of ${name}` : "Samples side by side" });
  const watcher = new IntersectionObserver((seen) => {
    for (const entry of seen.filter((each) => each.isIntersecting)) {
      watcher.unobserve(entry.target);
      keep(trajectoryPath(name, file, Number(entry.target.dataset.index))).then(
        (trajectory) => entry.target.append(h("div", { style: { "margin-top": "0.6rem" } }, trajectory.messages.map((message) => messageCard(message, null, picturesOf(trajectory, name, file))))),
        (error) => entry.target.append(h("p", { class: "error" }, error.message)));
    }
  });
  for (const one of [...members].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0))) {
    const column = h("section", { class: "sample", role: "listitem", "data-index": one.index, "aria-label": `sample ${one.sample} of ${name}` },
      h("div", { class: "panel row spread", style: { background: rewardColor(one.reward, low, high) } },
        h("a", { href: link(name, file, one.index) }, `sample ${one.sample}`),
        h("span", { class: "number small" }, `reward ${short(one.reward)} · ${one.status} · ${counted(one.tokens, "token", "tokens")}`)));
    columns.append(column);
    watcher.observe(column);
  }
  return h("section", { class: "stack", "aria-label": `${name}, ${titleOf(file)}` },
    several && h("h2", null, h("i", { class: "swatch", style: { background: runColor(color) } }), ` ${name}, `, h("a", { href: link(name, file) }, titleOf(file))),
    h("div", { class: "row" }, chip("mean reward", short(mean(rewards))), chip("spread", short(deviation(rewards))), chip("samples", members.length)),
    columns);
}

const BINS = 20;
const GROUP_ROW = 66;
const ANY = "";
const TOOL = "tool_";

function sortedKeys(all, pick) {
  return [...new Set(all.flatMap((one) => Object.keys(pick(one) ?? {})))].sort();
}

// The bars of the histogram that an address names.
function binsIn(text) {
  return (text ?? "").split(" ").filter(Boolean).map(Number).filter((bin) => Number.isInteger(bin) && bin >= 0 && bin < BINS);
}

export async function showStep(main, runs, place, go) {
  const { run, file } = place;
  const path = trajectoryPath(run, file);
  const { trajectories } = await fetchNow(path);
  trajectories.forEach((one, index) => { one.index = index; });
  const measures = {
    reward: (one) => one.reward,
    ...Object.fromEntries(sortedKeys(trajectories, (one) => one.parts).map((name) => [`part: ${name}`, (one) => one.parts[name]])),
    ...Object.fromEntries(sortedKeys(trajectories, (one) => one.metrics).map((name) => [`metric: ${name}`, (one) => one.metrics[name]])),
    turns: (one) => one.turns, "sampled tokens": (one) => one.tokens, "longest path": (one) => one.length,
  };
  if ("part: environment" in measures && sortedKeys(trajectories, (one) => one.parts).length === 1) delete measures["part: environment"];
  const query = place.query;
  const state = { measure: query.measure in measures ? query.measure : "reward", bins: new Set(query.measure === undefined || query.measure in measures ? binsIn(query.bins) : []), status: query.status ?? ANY, environment: query.environment ?? ANY, tool: query.tool ?? ANY, event: query.event ?? ANY, fork: query.fork ?? ANY, text: query.q ?? "", order: query.order ?? "file", found: null };
  const rewards = trajectories.map((one) => one.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const groups = [...Map.groupBy(trajectories, (one) => one.problem)].map(([problem, members]) => ({ problem, members }));
  const histogram = h("div", { class: "histogram", role: "group", "aria-label": "Histogram; each bar filters" });
  const axis = h("div", { class: "axis" });
  const summary = h("p", { class: "small quiet number", role: "status" });
  const box = h("div", { style: { height: "max(360px, calc(100vh - 390px))" }, tabindex: "0", role: "list", "aria-label": "Groups" });
  const tools = h("div");
  let shown = [];

  const passes = (one) => (state.status === ANY || one.status === state.status)
    && (state.environment === ANY || one.environment === state.environment)
    && [state.tool, state.event].every((name) => name === ANY || (one.events[name] ?? 0) > 0)
    && (state.fork === ANY || (state.fork === "any" ? hasBranches(one) : state.fork === "none" ? !hasBranches(one) : one.forks[state.fork] > 0))
    && (state.found === null || state.found.has(one.index));
  let edges = [0, 1];
  const binOf = (one) => {
    const value = measures[state.measure](one);
    return value === undefined || value === null ? null : Math.min(BINS - 1, Math.floor(((value - edges[0]) / (edges[1] - edges[0])) * BINS));
  };
  const selected = (one) => passes(one) && (!state.bins.size || state.bins.has(binOf(one)));

  function drawHistogram() {
    const values = trajectories.map(measures[state.measure]).filter((value) => value !== undefined && value !== null);
    edges = [Math.min(...values, Infinity), Math.max(...values, -Infinity)];
    if (!values.length) edges = [0, 1];
    if (edges[0] === edges[1]) edges = [edges[0] - 0.5, edges[1] + 0.5];
    const counts = Array.from({ length: BINS }, () => 0);
    for (const one of trajectories.filter(passes)) if (binOf(one) !== null) counts[binOf(one)]++;
    const most = Math.max(1, ...counts);
    histogram.replaceChildren(...counts.map((count, bin) => {
      const from = edges[0] + (bin / BINS) * (edges[1] - edges[0]);
      const label = `${state.measure} ${short(from)} to ${short(from + (edges[1] - edges[0]) / BINS)}: ${counted(count, "trajectory", "trajectories")}`;
      return h("button", { type: "button", title: label, "aria-label": label, "aria-pressed": String(state.bins.has(bin)),
        onclick: () => {
          if (!state.bins.delete(bin)) state.bins.add(bin);
          named();
          drawHistogram();
          drawList();
          histogram.children[bin].focus();
        } }, h("i", { style: { height: count ? `${Math.max(3, (count / most) * 100)}%` : "0" } }));
    }));
    axis.replaceChildren(h("span", null, short(edges[0])), h("span", null, state.measure), h("span", null, short(edges[1])));
  }

  function drawList() {
    shown = groups.map((group) => ({ ...group, chosen: new Set(group.members.filter(selected).map((one) => one.index)) })).filter((group) => group.chosen.size);
    const value = (group) => mean(group.members.map((one) => one.reward ?? 0));
    const spread = (group) => deviation(group.members.map((one) => one.reward ?? 0));
    if (state.order === "worst") shown.sort((a, b) => value(a) - value(b));
    if (state.order === "best") shown.sort((a, b) => value(b) - value(a));
    if (state.order === "spread") shown.sort((a, b) => spread(b) - spread(a));
    const chosen = shown.reduce((sum, group) => sum + group.chosen.size, 0);
    summary.textContent = `${counted(chosen, "trajectory", "trajectories")} of ${trajectories.length.toLocaleString("en")}, in ${counted(shown.length, "group", "groups")}${shown.length ? `; mean reward ${short(mean(trajectories.filter(selected).map((one) => one.reward ?? 0)))}` : ""}`;
    list.reset(shown.length);
    tools.replaceChildren(...[toolTable(trajectories.filter(selected))].filter(Boolean));
  }

  const list = new VirtualList(box, GROUP_ROW, (row) => {
    const { problem, members, chosen } = shown[row];
    return h("div", { class: "group", role: "listitem" },
      h("div", { class: "title" }, h("a", { href: link(run, file, null, { group: problem }), "aria-label": `Group ${problem}, side by side` }, problem), h("span", { class: "small quiet" }, members[0].question)),
      h("div", { class: "number small" }, h("b", null, short(mean(members.map((one) => one.reward ?? 0)))), h("span", { class: "quiet" }, ` ± ${short(deviation(members.map((one) => one.reward ?? 0)))}`)),
      h("div", { class: "samples" }, members.map((one) => h("a", { class: chosen.has(one.index) ? null : "out", href: link(run, file, one.index), style: { background: rewardColor(one.reward, low, high) },
        title: `sample ${one.sample}: reward ${short(one.reward)}, ${one.status}, ${counted(one.turns, "turn", "turns")}, ${counted(one.tokens, "token", "tokens")}\n${one.answer}`,
        "aria-label": `sample ${one.sample}, reward ${short(one.reward)}, ${one.status}${hasBranches(one) ? ", has branches" : ""}` }, short(one.reward), hasBranches(one) && branchMark()))));
  });

  async function find(text) {
    state.text = text;
    const found = text ? new Set((await fetchNow(`${path}/search?q=${encodeURIComponent(text)}`)).found) : null;
    if (state.text !== text) return;
    state.found = found;
    named();
    redraw();
  }
  // The address has the filters, so that a way back leads to them; it may name another view by now.
  function named() {
    const here = (location.hash || startPlace).split("?")[0] === link(run, file);
    if (here && query.group === undefined) history.replaceState(null, "", link(run, file, null, { ...keptQuery(), ...(state.bins.size ? { bins: [...state.bins].join(" ") } : {}) }));
  }
  function redraw() {
    drawHistogram();
    drawList();
  }
  const [outcomes, events] = [true, false].map((wanted) => sortedKeys(trajectories, (one) => one.events).filter((name) => name.startsWith(TOOL) === wanted));
  const change = (key) => (value) => {
    state[key] = value;
    if (key === "measure") state.bins.clear();
    named();
    redraw();
  };
  const statuses = [[ANY, "any"], ...[...new Set(trajectories.map((one) => one.status))].sort().map((name) => [name, name])];
  const environments = [...new Set(trajectories.map((one) => one.environment))].filter(Boolean).sort();
  const forks = sortedKeys(trajectories, (one) => one.forks);
  const search = h("input", { type: "search", value: state.text, placeholder: "text that was said", "aria-label": "Search in what was said" });
  const message = h("span", { class: "error small" });
  let timer;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => find(search.value).then(() => message.replaceChildren(), (error) => message.replaceChildren(error.message)), 250);
  });
  const files = h("span");
  const drawFiles = (current) => {
    const names = Object.keys(current.find((one) => one.name === run)?.files ?? {});
    const kind = names.filter((name) => name.split("-")[0] === file.split("-")[0]);
    const at = kind.indexOf(file);
    const to = (offset, label, symbol) => h("button", { type: "button", "aria-label": label, title: label, disabled: !kind[at + offset], onclick: () => go(link(run, kind[at + offset], null, keptQuery())) }, symbol);
    files.replaceChildren(h("span", { class: "row" }, to(-1, "Step before", "←"), select("Trajectories of", names.map((name) => [name, name]), file, (name) => go(link(run, name, null, keptQuery()))), to(1, "Next step", "→")));
  };
  const keptQuery = () => Object.fromEntries([["measure", state.measure], ["status", state.status], ["environment", state.environment], ["tool", state.tool], ["event", state.event], ["fork", state.fork], ["order", state.order], ["q", state.text]].filter(([key, value]) => value && !(key === "measure" && value === "reward") && !(key === "order" && value === "file")));
  drawFiles(runs);

  const filters = h("section", { class: "panel filters", "aria-label": "Filters" },
    h("div", null, histogram, axis),
    h("div", { class: "stack" },
      h("div", { class: "row" },
        select("Histogram of", Object.keys(measures).map((name) => [name, name]), state.measure, change("measure")),
        select("Status", statuses, state.status, change("status")),
        environments.length > 0 && select("Environment", [[ANY, "any"], ...environments.map((name) => [name, name])], state.environment, change("environment")),
        outcomes.length > 0 && select("Tool outcome", [[ANY, "any"], ...outcomes.map((name) => [name, name === "tool_call" ? "any call" : name.slice(TOOL.length)])], state.tool, change("tool")),
        events.length > 0 && select("Event", [[ANY, "any"], ...events.map((name) => [name, name])], state.event, change("event")),
        forks.length > 0 && select("Branches", [[ANY, "any"], ["none", "none"], ["any", "some"], ...forks.map((name) => [name, name])].filter(([value], at) => at < 3 || value), state.fork, change("fork")),
        select("Order", [["file", "as trained"], ["worst", "lowest reward"], ["best", "highest reward"], ["spread", "largest spread"]], state.order, change("order"))),
      h("div", { class: "row" }, exported ? null : search,
        h("button", { type: "button", onclick: () => {
          Object.assign(state, { status: ANY, environment: ANY, tool: ANY, event: ANY, fork: ANY, text: "", found: null, measure: "reward", order: "file" });
          state.bins.clear();
          clearTimeout(timer);
          search.value = "";
          for (const choice of filters.querySelectorAll("select")) choice.selectedIndex = 0;
          history.replaceState(null, "", link(run, file));
          redraw();
        } }, "Clear filters"), message),
      summary));
  main.replaceChildren(h("div", { class: "stack" },
    h("div", { class: "row spread" }, h("h1", null, titleOf(file)), files),
    filters,
    tools,
    box));
  redraw();
  if (state.text) await find(state.text);
  if (query.group !== undefined) {
    const group = groups.find((one) => one.problem === query.group);
    if (group) return showGroup(main, runs, place, group.members, go);
  }
  return { title: titleOf(file), trail: [[run, null], [file, null]], refresh: drawFiles };
}

function hasBranches(one) {
  return Object.keys(one.forks).length > 0;
}

// A stem that divides, for a trajectory with branches; the name of its link says so, too.
function branchMark() {
  return svg("svg", { viewBox: "0 0 8 10", "aria-hidden": "true" }, svg("title", null, "has branches"), svg("path", { d: "M4 10V5L1 1M4 5l3-4" }));
}

// The answers of each tool in some conversations, the one with the most errors first.
function toolTable(trajectories) {
  const names = sortedKeys(trajectories, (one) => one.tools);
  if (!names.length) return null;
  const sums = names.map((name) => [name, ...[0, 1].map((at) => trajectories.reduce((sum, one) => sum + (one.tools[name]?.[at] ?? 0), 0))]);
  sums.sort((a, b) => b[2] - a[2] || b[1] - a[1]);
  return h("div", { class: "wide" }, h("table", { "aria-label": "Tools" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "Tool"), ["Answers", "Errors", "Share of errors"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
    h("tbody", null, sums.map(([name, answers, errors]) => h("tr", null, h("td", null, name), [answers.toLocaleString("en"), errors.toLocaleString("en"), `${short(100 * errors / answers)} %`].map((value) => h("td", { class: "number" }, value)))))));
}
