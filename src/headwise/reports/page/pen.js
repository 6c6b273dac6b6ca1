// A context that draws like a canvas and writes SVG: what the pictures of this page use.

const CRISP = 4096;  // cells of a map that are drawn as rectangles; larger maps are embedded as a picture

class SvgPen {
  constructor(width, height) {
    Object.assign(this, { width, height, parts: [], depth: 0, measure: make("canvas").getContext("2d") });
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "12px sans-serif", textAlign: "start", textBaseline: "alphabetic" });
  }

  add(tag, attributes, words) {
    const escaped = (value) => String(value).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff\ud800-\udfff]/g, (c, i, all) => (/[\ud800-\udbff]/.test(c) && /[\udc00-\udfff]/.test(all[i + 1] ?? "") ? c : /[\udc00-\udfff]/.test(c) && /[\ud800-\udbff]/.test(all[i - 1] ?? "") ? c : "\ufffd"));
    const given = Object.entries(attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    this.parts.push(words === undefined ? `<${tag}${given}/>` : `<${tag}${given}>${escaped(words)}</${tag}>`);
  }

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  fillRect(x, y, width, height) { this.add("rect", { x: short(x), y: short(y), width: short(width), height: short(height), fill: this.fillStyle }); }
  strokeRect(x, y, width, height) { this.add("rect", { x: short(x), y: short(y), width: short(width), height: short(height), fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth }); }

  fillText(text, x, y) {
    const [, size, family] = /([\d.]+)px (.*)$/.exec(this.font), weight = /^\d{3} /.exec(this.font)?.[0].trim() ?? "400";
    const anchor = { center: "middle", right: "end" }[this.textAlign] ?? "start", middle = this.textBaseline === "middle";
    this.add("text", { x: short(x), y: short(middle ? y + 0.35 * size : y), fill: this.fillStyle, "font-size": size, "font-family": family, "font-weight": weight, "text-anchor": anchor, "xml:space": "preserve" }, text);
  }

  drawImage(picture, x, y, width, height) {
    if (picture.width * picture.height > CRISP) {
      this.add("image", { x: short(x), y: short(y), width: short(width), height: short(height), href: picture.toDataURL(), preserveAspectRatio: "none", style: "image-rendering: pixelated" });
      return;
    }
    const { data } = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height), w = width / picture.width, h = height / picture.height;
    for (let i = 0; i < picture.width * picture.height; i++) {
      const fill = `#${[0, 1, 2].map((c) => data[4 * i + c].toString(16).padStart(2, "0")).join("")}`;
      this.add("rect", { x: short(x + (i % picture.width) * w), y: short(y + Math.floor(i / picture.width) * h), width: short(w + 0.05), height: short(h + 0.05), fill });
    }
  }

  save() { this.depth++; this.open = [...(this.open ?? []), 0]; }
  restore() { this.parts.push("</g>".repeat(this.open.pop())); }
  translate(x, y) { this.group(`translate(${short(x)} ${short(y)})`); }
  rotate(angle) { this.group(`rotate(${short((angle * 180) / Math.PI)})`); }

  group(transform) {
    this.parts.push(`<g transform="${transform}">`);
    this.open[this.open.length - 1]++;
  }

  toString() {
    return `<svg xmlns="${SVG}" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}">${this.parts.join("\n")}</svg>\n`;
  }
}

const short = (x) => Math.round(x * 100) / 100;
