// Tables that sort by any column, with mouse or keyboard. Long tables have a search box and pages.
// A row becomes an element when it is shown.
"use strict";

const LONG = 100; // tables with more rows have pages
const PAGE = 50;
const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

const cellText = (cell) =>
  cell === null || cell === undefined
    ? ""
    : typeof cell === "object"
      ? cell.text
      : typeof cell === "number"
        ? plain.format(cell)
        : cell;
const cellSort = (cell) =>
  cell !== null && typeof cell === "object"
    ? cell.sort === undefined
      ? cell.text
      : cell.sort
    : cell;

function cellNode(cell) {
  const text = cellText(cell);
  const mark = cell !== null && typeof cell === "object" ? cell.mark : "";
  // Links lead to places in the page only.
  if (typeof cell?.href === "string" && cell.href.startsWith("#"))
    return el("a", { href: cell.href }, text);
  if (mark === "best") return el("strong", { title: "best" }, text);
  if (mark === "second") return el("u", { title: "second best" }, text);
  return text;
}

function compare(a, b) {
  const emptyA = a === null || a === undefined || a === "",
    emptyB = b === null || b === undefined || b === "";
  if (emptyA || emptyB) return { fixed: emptyA - emptyB }; // unknown values are last in both orders
  if (typeof a === "number" && typeof b === "number") return { by: a - b };
  if (typeof a === "number" || typeof b === "number") return { by: typeof a === "number" ? -1 : 1 };
  return { by: collator.compare(a, b) };
}

/**
 * Returns an element around one that scrolls sideways.
 *
 * A shadow at an edge shows that there is more, and the element has the class `overflows`.
 */
function scrollable(inner) {
  const outer = el("div", { class: "more-to-see" }, inner);
  const look = () => {
    const hidden = inner.scrollWidth - inner.clientWidth;
    outer.classList.toggle("overflows", hidden > 1);
    outer.classList.toggle("more-left", inner.scrollLeft > 1);
    outer.classList.toggle("more-right", inner.scrollLeft < hidden - 1);
  };
  inner.addEventListener("scroll", look, { passive: true });
  const observer = new ResizeObserver(look);
  observer.observe(inner);
  for (const child of inner.children) observer.observe(child);
  return outer;
}

/**
 * Returns the element of a table {title?, columns: [{name, align, help?}], rows: [[cell]]}.
 *
 * `sorted_by` {column, descending} is the order that the rows have already. The element's method
 * `fill(rows)` replaces the rows.
 */
function makeTable({ title, columns, rows, sorted_by: given = { column: -1 } }) {
  let all = rows,
    shown = rows,
    page = 0;
  const order = { column: given.column, sign: given.descending ? -1 : 1 };
  const sorted = () => (order.sign > 0 ? "ascending" : "descending");
  const heads = columns.map((column, number) => {
    const button = el(
      "button",
      { type: "button", title: column.help, onclick: () => sortBy(number) },
      column.name,
      el("span", { class: "arrow", "aria-hidden": "true" }),
    );
    return el(
      "th",
      {
        scope: "col",
        class: column.align === "right" ? "right" : null,
        "aria-sort": number === given.column ? sorted() : "none",
      },
      button,
    );
  });
  const body = el("tbody");
  const search = el("input", {
    type: "search",
    placeholder: "Search",
    "aria-label": `Search ${title ?? "the table"}`,
    oninput: () => {
      page = 0;
      arrange();
    },
  });
  const count = el("span", { class: "count", role: "status" });
  const back = el(
    "button",
    {
      type: "button",
      onclick: () => {
        page -= 1;
        show();
      },
    },
    "Back",
  );
  const next = el(
    "button",
    {
      type: "button",
      onclick: () => {
        page += 1;
        show();
      },
    },
    "Next",
  );
  const tools = el(
    "div",
    { class: "tools" },
    search,
    el("span", { class: "pager" }, count, back, next),
  );
  const scroller = el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": title ?? "table" },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body),
  );
  const hint = el("p", { class: "hint", "aria-hidden": "true" }, "Scroll sideways for more columns");
  const element = el("div", { class: "table" }, tools, scrollable(scroller), hint);

  /** A long text at the start of a row gets room on a narrow screen. */
  function cellClass(cell, k) {
    if (columns[k].align === "right") return "right";
    return k === 0 && cellText(cell).length > 20 ? "long" : null;
  }

  function sortBy(number) {
    const first = columns[number].align === "right" ? -1 : 1; // numbers: the largest first
    order.sign = order.column === number ? -order.sign : first;
    order.column = number;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== number ? "none" : sorted()));
    page = 0;
    arrange();
  }

  function arrange() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = words.length
      ? all.filter((row) => {
          const text = row.map(cellText).join(" ").toLowerCase();
          return words.every((word) => text.includes(word));
        })
      : all;
    if (order.column >= 0) {
      const keyed = shown.map((row) => [cellSort(row[order.column]), row]);
      keyed.sort(([a], [b]) => {
        const { fixed, by } = compare(a, b);
        return fixed ?? by * order.sign;
      });
      shown = keyed.map(([, row]) => row);
    }
    show();
  }

  function show() {
    const long = all.length > LONG;
    tools.hidden = !long;
    page = Math.max(0, Math.min(page, Math.ceil(shown.length / PAGE) - 1));
    const from = long ? page * PAGE : 0,
      to = long ? Math.min(from + PAGE, shown.length) : shown.length;
    count.textContent = shown.length
      ? `${whole.format(from + 1)}–${whole.format(to)} of ${whole.format(shown.length)}`
      : "nothing found";
    back.disabled = from === 0;
    next.disabled = to >= shown.length;
    body.replaceChildren(
      ...shown
        .slice(from, to)
        .map((row) =>
          el(
            "tr",
            {},
            ...row.map((cell, k) => el("td", { class: cellClass(cell, k) }, cellNode(cell))),
          ),
        ),
    );
  }

  element.fill = (fresh) => {
    all = fresh;
    arrange();
  };
  show();
  return element;
}
