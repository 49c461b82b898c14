// A branch as it was sampled beside what the chat template renders from its messages.

import { counted, h } from "./dom.js";
import { glyphs } from "./tokens.js";

const AROUND = 8;
const MOST_PLACES = 100;
const MOST_TOKENS = 400;

// `compared` is the server's answer; `open(position)` shows a token of the branch.
export function templateView(tokens, compared, open) {
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
