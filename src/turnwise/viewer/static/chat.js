// The tree of a trajectory's turns, and what was said on one of its branches, with calls and results.

import { counted, h, mean, short } from "./dom.js";
import { imageAddress } from "./data.js";

function pathLength(turn) {
  return turn.prefix_length + turn.added_token_ids.length + turn.completion_token_ids.length;
}

// The turns of a path, each with the number of its own ids on it.
function pathTo(turns, leaf) {
  const path = [];
  let index = leaf;
  let end = pathLength(turns[leaf]);
  while (index !== null && index !== undefined) {
    const turn = turns[index];
    if (end > turn.prefix_length) {
      path.push([index, end - turn.prefix_length]);
      end = turn.prefix_length;
    }
    index = turn.parent;
  }
  return path.reverse();
}

export function branchesOf(turns) {
  const continued = new Set(turns.map((_, index) => continuedBy(turns, index)));
  const taken = new Set();
  return turns.map((_, index) => index).filter((index) => !continued.has(index)).map((leaf, number) => {
    const path = pathTo(turns, leaf);
    const own = path.map(([index]) => index).filter((index) => !taken.has(index));
    for (const index of own) taken.add(index);
    return { number, leaf, path, own };
  });
}

export function branchOf(branches, turn) {
  return branches.find((branch) => branch.own.includes(turn)) ?? branches.find((branch) => branch.path.some(([index]) => index === turn)) ?? branches[0];
}

export function treeView(turns, branches, currentBranch, currentTurn, open) {
  const items = branches.map((branch) => {
    const first = turns[branch.own[0]];
    const forked = branch.number > 0 && first;
    const shared = forked ? first.prefix_length : 0;
    const because = forked ? h("div", { class: "fork" },
      `branch ${branch.number + 1}: ${first.fork_reason ?? "another conversation"}`,
      h("div", { class: "quiet" }, shared ? `shares ${counted(shared, "token", "tokens")} with turn ${first.parent}` : "shares no token")) : null;
    const list = h("ol", null, branch.own.map((index) => h("li", null, h("button", {
      type: "button", "data-turn": index, onclick: () => open(index), "aria-current": index === currentTurn ? "true" : null,
      "aria-label": `turn ${index}, ${counted(turns[index].completion_token_ids.length, "sampled token", "sampled tokens")}`,
    }, h("span", { class: "row spread" }, h("span", null, `turn ${index}`), h("span", { class: "quiet small number" }, `${turns[index].completion_token_ids.length.toLocaleString("en")} tok`))))));
    return h("li", { class: branch === currentBranch ? "current" : null }, because, forked && shared ? h("ol", null, h("li", null, list)) : list);
  });
  return h("nav", { class: "tree panel", "aria-label": "Turns and branches" },
    h("h2", null, counted(branches.length, "branch", "branches"), h("span", { class: "quiet small" }, `, ${counted(turns.length, "turn", "turns")}`)), h("ol", null, items));
}

function contentOf(message) {
  const content = message.content;
  if (Array.isArray(content)) return content.map((part) => part.text ?? `[${part.type}]`).join("");
  return content === null || content === undefined ? "" : String(content);
}

// A function that shows an image of a trajectory, by its hash.
export function picturesOf(trajectory, run, file) {
  return (hash) => {
    const { format, width, height } = trajectory.images?.[hash] ?? {};
    const name = `image, ${width} × ${height} pixels`;
    const src = format && imageAddress(run, file, `${hash}.${format}`);
    const missing = h("span", { class: "quiet" }, `[${name}, is not here]`);
    return src ? h("img", { src, alt: name, loading: "lazy", width, height, onerror: (event) => event.target.replaceWith(missing) }) : missing;
  };
}

// The arguments of a call; malformed ones are the text as it is.
function argumentsOf({ arguments: given }) {
  try {
    return typeof given === "string" ? JSON.parse(given) : given;
  } catch {
    return given;
  }
}

