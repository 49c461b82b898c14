// Elements and numbers. Text always becomes a text node: nothing that a model wrote is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, set] of Object.entries(value)) element.style.setProperty(name, set);
    else if (key === "value") element.value = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

// A number as people read it: few digits, and exponents only where needed.
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function precise(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 0.001 && value !== 0 ? value.toExponential(4) : value.toFixed(5);
}

export function counted(count, one, several) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : several}`;
}

export function chip(name, value, bad) {
  return h("span", { class: bad ? "chip bad" : "chip" }, name, h("b", null, value));
}

export function select(label, options, current, onchange) {
  const list = h("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([value, text]) => h("option", { value, selected: value === current }, text)));
  list.value = current;
  return h("label", { class: "field" }, label, list);
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}

export function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(mean(values.map((value) => (value - middle) ** 2)));
}
