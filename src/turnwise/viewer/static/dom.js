// Elements, numbers, colours and long lists. Text always becomes a text node: nothing that a model
// wrote is parsed as HTML.

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

const HUES = [220, 28, 160, 290, 50, 340, 190, 100];

export function heat(share) {
  return `rgb(var(--heat) / ${(0.06 + 0.64 * Math.min(1, Math.max(0, share))).toFixed(3)})`;
}

export function signed(share) {
  const size = (0.08 + 0.6 * Math.min(1, Math.abs(share))).toFixed(3);
  return `rgb(var(${share < 0 ? "--heat" : "--cool"}) / ${size})`;
}

export function category(index) {
  return `hsl(${HUES[index % HUES.length]} 70% 50% / 0.3)`;
}

export function runColor(index) {
  return `var(--run-${index % 6})`;
}

export function rewardColor(reward, low, high) {
  if (reward === null || high <= low) return "transparent";
  return signed((((reward - low) / (high - low)) * 2 - 1) * 0.6);
}

const BEYOND = 12;

export class VirtualList {
  // `render(index)` returns a row's element; it is called when the row comes into sight.
  constructor(element, rowHeight, render) {
    this.element = element;
    this.rowHeight = rowHeight;
    this.render = render;
    this.count = 0;
    this.shown = new Map();
    this.inner = document.createElement("div");
    this.inner.className = "inner";
    element.classList.add("list");
    element.append(this.inner);
    element.addEventListener("scroll", () => this.update(), { passive: true });
    this.observer = new ResizeObserver(() => this.update());
    this.observer.observe(element);
  }

  reset(count) {
    this.count = count;
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.inner.style.height = `${count * this.rowHeight}px`;
    this.update();
  }

  update() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - BEYOND);
    const sight = Math.ceil(this.element.clientHeight / this.rowHeight) + 2 * BEYOND;
    const end = Math.min(this.count, first + sight);
    for (const [index, row] of this.shown) {
      if (index < first || index >= end) {
        row.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < end; index++) {
      if (this.shown.has(index)) continue;
      const row = this.render(index);
      row.classList.add("item");
      row.style.top = `${index * this.rowHeight}px`;
      row.style.height = `${this.rowHeight}px`;
      this.shown.set(index, row);
      this.inner.append(row);
    }
  }

  // Bring a row into sight.
  reveal(index) {
    const top = index * this.rowHeight;
    const low = this.element.scrollTop;
    if (top < low + this.rowHeight || top > low + this.element.clientHeight - 2 * this.rowHeight) {
      this.element.scrollTop = Math.max(0, top - this.element.clientHeight / 2);
    }
    this.update();
  }
}
