// The samples of one problem side by side, also those of other runs and other steps.

import { chip, counted, deviation, h, mean, select, short } from "./dom.js";
import { exported, fetchNow, keep, link, runPath, trajectoryPath } from "./data.js";
import { rewardColor, runColor } from "./color.js";
import { messageCard } from "./chat.js";

// The address has the file that is compared with in each run: "beside:RUN=FILE", or nothing for none.
const BESIDE = "beside:";
const NONE = "";

export function titleOf(file) {
  const [kind, number] = file.split("-");
  if (number === undefined) return file;
  return kind === "step" ? `Step ${Number(number)}` : `Held-out, step ${Number(number)}`;
}

// `members` are the summaries of the samples of the problem in the file that the address names.
export async function showGroup(main, runs, place, members, go) {
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
        (trajectory) => entry.target.append(h("div", { style: { "margin-top": "0.6rem" } }, trajectory.messages.map((message) => messageCard(message)))),
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