function callOf(call) {
  const called = call.function ?? call;
  const given = argumentsOf(called);
  const text = typeof given === "string" ? given : Object.entries(given ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
  return h("div", { class: "call" }, h("b", null, called.name ?? "?"), `(${text})`);
}

// An answer that is one call in the usual tags, and nothing else; null for any other.
function callInTags(said) {
  const tagged = /^\s*<tool_call>\s*(\{[^]*\})\s*<\/tool_call>\s*$/.exec(said);
  if (!tagged) return null;
  try {
    const call = JSON.parse(tagged[1]);
    return typeof call.name === "string" && call.arguments !== null && typeof call.arguments === "object" && !Array.isArray(call.arguments) ? call : null;
  } catch {
    return null;
  }
}

// An answer of which only the sampled text is known, because its client sent nothing after it.
function sampledMessage(content) {
  const call = callInTags(content);
  return { role: "assistant", content: call ? "" : content, tool_calls: call ? [call] : [], sampled: true };
}

// Whether a recorded answer opens a call, and none was read from it.
function isUnread(message) {
  return message.role === "assistant" && !message.sampled && !(message.tool_calls ?? []).length && contentOf(message).includes("<tool_call>");
}

// Whether a tool's answer is an error: it begins as a Toolbox writes it, as in run_files.py.
function isError(message) {
  return message.role === "tool" && contentOf(message).toLowerCase().startsWith("error");
}

// `picture(hash)` shows an image in its place among the texts.
export function messageCard(message, notes, picture) {
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const said = contentOf(message);
  return h("article", { class: `message ${role}${isError(message) ? " failed" : ""}`, "aria-label": `${message.role} message` },
    h("header", null, h("b", null, message.role), isError(message) && h("span", { class: "error" }, "error"), isUnread(message) && h("span", { class: "error" }, "not read as a call"), message.name && h("span", null, message.name), notes ?? null),
    said && h("div", { class: said.length > 3000 ? "said long" : "said" }, Array.isArray(message.content) ? message.content.map((part) => (part.type === "image" ? picture(part.image) : contentOf({ content: [part] }))) : said),
    (message.tool_calls ?? []).map(callOf),
    !said && !(message.tool_calls ?? []).length && h("div", { class: "quiet small" }, "empty"));
}

function turnNote(turn) {
  const versions = [...new Set(turn.weight_versions.filter((version) => version >= 0))];
  const first = Math.min(...versions);
  const last = Math.max(...versions);
  const parts = [counted(turn.completion_token_ids.length, "token", "tokens"), `weights v${first}${last > first ? `–${last}` : ""}`,
    `mean log-prob ${short(mean(turn.logprobs))}`, turn.finish_reason];
  if (turn.adapter) parts.push(`adapter ${turn.adapter}`);
  return parts.join(" · ");
}

// The turn whose whole path a turn begins with, or null.
function continuedBy(turns, index) {
  const { parent, prefix_length: prefix } = turns[index];
  return parent !== null && parent !== undefined && prefix === pathLength(turns[parent]) ? parent : null;
}

// Whether a message can be the answer with this text, and is not an edited one.
function isAnswer(message, text) {
  if (message?.role !== "assistant") return false;
  const calls = (message.tool_calls ?? []).map((call) => call.function ?? call);
  const values = calls.map(argumentsOf).flatMap((given) => (typeof given === "string" ? [given] : Object.values(given ?? {}))).filter((value) => value === null || typeof value !== "object");
  return [contentOf(message).trim(), ...calls.map((call) => call.name), ...values.map((value) => JSON.stringify(value))].every((part) => text.includes(part));
}

// Messages of a branch whose turns hold their own, as pairs of a message and the turn that sampled it.
// A turn holds all messages that led to it, or those since the turn that it continues.
function messagesByTurn(trajectory, leaf, textOf) {
  const { turns } = trajectory;
  const chain = [leaf];
  while (continuedBy(turns, chain[0]) !== null) chain.unshift(continuedBy(turns, chain[0]));
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  let said = [];
  for (const index of chain) {
    const own = turns[index].messages;
    const whole = said.length > 0 && own.length >= said.length && same(own[0], said[0][0]);
    said = [...said, ...(whole ? own.slice(said.length) : own).map((message) => [message, null])];
    const content = textOf(turns[index].completion_token_ids);
    const recorded = [trajectory.messages, ...turns.map((turn) => turn.messages)].find((all) => isAnswer(all[said.length], content) && said.every(([message], at) => same(message, all[at])));
    said.push([recorded ? recorded[said.length] : sampledMessage(content), index]);
  }
  return said;
}

// The conversation of one branch: `path` has the indices of its turns.
export function chatView(trajectory, path, textOf, openTurn, picture) {
  const { turns } = trajectory;
  const lengths = new Map(path.flatMap((index) => (turns[index].images ?? []).map(([hash, , length]) => [hash, length])));
  // An image with its size.
  const figure = (hash) => {
    const { format, width, height } = trajectory.images?.[hash] ?? {};
    const size = `${width} × ${height} ${format}${lengths.has(hash) ? ` · ${counted(lengths.get(hash), "token", "tokens")}` : ""}`;
    return h("figure", { class: "picture" }, picture(hash), h("figcaption", { class: "quiet small" }, size));
  };
  const card = (message, notes) => messageCard(message, notes, figure);
  const note = (index) => (index === null ? null : turnLink(index, turns[index], openTurn));
  const feed = (cards) => h("div", { role: "feed", "aria-label": "Conversation" }, cards);
  if (turns.some((turn) => turn.messages?.length)) {
    return feed(messagesByTurn(trajectory, path.at(-1), textOf).map(([message, index]) => card(message, note(index))));
  }
  // Answers of an opening conversation come first.
  const answers = trajectory.messages.flatMap((message, at) => (message.role === "assistant" ? [at] : [])).slice(-turns.length);
  if (answers.length === turns.length) {
    const upTo = path.at(-1) === turns.length - 1 ? trajectory.messages.length : answers[path.at(-1)] + 1;
    return feed(trajectory.messages.slice(0, upTo).map((message, at) => card(message, note(answers.includes(at) ? answers.indexOf(at) : null))));
  }
  return feed([...trajectory.messages.map((message) => card(message, null)),
    h("p", { class: "quiet small" }, "The messages are those of the whole trajectory; its turns sampled:"),
    ...path.map((index) => card(sampledMessage(textOf(turns[index].completion_token_ids)), note(index)))]);
}

function turnLink(index, turn, openTurn) {
  return h("a", { href: openTurn(index) }, `turn ${index} · ${turnNote(turn)}`);
}
