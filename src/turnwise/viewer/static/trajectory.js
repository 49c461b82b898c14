// One trajectory: its conversation, its tokens, its rendering by the template and its timeline.

import { chip, counted, h, runColor, short, svg } from "./dom.js";
import { exported, fetchNow, keep, link, trajectoryPath } from "./data.js";
import { ticks } from "./chart.js";
import { branchesOf, branchOf, chatView, picturesOf, treeView } from "./chat.js";
import { glyphs, tokensOf, TokenView } from "./tokens.js";
import { whatIfView } from "./whatif.js";

const AROUND = 8;
const MOST_PLACES = 100;
const MOST_TOKENS = 400;

// `compared` is the server's answer; `open(position)` shows a token of the branch.
function templateView(tokens, compared, open) {
  if (compared.error) {
    return h("p", { class: "quiet", role: "status" }, `There is no rendering to compare with: ${compared.error}.`);
  }
  const { pieces, closing, texts } = compared;
  const shown = (id) => glyphs(texts[id]?.[0] ?? `⟨${id}⟩`);
  const whole = (text) => h("p", { class: "quiet small" }, text);
  const closes = closing.length > 0 && whole(`After the last turn the template would write ${closing.map(shown).join("")} (${counted(closing.length, "id", "ids")}), which was not sampled.`);
  if (compared.identical) {
    return h("div", { class: "stack" }, h("p", { role: "status" }, h("b", null, "Identical. "), `From the messages of this branch the template renders the same ${counted(compared.sampled, "id", "ids")}.`),
      compared.note && whole(compared.note), closes);
  }
  const count = (pick) => pieces.reduce((sum, piece) => sum + pick(piece), 0);
  const respelled = pieces.filter(([, , , same]) => same).length;
  return h("div", { class: "stack" },
    h("p", { role: "status" }, h("b", null, `${counted(pieces.length, "place differs", "places differ")}. `),
      `${count(([start, end]) => end - start).toLocaleString("en")} of ${counted(compared.sampled, "id", "ids")} are not those that the template renders from the messages; it has ${count(([, , rendered]) => rendered.length).toLocaleString("en")} others there. `,
      respelled > 0 && `In ${counted(respelled, "place", "places")} the text is the same, and only the tokens differ. `,
      "The branch keeps the ids as they were sampled."),
    compared.note && whole(compared.note),
    pieces.slice(0, MOST_PLACES).map((piece, number) => placeOfDifference(tokens, piece, number, shown, open)),
    pieces.length > MOST_PLACES && whole(`${(pieces.length - MOST_PLACES).toLocaleString("en")} more places differ.`), closes);
}

function placeOfDifference(tokens, [start, end, rendered, same], number, shown, open) {
  const context = (from, to) => tokens.slice(Math.max(0, from), to).map((token) => h("span", { class: "token context" }, glyphs(token.text)));
  const sides = (name, marked, ids) => h("tr", null, h("th", { scope: "row" }, name),
    h("td", null, context(start - AROUND, start), marked.length ? h("mark", null, marked) : h("mark", { class: "none" }, "nothing"), context(end, end + AROUND)),
    h("td", { class: "number quiet" }, counted(ids, "id", "ids")));
  const more = (ids) => ids > MOST_TOKENS && h("span", { class: "quiet" }, ` … ${(ids - MOST_TOKENS).toLocaleString("en")} more`);
  const own = tokens.slice(start, Math.min(end, start + MOST_TOKENS)).map((token) => h("span", { class: "token", title: `id ${token.id}, ${token.sampled ? "sampled" : "context"}` }, glyphs(token.text)));
  const other = rendered.slice(0, MOST_TOKENS).map((id) => h("span", { class: "token", title: `id ${id}` }, shown(id)));
  const at = tokens[Math.min(start, tokens.length - 1)];
  const title = `Place ${number + 1}: turn ${at.turn}, token ${start.toLocaleString("en")}`;
  return h("section", { class: "panel place", "aria-label": title },
    h("div", { class: "row spread" }, h("h3", null, title, h("span", { class: "quiet small" }, same && rendered.length ? " same text, other tokens" : "")),
      h("button", { type: "button", onclick: () => open(at) }, "Show in tokens")),
    h("div", { class: "wide" }, h("table", { class: "sides" }, h("tbody", null,
      sides("sampled", [...own, more(end - start) || ""].filter((each) => each !== ""), end - start),
      sides("template", [...other, more(rendered.length) || ""].filter((each) => each !== ""), rendered.length)))));
}

// `requests` are by key: what the judges were asked and answered.
function judgesView(judgements, requests) {
  const part = (name, text) => h("details", { class: "message" }, h("summary", null, name), h("div", { class: "said" }, text));
  return h("div", { class: "stack" }, judgements.map(({ judge, score, why, request }) => h("section", { class: "panel stack", "aria-label": `Verdict of ${judge}` },
    h("div", { class: "row" }, chip("judge", judge), chip("score", short(score))),
    h("p", null, why),
    requests[request] ? [...requests[request].messages.map((message) => part(`Prompt, ${message.role}`, message.content)), part("Answer", requests[request].answer)]
      : h("p", { class: "quiet small" }, "Its prompt is not in the run's judge.jsonl."))));
}

