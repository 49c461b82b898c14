// The tree of a trajectory's turns. A branch is a path from the root to a turn that no other continues.

import { counted, h } from "./dom.js";

export function pathLength(turn) {
  return turn.prefix_length + turn.added_token_ids.length + turn.completion_token_ids.length;
}

// The turns of a path, each with the number of its own ids on it.
export function pathTo(turns, leaf) {
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
  const continued = new Set(turns.filter((turn) => turn.parent !== null && turn.parent !== undefined && turn.prefix_length === pathLength(turns[turn.parent])).map((turn) => turn.parent));
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
