// The report: shows the page's data in tabs, one for each section.
"use strict";

(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const ORDER = ["results", "traffic", "clients", "data", "pictures"];
  const LARGE = new Set(["bars", "image", "graph", "scatter", "table"]);
  const names = [...new Set(page.figures.map((figure) => figure.section))];
  const sections = [
    ...ORDER.filter((name) => names.includes(name)),
    ...names.filter((name) => !ORDER.includes(name)),
  ];
  const isWide = (spec) =>
    (LARGE.has(spec.kind) && (!spec.panels || spec.panels.length > 1)) ||
    (spec.kind === "heat" && spec.columns.length > 14);

  function header() {
    const facts = page.facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, String(value))),
    );
    const made = [new Date(page.made)].map((date) =>
      Number.isNaN(date.getTime())
        ? page.made
        : date.toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" }),
    )[0];
    const command =
      page.command && el("p", { class: "again" }, "Made by: ", el("code", {}, page.command));
    return el(
      "header",
      {},
      el(
        "div",
        { class: "top" },
        el("p", { class: "byline" }, `fedloom ${page.version} · ${made}`),
        theme.button(),
      ),
      el("h1", {}, page.title),
      facts.length ? el("dl", { class: "facts" }, ...facts) : "",
      command,
    );
  }

  function leftOut() {
    if (!page.left_out.length) return "";
    const count = page.left_out.length;
    const items = page.left_out.map(({ folder, reason }) =>
      el("li", {}, el("code", {}, folder), ` ${reason}`),
    );
    const title = `${count} run ${count === 1 ? "folder is" : "folders are"} not in this report`;
    return el(
      "aside",
      { class: "notice", id: "left-out", "aria-label": "left out" },
      el("details", { open: count <= 5 }, el("summary", {}, title), el("ul", {}, ...items)),
    );
  }

  function tableFigure(spec) {
    const head = el(
      "figcaption",
      {},
      el("h3", {}, spec.title),
      spec.caption && el("p", {}, spec.caption),
    );
    return el("figure", { id: spec.id, class: "table-figure" }, head, makeTable(spec));
  }

  /** Adds a section's figures. Small figures form pairs; one without a partner is wide. */
  function fill(panel, section) {
    const specs = page.figures.filter((figure) => figure.section === section);
    let alone = null;
    for (const spec of specs) {
      const node = spec.kind === "table" ? tableFigure(spec) : charts.figure(spec);
      if (isWide(spec)) {
        alone?.classList.add("wide");
        alone = null;
        node.classList.add("wide");
      } else alone = alone ? null : node;
      panel.append(node);
    }
    alone?.classList.add("wide");
    panel.dataset.filled = "yes";
  }

  const panels = new Map(
    sections.map((name) => [
      name,
      el("section", {
        id: `panel-${name}`,
        class: "panel",
        role: "tabpanel",
        "aria-labelledby": `tab-${name}`,
        hidden: true,
      }),
    ]),
  );
  const tabs = new Map(
    sections.map((name) => [
      name,
      el(
        "button",
        {
          type: "button",
          id: `tab-${name}`,
          role: "tab",
          "aria-controls": `panel-${name}`,
          "aria-selected": "false",
          tabindex: "-1",
          onclick: () => {
            open(name);
            history.replaceState(null, "", `#${name}`);
          },
        },
        name[0].toUpperCase() + name.slice(1),
      ),
    ]),
  );

  function open(name) {
    for (const [other, tab] of tabs) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      panels.get(other).hidden = other !== name;
    }
    if (!panels.get(name).dataset.filled) fill(panels.get(name), name); // made when opened
  }

  function follow() {
    const asked = decodeURIComponent(location.hash.slice(1));
    if (panels.has(asked)) return open(asked);
    const figure = page.figures.find((one) => one.id === asked);
    open(figure ? figure.section : sections[0]);
    if (figure) document.getElementById(asked).scrollIntoView();
  }

  const tablist = el(
    "div",
    {
      role: "tablist",
      "aria-label": "sections",
      onkeydown: (event) => {
        const at = sections.findIndex((name) => tabs.get(name) === document.activeElement),
          last = sections.length - 1;
        const to = {
          ArrowRight: at === last ? 0 : at + 1,
          ArrowLeft: at === 0 ? last : at - 1,
          Home: 0,
          End: last,
        }[event.key];
        if (to === undefined || at < 0) return;
        event.preventDefault();
        tabs.get(sections[to]).click();
        tabs.get(sections[to]).focus();
      },
    },
    ...tabs.values(),
  );
  tablist.hidden = sections.length < 2;

  document.getElementById("report").append(header(), leftOut(), tablist, ...panels.values());
  if (sections.length) {
    follow();
    window.addEventListener("hashchange", follow);
  } else
    document
      .getElementById("report")
      .append(el("p", {}, "There is nothing to show: no run folder could be used."));

  // A printed report shows all sections, in light colours.
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = {
      theme: document.documentElement.dataset.theme,
      shown: sections.find((name) => !panels.get(name).hidden),
    };
    for (const [name, panel] of panels) {
      if (!panel.dataset.filled) fill(panel, name);
      panel.hidden = false;
    }
    theme.set("light");
  });
  window.addEventListener("afterprint", () => {
    theme.set(before.theme);
    if (before.shown) open(before.shown);
    charts.drawAll();
  });
})();
