// Shared by the scripts of all pages: creates elements, formats numbers and times, switches between
// light and dark colours. Text becomes text nodes, never HTML.
"use strict";

/**
 * Returns an element with attributes and children.
 *
 * Attributes named `on...` are listeners. Attributes that are null, undefined or false are left
 * out. Children may be strings.
 */
function el(tag, attributes = {}, ...children) {
  return fillElement(document.createElement(tag), attributes, children);
}

/** Returns an SVG element, like `el`. */
function svg(tag, attributes = {}, ...children) {
  return fillElement(
    document.createElementNS("http://www.w3.org/2000/svg", tag),
    attributes,
    children,
  );
}

function fillElement(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// ---- numbers ----
const known = (value) => typeof value === "number" && Number.isFinite(value);
const plain = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 4 });
const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const BYTES = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];
const SECONDS = [
  [3600, "h"],
  [60, "min"],
  [1, "s"],
  [1e-3, "ms"],
];

/** Returns the factor and the name of a readable unit for a value of this size. */
function unitFor(kind, size) {
  if (kind === "percent") return [0.01, "%"];
  if (kind === "bytes") return BYTES.find(([factor]) => size >= factor) ?? BYTES.at(-1);
  if (kind === "seconds")
    return SECONDS.find(([factor]) => size >= factor * (factor > 1 ? 2 : 1)) ?? SECONDS.at(-1);
  return [1, ""];
}

const withUnit = (text, unit) => (unit ? `${text}\u202f${unit}` : text);

/** Returns a value as text: 81.2 %, 36.9 MB, 12.5 s, 1,024. Unknown values give a dash. */
function written(value, kind = "") {
  if (!known(value)) return "–";
  if (kind === "percent") return withUnit((value * 100).toFixed(1), "%");
  if (kind === "count") return whole.format(value);
  if (kind !== "bytes" && kind !== "seconds") return plain.format(value);
  if (value === 0) return kind === "bytes" ? "0\u202fB" : "0\u202fs";
  const [factor, unit] = unitFor(kind, Math.abs(value));
  const scaled = value / factor;
  return withUnit(
    scaled >= 100 ? whole.format(scaled) : scaled.toFixed(unit === "B" ? 0 : 1),
    unit,
  );
}

// ---- light and dark ----
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");

const theme = {
  listeners: [],
  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : darkSystem.matches;
  },
  set(name) {
    if (name) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    for (const listener of this.listeners) listener();
  },
  remember(name) {
    this.set(name);
    try {
      localStorage.setItem("fedloom-theme", name);
    } catch {
      return; // the browser does not allow storage: the choice lasts as long as the page
    }
  },
  recall() {
    try {
      const kept = localStorage.getItem("fedloom-theme");
      if (kept === "light" || kept === "dark") this.set(kept);
    } catch {
      return; // as above
    }
  },
  /** Returns the button that changes the theme. */
  button() {
    const button = el("button", {
      type: "button",
      class: "quiet",
      id: "theme",
      onclick: () => this.remember(this.isDark() ? "light" : "dark"),
    });
    const label = () => {
      button.textContent = this.isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Change to ${this.isDark() ? "light" : "dark"} colours`);
    };
    label();
    this.listeners.push(label);
    return button;
  },
};
theme.recall();
darkSystem.addEventListener("change", () => theme.listeners.forEach((listener) => listener()));
