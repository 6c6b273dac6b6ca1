// Pointer input on the map: drag, wheel, pinch, click, double click.

const STILL = 4;        // css pixels; a press that moves less is a click
const NOTCH = 1.6;      // a wheel's notch zooms by about this factor

class Hand {
  // Calls `seen(point)` while the mouse hovers (null when it leaves), `chosen(point)` on a click.
  constructor(over, plot, { seen, chosen }) {
    Object.assign(this, { over, plot, seen, chosen, held: new Map() });
    over.addEventListener("pointerdown", (event) => this.press(event));
    over.addEventListener("pointermove", (event) => this.move(event));
    over.addEventListener("pointerup", (event) => this.release(event));
    over.addEventListener("pointercancel", (event) => this.release(event, true));
    over.addEventListener("pointerleave", () => { if (!this.held.size) seen(null); });
    over.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    over.addEventListener("dblclick", (event) => this.zoom(this.at(event), event.shiftKey ? 0.5 : 2));
  }

  at(event) {
    const box = this.over.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  zoom({ x, y }, factor) {
    this.plot.camera.glideAt(x, y, factor);
    this.plot.draw();
  }

  press(event) {
    if (event.button !== 0) return;
    this.over.setPointerCapture?.(event.pointerId);
    this.held.set(event.pointerId, this.at(event));
    if (this.held.size === 1) Object.assign(this, { from: this.at(event), moved: false });
    else this.moved = true;
    this.over.classList.add("held");
  }

  move(event) {
    const now = this.at(event), before = this.held.get(event.pointerId), { camera } = this.plot;
    if (!before) {
      if (event.pointerType !== "touch") this.seen(now);
      return;
    }
    if (!this.moved && Math.hypot(now.x - this.from.x, now.y - this.from.y) < STILL) return;
    this.moved = true;
    if (this.held.size === 1) {
      camera.pan(now.x - before.x, now.y - before.y);
    } else {
      const other = [...this.held].find(([id]) => id !== event.pointerId)[1];
      const old = Math.hypot(before.x - other.x, before.y - other.y), fresh = Math.hypot(now.x - other.x, now.y - other.y);
      const middle = { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 };
      camera.pan((now.x - before.x) / 2, (now.y - before.y) / 2);
      if (old > 1) camera.zoomAt(middle.x, middle.y, fresh / old);
    }
    this.held.set(event.pointerId, now);
    this.plot.draw();
  }

  release(event, broken = false) {
    if (!this.held.delete(event.pointerId) || this.held.size) return;
    this.over.classList.remove("held");
    if (!this.moved && !broken) this.chosen(this.at(event));
  }

  wheel(event) {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 33 : event.deltaMode === 2 ? 300 : 1, way = -event.deltaY * lines;
    // A pinch on a touchpad comes as a wheel with Ctrl held, in small steps.
    const factor = event.ctrlKey ? Math.exp(way * 0.01) : NOTCH ** Math.max(-2, Math.min(2, way / 100));
    this.zoom(this.at(event), factor);
  }
}