const SPAN = 1000;
const NAMES = 70;
const OTHERS = 60;
const THIN = 4;

function readCall([turn, asked, first, ended, worker, queued, tools]) {
  return { turn, asked, first, ended, worker, queued: queued ?? null, tools: tools ?? null };
}

// `recorded` has, for each trajectory, [turn, asked, first token, ended, worker, queued, tools] of each turn.
function timelineView(recorded, index, summaries) {
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

// The fields of the problem's row that no message has: why the reward is what it is.
function rowView(fields) {
  return fields.length > 0 && h("div", { class: "wide" }, h("table", { "aria-label": "Row of the data" }, h("tbody", null,
    fields.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value))))));
}

export async function showTrajectory(main, runs, place, go) {
  const { run, file, index } = place;
  const base = trajectoryPath(run, file, index);
  const [trajectory, texts, values, listed, timeline] = await Promise.all([keep(base), keep(`${base}/tokens`), keep(`${base}/values`), fetchNow(trajectoryPath(run, file)), keep(`${trajectoryPath(run, file)}/timeline`)]);
  const known = ["chat", "tokens", "template", ...(trajectory.judgements?.length ? ["judges"] : []), ...(timeline.calls[index]?.length ? ["timeline"] : []), ...(!exported && file.startsWith("step-") ? ["whatif"] : [])];
  const tabOf = (query) => (known.includes(query.tab) ? query.tab : "chat");
  const turns = trajectory.turns;
  const branches = branchesOf(turns);
  const state = { turn: Number(place.query.turn ?? branches[0]?.own.at(-1) ?? 0), tab: tabOf(place.query) };
  // The text of an answer, without the token that ended it.
  const textOf = (ids) => ids.filter((id, at) => at < ids.length - 1 || !texts[id]?.[2]).map((id) => texts[id]?.[0] ?? `⟨${id}⟩`).join("");
  const address = (query) => link(run, file, index, query);
  const picture = picturesOf(trajectory, run, file);
  const content = h("div", { class: "body", role: "tabpanel", id: "view" });
  const side = h("div");
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "View", onkeydown: (event) => {
    const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!offset) return;
    event.preventDefault();
    state.byKey = true;
    go(address({ tab: known[(known.indexOf(state.tab) + offset + known.length) % known.length], turn: state.turn }));
  } });
  const count = listed.trajectories.length;
  const neighbour = (offset, label, symbol) => h("button", { type: "button", "aria-label": label, title: `${label} (${offset > 0 ? "j" : "k"})`, disabled: index + offset < 0 || index + offset >= count || exported && count === 1,
    onclick: () => go(link(run, file, index + offset, { tab: state.tab })) }, symbol);
  const exact = h("span");
  let report = null;
  let tokenView = null;

  // Lines on the call of the engine that a token belongs to.
  function proofOf(token) {
    const turn = turns[token.turn];
    const worker = timeline.calls[index]?.find(([number]) => number === token.turn)?.[4];
    const [prompt, , checksum] = turn.record;
    const { format, width, height } = trajectory.images?.[token.image?.hash] ?? {};
    return [...(token.image ? [["image", `${width} × ${height} ${format}`], ["its token", `${token.image.at + 1} of ${token.image.length}`], ["its hash", token.image.hash]] : []),
      ["call", token.sampled ? `turn ${token.turn}, token ${token.at + 1}` : `prompt of turn ${token.turn}`],
      ["engine", worker || "not recorded"], ...(token.sampled ? [["weight version", token.version]] : []),
      ["call's prompt", counted(prompt, "id", "ids")], ["its checksum", checksum.toString(16)],
      ["audit", !report ? "running" : report.violations ? "not exact" : "exact"]];
  }

  // Mark a turn in the tree, without drawing anything again.
  function mark(turn) {
    // A turn that branches share keeps the branch that is shown.
    if (branchOf(branches, state.turn).own.includes(turn)) state.turn = turn;
    for (const button of side.querySelectorAll("button[data-turn]")) {
      if (Number(button.dataset.turn) === turn) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  function draw(query) {
    const branch = branchOf(branches, state.turn);
    // What is drawn again keeps the focus: a tab, or a turn of the tree.
    const [tabHeld, turnHeld] = [tabs, side].map((part) => part.contains(document.activeElement));
    side.replaceChildren(treeView(turns, branches, branch, state.turn, (turn) => go(address({ tab: state.tab, turn }))));
    tabs.replaceChildren(...[["chat", "Conversation"], ["tokens", "Tokens"], ["template", "Template"], ["judges", "Judges"], ["timeline", "Timeline"], ["whatif", "What if"]].filter(([name]) => known.includes(name)).map(([name, label]) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "view", "aria-selected": String(state.tab === name), tabindex: state.tab === name ? "0" : "-1",
      onclick: () => go(address({ tab: name, turn: state.turn })) }, label)));
    if (tabHeld) tabs.querySelector("[aria-selected=true]").focus();
    if (turnHeld) side.querySelector("[aria-current=true]")?.focus();
    content.setAttribute("aria-labelledby", `tab-${state.tab}`);
    if (!turns.length) {
      content.replaceChildren(h("p", { class: "quiet" }, "This trajectory has no turn."));
    } else if (state.tab === "chat") {
      content.replaceChildren(chatView(trajectory, branch.path.map(([each]) => each), textOf, (turn) => address({ tab: "tokens", turn, token: 0 }), picture));
    } else if (state.tab === "template") {
      const tokens = tokensOf(trajectory, branch.path, texts, values);
      const waiting = h("p", { class: "quiet", role: "status" }, "Rendering; the tokenizer is loaded once, in seconds …");
      content.replaceChildren(waiting);
      keep(`${base}/template/${branch.leaf}`).then(
        (compared) => waiting.replaceWith(templateView(tokens, compared, (token) => go(address({ tab: "tokens", turn: token.turn, token: token.at })))),
        (error) => waiting.replaceWith(h("p", { class: "error" }, error.message)));
    } else if (state.tab === "judges") {
      const waiting = h("p", { class: "quiet", role: "status" }, "Reading judge.jsonl …");
      content.replaceChildren(waiting);
      keep(`${base}/judgements`).then((found) => waiting.replaceWith(judgesView(trajectory.judgements, found)), (error) => waiting.replaceWith(h("p", { class: "error" }, error.message)));
    } else if (state.tab === "timeline") {
      content.replaceChildren(timelineView(timeline.calls, index, listed.trajectories));
    } else if (state.tab === "whatif") {
      content.replaceChildren(whatIfView(trajectory, base, state.turn));
    } else {
      const tokens = tokensOf(trajectory, branch.path, texts, values);
      const addressOf = (token) => address({ tab: "tokens", turn: token.turn, token: token.at, ...(view.measure === "logprob" ? {} : { color: view.measure }) });
      const view = new TokenView(tokens, query.color, { select: (token) => { history.replaceState(null, "", addressOf(token)); mark(token.turn); }, proof: proofOf, address: addressOf, picture });
      tokenView = view;
      content.replaceChildren(view.element);
      const wanted = query.token === undefined ? tokens.find((token) => token.turn === state.turn && token.sampled) : tokens.find((token) => token.turn === state.turn && token.at === Number(query.token));
      if (wanted && query.token !== undefined) view.choose(wanted.position);
      else if (wanted) view.reveal(wanted.position);
      if (!turnHeld && !state.byKey) view.box.focus({ preventScroll: true });
    }
    state.byKey = false;
  }

  const parts = Object.entries(trajectory.reward_parts ?? {});
  const head = h("div", { class: "stack" },
    h("div", { class: "row spread" },
      h("h1", null, trajectory.problem_id, h("span", { class: "quiet" }, ` sample ${trajectory.sample_index}`)),
      h("div", { class: "row" }, h("a", { href: link(run, file, null, { group: trajectory.problem_id }) }, "Its group"), h("span", { class: "quiet small number" }, `${index + 1} of ${count}`), neighbour(-1, "Trajectory before", "←"), neighbour(1, "Next trajectory", "→"))),
    h("div", { class: "row" },
      chip("reward", trajectory.reward === null ? "none" : short(trajectory.reward)),
      parts.length > 1 && parts.map(([name, value]) => chip(name, short(value))),
      trajectory.environment && chip("environment", trajectory.environment),
      chip("status", trajectory.status, trajectory.status !== "completed"),
      Object.entries(trajectory.events ?? {}).map(([name, value]) => chip(name, value, name !== "tool_call")),
      trajectory.images && chip("images", Object.keys(trajectory.images).length),
      Object.entries(trajectory.metrics ?? {}).map(([name, value]) => chip(name, short(value))),
      exact),
    rowView(Object.entries(trajectory.row ?? {})));
  main.replaceChildren(head, h("div", { class: "trajectory" }, side, h("div", { class: "stack" }, tabs, content)));
  draw(place.query);
  fetchNow(`${base}/audit`).then((found) => {
    report = found;
    tokenView?.refresh();
    exact.replaceWith(report.violations ? chip("not exact", report.first_violation, true) : chip("exact", `${report.tokens_exact.toLocaleString("en")} of ${report.tokens_sampled.toLocaleString("en")} sampled tokens`));
  }, () => exact.replaceWith(chip("exactness", "not known")));
  return {
    title: `${trajectory.problem_id} · ${file}`,
    trail: [[run, null], [file, link(run, file)], [`${index}`, null]],
    same: (next) => next.run === run && next.file === file && next.index === index,
    update: (next) => {
      state.turn = Number(next.query.turn ?? state.turn);
      state.tab = tabOf(next.query);
      draw(next.query);
    },
    key: (name) => {
      const offset = { j: 1, k: -1 }[name];
      if (offset && index + offset >= 0 && index + offset < count) go(link(run, file, index + offset, { tab: state.tab }));
    },
  };
}
