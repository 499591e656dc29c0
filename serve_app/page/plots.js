// Small line plots, as SVG elements without inline styles.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;

// A figure with one line for each name of `lines`; `unit` follows the numbers.
export class Plot {
  constructor(title, lines, { unit = "", span, most = null } = {}) {
    this.title = title;
    this.lines = lines;
    this.unit = unit;
    this.span = span; // how many points fit
    this.most = most; // the fixed upper end of the scale
    this.points = lines.map(() => []);
    this.figure = element("figure");
    this.caption = element("figcaption");
    this.caption.append(element("b", title));
    this.keys = lines.map((name, index) => this.#key(name, index));
    this.caption.append(element("br"), ...this.keys.map(({ node }) => node));
    this.svg = drawing(WIDTH, HEIGHT);
    this.svg.setAttribute("role", "img");
    this.paths = lines.map((_, index) => line(index));
    this.svg.append(...this.paths);
    this.scale = element("div", "", "scale");
    this.scale.append(element("span"), element("span"));
    this.figure.append(this.caption, this.svg, this.scale);
  }

  // Appends a value for each line, null if it is unknown.
  add(values, label) {
    values.forEach((value, index) => {
      this.points[index].push(value);
      if (this.points[index].length > this.span) this.points[index].shift();
    });
    const highest = Math.max(0, ...this.points.flat().filter((value) => value !== null));
    const top = this.most ?? rounded(Math.max(1, highest));
    this.paths.forEach((path, index) => path.setAttribute("d", this.#outline(this.points[index], top)));
    this.keys.forEach(({ text }, index) => {
      text.textContent = `${this.lines[index]} ${this.#number(values[index])}`;
    });
    const now = this.keys.map(({ text }) => text.textContent).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} of ${label}: now ${now}; highest ${this.#number(highest)}`);
    this.scale.firstChild.textContent = `0 to ${this.#number(top)}`;
  }

  // Leaves a gap of `count` points.
  skip(count) {
    for (const points of this.points) {
      points.push(...Array(Math.min(count, this.span)).fill(null));
      points.splice(0, points.length - this.span);
    }
  }

  showSpan(text) {
    this.scale.lastChild.textContent = text;
  }

  #number(value) {
    return value === null ? number(value) : number(value) + this.unit;
  }

  #outline(points, top) {
    const step = WIDTH / (this.span - 1);
    const first = this.span - points.length;
    let pen = "M";
    let outline = "";
    points.forEach((value, index) => {
      if (value === null) {
        pen = "M";
        return;
      }
      const y = HEIGHT - 2 - Math.min(1, value / top) * (HEIGHT - 4);
      outline += `${pen}${((first + index) * step).toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    });
    return outline;
  }

  #key(name, index) {
    const node = element("span", "", "key");
    const sample = drawing(20, 8);
    sample.setAttribute("aria-hidden", "true");
    const path = line(index);
    path.setAttribute("d", "M0 4L20 4");
    sample.append(path);
    const text = element("span", name);
    node.append(sample, text);
    return { node, text };
  }
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
}

function drawing(width, height) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  return svg;
}

function line(index) {
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("class", `line-${index}`);
  return path;
}

// The next of 1, 2, 5, 10, 20, ...
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}
