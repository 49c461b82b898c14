// A list whose rows have one height: only those in sight exist.

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
