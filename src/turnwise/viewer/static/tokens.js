// Every token of a branch, coloured by a value, in rows of which only those in sight exist.

import { category, h, heat, precise, short, signed, VirtualList } from "./dom.js";

const ROW = 24;
const WIDEST = 200;

// Numbers that a token may have: label, value of a token, kind of colour, share of the scale.
const MEASURES = {
  logprob: ["Log-prob", (token) => token.logprob, (value) => heat(Math.sqrt(Math.max(0, -value) / 4)), "unlikely"],
  version: ["Weight version", (token) => token.version, (value, one) => category(one.versions.indexOf(value)), "category"],
  turn: ["Turn", (token) => token.turn, (value) => category(value), "category"],
  sampled: ["Sampled or context", (token) => (token.sampled ? 1 : 0), (value) => (value ? "rgb(var(--sampled) / 0.3)" : "transparent"), "mask"],
  advantage: ["Advantage", (token) => token.advantage, (value, one) => signed(value / (one.largest.advantage || 1)), "signed"],
  difference: ["|engine − trainer|", (token) => token.difference, (value, one) => heat(value / (one.largest.difference || 1)), "largest"],
  ratio: ["Ratio", (token) => token.ratio, (value) => signed(Math.log(Math.max(value, 1e-6)) / 0.3), "signed"],
  entropy: ["Entropy", (token) => token.entropy, (value) => heat(value / 2), "largest"],
  staleness: ["Staleness", (token) => token.staleness, (value) => category(value), "category"],
};

// The tokens of a branch. `values` has columns of the trained tokens, or nothing.
export function tokensOf(trajectory, path, texts, values) {
  const { turn: turns, at: places, ...columns } = values;
  const lines = new Map((turns ?? []).map((turn, line) => [`${turn}:${places[line]}`, line]));
  const tokens = [];
  for (const [index, length] of path) {
    const turn = trajectory.turns[index];
    const added = turn.added_token_ids.length;
    for (let i = 0; i < length; i++) {
      const at = i - added;
      const sampled = at >= 0 && turn.weight_versions[at] >= 0;  // a forced token is context
      const id = at >= 0 ? turn.completion_token_ids[at] : turn.added_token_ids[i];
      const [text, bytes, special] = texts[id] ?? [`⟨${id}⟩`, null, false];
      const token = { id, text, bytes, special, turn: index, at, sampled, position: tokens.length,
        logprob: sampled ? turn.logprobs[at] : turn.added_logprobs?.[i] ?? undefined,
        version: sampled ? turn.weight_versions[at] : undefined };
      const placed = turn.images?.find(([, start, count]) => start <= token.position && token.position < start + count);
      if (placed && !sampled) token.image = { hash: placed[0], at: token.position - placed[1], length: placed[2] };
      const line = lines.get(`${index}:${at}`);
      if (sampled && turns) token.trained = line !== undefined;
      if (sampled && line !== undefined) {
        for (const [name, column] of Object.entries(columns)) token[name] = column[line];
        if (token.trainer_logprob !== undefined) token.difference = Math.abs(token.trainer_logprob - token.logprob);
      }
      tokens.push(token);
    }
  }
  return tokens;
}

// Shown text: line breaks and other invisible characters are visible, and a token is never empty.
export function glyphs(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (character) => `⟨${character.codePointAt(0).toString(16)}⟩`);
  return shown === "" ? "∅" : shown;
}

// A token as a row shows it: of an image, all look the same.
function shownAs(token) {
  return token.image ? "▦" : glyphs(token.text);
}

const PICTURE = 9; // characters that are as wide as an image in a row

function widthOf(text) {
  let width = 0;
  for (const character of text) width += character.codePointAt(0) > 0x1100 && character !== "↵" && character !== "⇥" && character !== "␍" && character !== "∅" ? 2 : 1;
  return width;
}

