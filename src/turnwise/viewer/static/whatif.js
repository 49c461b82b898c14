// Other continuations of a trajectory: the server starts an engine for them.

import { chip, counted, h, select, short } from "./dom.js";
import { answerTo } from "./data.js";
import { messageCard } from "./chat.js";

const MOST_MADE = 16;
const SHOWN = 60;

function nameOf(message, number) {
  const text = typeof message.content === "string" ? message.content : "";
  return `${number} ${message.role}: ${text.slice(0, SHOWN)}`;
}

function endingView(name, trajectory, from) {
  return h("section", { class: "panel stack", "aria-label": name },
    h("div", { class: "row" }, h("h3", null, name), chip("reward", trajectory.reward === null ? "none" : short(trajectory.reward)), chip("status", trajectory.status, trajectory.status !== "completed")),
    trajectory.messages.slice(from).map((message) => messageCard(message, null, () => null)));
}

// `base` is the trajectory's address, and `turn` the turn that is chosen in its tree.
export function whatIfView(trajectory, base, turn) {
  const asked = { turn, message: "", n: 4, weights: "then" };
  const answers = h("div", { class: "stack", role: "status" });
  const text = h("textarea", { rows: 3, "aria-label": "Its new text", disabled: true });
  const editable = trajectory.messages.map((message, number) => [String(number), nameOf(message, number)]).filter((_, number) => trajectory.messages[number].role !== "assistant");
  const turnField = select("From turn", trajectory.turns.map((_, number) => [String(number), `turn ${number}`]), String(turn), (value) => { asked.turn = Number(value); });
  const number = h("input", { type: "number", min: 1, max: MOST_MADE, value: asked.n, onchange: (event) => { asked.n = Number(event.target.value); } });
  const button = h("button", { type: "button" }, "Sample");
  const message = select("Change message", [["", "none"], ...editable], "", (value) => {
    asked.message = value;
    text.disabled = value === "";
    text.value = value === "" ? "" : String(trajectory.messages[Number(value)].content ?? "");
    turnField.querySelector("select").disabled = value !== "";
  });
  button.addEventListener("click", async () => {
    button.disabled = true;
    answers.replaceChildren(h("p", { class: "quiet" }, "An engine is started, and the part before the turn is repeated …"));
    const edited = asked.message !== "";
    const request = { n: asked.n, weights: asked.weights, ...(edited ? { edits: { [asked.message]: text.value } } : { turn: asked.turn }) };
    try {
      const made = await answerTo(`${base}/whatif`, request);
      const notes = [...Object.entries(made.failures).map(([reason, why]) => `${reason}: ${why}`), ...made.differences.map((how) => `The part before the turn has changed: ${how}`)];
      answers.replaceChildren(
        h("p", null, `${counted(made.continuations.length, "continuation", "continuations")} from turn ${made.turn}, after ${counted(made.message, "message", "messages")} in common.`),
        ...notes.map((note) => h("p", { class: "error" }, note)),
        endingView("as stored", made.stored, made.message),
        ...made.continuations.map((each, at) => endingView(`continuation ${at}`, each, made.message)));
    } catch (error) {
      answers.replaceChildren(h("p", { class: "error" }, error.message));
    }
    button.disabled = false;
  });
  return h("div", { class: "stack" },
    h("p", { class: "quiet small" }, "Everything before the turn is repeated: the environment, its calls and the stored answers. Then the model answers anew, and the environment goes on for real. The run is only read."),
    h("div", { class: "row" }, turnField, message, select("Weights", [["then", "before the step"], ["now", "the last ones"]], "then", (value) => { asked.weights = value; }), h("label", { class: "field" }, "Continuations", number)),
    text, h("div", null, button), answers);
}
