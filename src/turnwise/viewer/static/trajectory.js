// One trajectory: its tree, its conversation and its tokens.

import { chip, counted, h, short } from "./dom.js";
import { exported, fetchNow, keep, link, trajectoryPath } from "./data.js";
import { branchesOf, branchOf, treeView } from "./tree.js";
import { chatView } from "./chat.js";
import { templateView } from "./template.js";
import { timelineView } from "./timeline.js";
import { TokenView, tokensOf } from "./tokens.js";

export async function showTrajectory(main, runs, place, go) {
  const { run, file, index } = place;
  const base = trajectoryPath(run, file, index);
  const [trajectory, texts, values, listed, timeline] = await Promise.all([keep(base), keep(`${base}/tokens`), keep(`${base}/values`), fetchNow(trajectoryPath(run, file)), keep(`${trajectoryPath(run, file)}/timeline`)]);
  const known = ["chat", "tokens", "template", ...(timeline.calls[index]?.length ? ["timeline"] : [])];
  const tabOf = (query) => (known.includes(query.tab) ? query.tab : "chat");
  const turns = trajectory.turns;
  const branches = branchesOf(turns);
  const state = { turn: Number(place.query.turn ?? branches[0]?.own.at(-1) ?? 0), tab: tabOf(place.query) };
  // The text of an answer, without the token that ended it.
  const textOf = (ids) => ids.filter((id, at) => at < ids.length - 1 || !texts[id]?.[2]).map((id) => texts[id]?.[0] ?? `⟨${id}⟩`).join("");
  const address = (query) => link(run, file, index, query);
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
    return [["call", token.sampled ? `turn ${token.turn}, token ${token.at + 1}` : `prompt of turn ${token.turn}`],
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
    tabs.replaceChildren(...[["chat", "Conversation"], ["tokens", "Tokens"], ["template", "Template"], ["timeline", "Timeline"]].filter(([name]) => known.includes(name)).map(([name, label]) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "view", "aria-selected": String(state.tab === name), tabindex: state.tab === name ? "0" : "-1",
      onclick: () => go(address({ tab: name, turn: state.turn })) }, label)));
    if (tabHeld) tabs.querySelector("[aria-selected=true]").focus();
    if (turnHeld) side.querySelector("[aria-current=true]")?.focus();
    content.setAttribute("aria-labelledby", `tab-${state.tab}`);
    if (!turns.length) {
      content.replaceChildren(h("p", { class: "quiet" }, "This trajectory has no turn."));
    } else if (state.tab === "chat") {
      content.replaceChildren(chatView(trajectory, branch.path.map(([each]) => each), textOf, (turn) => address({ tab: "tokens", turn, token: 0 })));
    } else if (state.tab === "template") {
      const tokens = tokensOf(trajectory, branch.path, texts, values);
      const waiting = h("p", { class: "quiet", role: "status" }, "Rendering; the tokenizer is loaded once, in seconds …");
      content.replaceChildren(waiting);
      keep(`${base}/template/${branch.leaf}`).then(
        (compared) => waiting.replaceWith(templateView(tokens, compared, (token) => go(address({ tab: "tokens", turn: token.turn, token: token.at })))),
        (error) => waiting.replaceWith(h("p", { class: "error" }, error.message)));
    } else if (state.tab === "timeline") {
      content.replaceChildren(timelineView(timeline.calls, index, listed.trajectories));
    } else {
      const tokens = tokensOf(trajectory, branch.path, texts, values);
      const addressOf = (token) => address({ tab: "tokens", turn: token.turn, token: token.at, ...(view.measure === "logprob" ? {} : { color: view.measure }) });
      const view = new TokenView(tokens, query.color, { select: (token) => { history.replaceState(null, "", addressOf(token)); mark(token.turn); }, proof: proofOf, address: addressOf });
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
      Object.entries(trajectory.metrics ?? {}).map(([name, value]) => chip(name, short(value))),
      exact));
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