export class TokenView {
  // `select(token)` is called when a token is chosen, so that the address can name it; `proof(token)`
  // returns lines on the call that the token belongs to, `address(token)` a link to it, and
  // `picture(hash)` an image.
  constructor(tokens, choice, { select, proof, address, picture }) {
    this.tokens = tokens;
    this.select = select;
    this.proof = proof;
    this.address = address;
    this.picture = picture;
    this.current = null;
    this.wanted = null;
    this.measure = choice in MEASURES && this.has(choice) ? choice : "logprob";
    this.versions = [...new Set(tokens.filter((token) => token.sampled).map((token) => token.version))].sort((a, b) => a - b);
    this.largest = {};
    for (const name of ["advantage", "difference"]) {
      this.largest[name] = tokens.reduce((most, token) => Math.max(most, Math.abs(token[name] ?? 0)), 0);
    }
    this.box = h("div", { tabindex: "0", role: "listbox", "aria-label": "Tokens. Arrow keys move, Home and End jump." });
    this.live = h("section", { class: "detail panel", "aria-label": "Token", tabindex: "0" });
    this.spoken = h("p", { class: "unseen", role: "status" });
    this.legend = h("span", { class: "legend" });
    this.element = h("div", null, this.toolbar(), h("div", { class: "tokens" }, this.box, this.live), this.spoken);
    this.list = new VirtualList(this.box, ROW, (row) => this.renderRow(row));
    // Not "pointerover", which also comes when rows move under a pointer at rest.
    this.box.addEventListener("pointermove", (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined && Number(at) !== this.described) this.describe(Number(at));
    });
    this.box.addEventListener("pointerleave", () => this.describe(this.current));
    this.box.addEventListener("click", (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined) this.choose(Number(at));
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.layout()).observe(this.box);
    this.describe(null);
    this.paintLegend();
  }

  has(name) {
    return this.tokens.some((token) => token.sampled && MEASURES[name][1](token) !== undefined);
  }

  toolbar() {
    const options = Object.keys(MEASURES).filter((name) => this.has(name));
    const measure = h("select", { onchange: (event) => {
      this.measure = event.target.value;
      this.list.reset(this.rows?.length ?? 0);
      this.paintLegend();
      if (this.current !== null) this.select(this.tokens[this.current]);
    } }, options.map((name) => h("option", { value: name }, MEASURES[name][0])));
    measure.value = this.measure;
    const jump = this.has("difference") ? ["largest difference", (token) => token.difference, "to the token with the next smaller difference"] : ["least likely token", (token) => -token.logprob, "to the next token, from the least likely on"];
    return h("div", { class: "row spread" },
      h("div", { class: "row" }, h("label", { class: "field" }, "Colour by", measure), this.legend),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => this.choose(this.ranked(jump[1])[0]?.position ?? null) }, `Jump to the ${jump[0]}`),
        h("button", { type: "button", title: jump[2], onclick: () => this.next(jump[1]) }, "Next")));
  }

  ranked(value) {
    return this.tokens.filter((token) => token.sampled && value(token) !== undefined).sort((a, b) => value(b) - value(a));
  }

  next(value) {
    const ranked = this.ranked(value);
    const at = ranked.findIndex((token) => token.position === this.current);
    if (ranked.length) this.choose(ranked[(at + 1) % ranked.length].position);
  }

  // Rows of as many tokens as fit; a token that breaks the line ends its row.
  layout() {
    if (!this.box.clientWidth) return; // not on the page yet; the observer calls again
    const probe = h("span", { style: { position: "absolute", visibility: "hidden" } }, "0".repeat(50));
    this.box.append(probe);
    const character = probe.getBoundingClientRect().width / 50 || 8;
    probe.remove();
    const fits = Math.max(20, Math.floor((this.box.clientWidth - 100) / character));
    if (fits === this.fits) return;
    this.fits = fits;
    this.rows = [];
    this.rowOf = new Int32Array(this.tokens.length);
    let row = [];
    let width = 0;
    const end = () => {
      if (row.length) this.rows.push(row);
      row = [];
      width = 0;
    };
    for (const token of this.tokens) {
      const size = Math.min(fits, widthOf(shownAs(token)) + 1 / character + (token.image?.at === 0 ? PICTURE : 0));
      const before = this.tokens[token.position - 1];
      if (width + size > fits || (before && before.turn !== token.turn)) end();
      row.push(token.position);
      width += size;
      this.rowOf[token.position] = this.rows.length;
      if (!token.image && token.text.includes("\n")) end();
    }
    end();
    this.list.reset(this.rows.length);
    if (this.wanted !== null) this.list.reveal(this.rowOf[this.wanted]);
    if (this.current !== null) this.choose(this.current);
  }

  // Bring a token into sight, now or as soon as the page shows it.
  reveal(position) {
    this.wanted = position;
    if (this.rows) this.list.reveal(this.rowOf[position]);
  }

  renderRow(index) {
    const positions = this.rows[index];
    const first = this.tokens[positions[0]];
    const before = this.tokens[positions[0] - 1];
    const row = h("div", { class: before && before.turn !== first.turn ? "begins" : null }, h("span", { class: "at", title: before?.turn === first.turn ? null : `turn ${first.turn} begins` }, before?.turn === first.turn ? first.position.toLocaleString("en") : `turn ${first.turn}`));
    const [, value, color] = MEASURES[this.measure];
    for (const position of positions) {
      const token = this.tokens[position];
      const shown = shownAs(token);
      const number = value(token);
      const name = `token ${token.sampled ? "" : "context"}${token.special ? " special" : ""}${position === this.current ? " on" : ""}`;
      row.append(h("span", { class: name, id: `token-${position}`, role: "option", "aria-selected": String(position === this.current),
        "data-at": position, style: { background: number === undefined || number === null || !(token.sampled || this.measure === "logprob" || this.measure === "turn") ? "transparent" : color(number, this) } },
      token.image?.at === 0 && this.picture(token.image.hash), shown.length > WIDEST ? `${shown.slice(0, WIDEST)}…` : shown));
    }
    return row;
  }

  choose(position) {
    if (position === null || position < 0 || position >= this.tokens.length) return;
    this.current = this.wanted = position;
    const row = this.rowOf?.[position];
    for (const on of this.box.querySelectorAll(".token.on")) {
      on.classList.remove("on");
      on.setAttribute("aria-selected", "false");
    }
    if (row !== undefined) this.list.reveal(row);
    const shown = this.box.querySelector(`#token-${position}`);
    shown?.classList.add("on");
    shown?.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", `token-${position}`);
    this.describe(position);
    const token = this.tokens[position];
    this.spoken.textContent = `${token.text}: token ${position}, turn ${token.turn}, ${token.sampled ? `sampled, probability ${(100 * Math.exp(token.logprob)).toFixed(1)} %` : "context"}`;
    this.select(this.tokens[position]);
  }

  key(event) {
    const last = this.tokens.length - 1;
    const at = this.current ?? -1;
    const row = this.current === null ? 0 : this.rowOf[this.current];
    const column = this.current === null ? 0 : this.rows[row].indexOf(this.current);
    const below = (offset) => {
      const target = this.rows[Math.min(this.rows.length - 1, Math.max(0, row + offset))];
      return target[Math.min(column, target.length - 1)];
    };
    const moves = { ArrowRight: () => Math.min(last, at + 1), ArrowLeft: () => Math.max(0, at - 1), ArrowDown: () => below(1), ArrowUp: () => below(-1),
      PageDown: () => below(20), PageUp: () => below(-20), Home: () => 0, End: () => last };
    if (!(event.key in moves) || event.metaKey || event.ctrlKey || event.altKey) return;
    event.preventDefault();
    this.choose(moves[event.key]());
  }

  describe(position) {
    this.described = position;
    if (position === null || position === undefined) {
      this.live.replaceChildren(h("h2", null, "Token"), h("p", { class: "quiet small" }, "Point at a token, or use the arrow keys, to see its id, its bytes and every value."));
      return;
    }
    const token = this.tokens[position];
    const lines = [["position", position], ["id", token.id], ["bytes", token.bytes === null ? "not known" : token.bytes || "none"], ...this.proof(token)];
    if (token.sampled) {
      lines.push(["log-prob", precise(token.logprob)],
        ["probability", `${(100 * Math.exp(token.logprob)).toFixed(3)} %`]);
    } else {
      lines.push(["origin", "prompt, tool or template"]);
      if (token.logprob !== undefined && token.logprob !== null) lines.push(["log-prob", precise(token.logprob)]);
    }
    const trained = [["trainer_logprob", "trainer's log-prob"], ["difference", "|engine − trainer|"], ["advantage", "advantage"], ["weight", "loss weight"], ["ratio", "ratio"], ["clipped", "clipped"], ["entropy", "entropy"], ["staleness", "staleness"]];
    for (const [name, label] of trained) if (token[name] !== undefined) lines.push([label, precise(token[name])]);
    if (token.sampled) lines.push(["trained", token.trained === undefined ? "not recorded" : token.trained ? "yes" : "no"]);
    const list = (pairs) => h("dl", null, pairs.map(([name, value]) => [h("dt", null, name), h("dd", null, typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 6 }) : value)]));
    this.live.replaceChildren(h("div", { class: "row spread" }, h("h2", null, "Token"), h("a", { class: "small", href: this.address(token) }, "Link to it")),
      h("div", { class: "glyph" }, glyphs(token.text)), token.image ? this.picture(token.image.hash) : "", list(lines));
  }

  // Describe the chosen token again, after more is known of it.
  refresh() {
    this.describe(this.current);
  }

  paintLegend() {
    const [, , , kind] = MEASURES[this.measure];
    if (this.measure === "version") {
      this.legend.className = "legend versions";
      this.legend.replaceChildren(...this.versions.flatMap((version, index) => [h("i", { style: { background: category(index) } }), `v${version}`]));
      return;
    }
    this.legend.className = "legend";
    const scale = (colors) => colors.map((color) => h("i", { style: { background: color } }));
    const parts = {
      unlikely: ["likely", ...scale([0, 0.25, 0.5, 0.75, 1].map(heat)), "p < 2 %"],
      largest: ["0", ...scale([0, 0.25, 0.5, 0.75, 1].map(heat)), this.measure === "difference" ? short(this.largest.difference) : "large"],
      signed: [this.measure === "ratio" ? "≤ 0.74" : `−${short(this.largest.advantage)}`, ...scale([-1, -0.5, 0, 0.5, 1].map(signed)), this.measure === "ratio" ? "≥ 1.35" : short(this.largest.advantage)],
      mask: [...scale(["rgb(var(--sampled) / 0.3)"]), "sampled", h("span", { class: "quiet" }, "· grey: context")],
      category: [],
    };
    this.legend.replaceChildren(...parts[kind]);
  }
}
