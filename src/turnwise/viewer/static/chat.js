// What was said, with calls and results.

import { counted, h, mean, short } from "./dom.js";

function contentOf(message) {
  const content = message.content;
  if (Array.isArray(content)) return content.map((part) => part.text ?? `[${part.type}]`).join("");
  return content === null || content === undefined ? "" : String(content);
}

function callOf(call) {
  const called = call.function ?? call;
  let given = called.arguments;
  if (typeof given === "string") {
    try {
      given = JSON.parse(given);
    } catch { /* malformed arguments are shown as they are */ }
  }
  const text = typeof given === "string" ? given : Object.entries(given ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
  return h("div", { class: "call" }, h("b", null, called.name ?? "?"), `(${text})`);
}

export function messageCard(message, notes) {
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const said = contentOf(message);
  return h("article", { class: `message ${role}`, "aria-label": `${message.role} message` },
    h("header", null, h("b", null, message.role), message.name && h("span", null, message.name), notes ?? null),
    said && h("div", { class: said.length > 3000 ? "said long" : "said" }, said),
    (message.tool_calls ?? []).map(callOf),
    !said && !(message.tool_calls ?? []).length && h("div", { class: "quiet small" }, "empty"));
}

export function turnNote(turn) {
  const versions = [...new Set(turn.weight_versions)];
  const first = Math.min(...versions);
  const last = Math.max(...versions);
  const parts = [counted(turn.completion_token_ids.length, "token", "tokens"), `weights v${first}${last > first ? `–${last}` : ""}`,
    `mean log-prob ${short(mean(turn.logprobs))}`, turn.finish_reason];
  if (turn.adapter) parts.push(`adapter ${turn.adapter}`);
  return parts.join(" · ");
}

// The conversation of one branch: `path` has the indices of its turns.
export function chatView(trajectory, path, textOf, openTurn) {
  const turns = trajectory.turns;
  const leaf = turns[path.at(-1)];
  const own = leaf?.messages?.length ? leaf.messages : null;
  const messages = own ?? trajectory.messages;
  const answers = messages.filter((message) => message.role === "assistant").length;
  const aligned = !own && answers === path.length;
  let answer = 0;
  const cards = messages.map((message) => {
    let notes = null;
    if (message.role === "assistant" && aligned) {
      const index = path[answer++];
      notes = turnLink(index, turns[index], openTurn);
    }
    return messageCard(message, notes);
  });
  if (own) {
    const index = path.at(-1);
    cards.push(messageCard({ role: "assistant", content: textOf(turns[index].completion_token_ids) }, turnLink(index, turns[index], openTurn)));
  } else if (!aligned) {
    cards.push(h("p", { class: "quiet small" }, "The messages are those of the whole trajectory; its turns sampled:"));
    for (const index of path) {
      cards.push(messageCard({ role: "assistant", content: textOf(turns[index].completion_token_ids) }, turnLink(index, turns[index], openTurn)));
    }
  }
  return h("div", { role: "feed", "aria-label": "Conversation" }, cards);
}

function turnLink(index, turn, openTurn) {
  return h("a", { href: openTurn(index) }, `turn ${index} · ${turnNote(turn)}`);
}
