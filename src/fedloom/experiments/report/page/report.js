// The report: shows the page's data in tabs, one for each section.
"use strict";

(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const ORDER = ["results", "classes", "clients", "cost", "privacy", "settings", "data", "pictures", "runs"];
  const LARGE = new Set(["image", "graph", "scatter", "table", "group", "note"]);
  const names = [...new Set(page.figures.map((figure) => figure.section))];
  const sections = [
    ...ORDER.filter((name) => names.includes(name)),
    ...names.filter((name) => !ORDER.includes(name)),
  ];
  const isWide = (spec) =>
    (LARGE.has(spec.kind) && !spec.half && (!spec.panels || spec.panels.length > 1)) ||
    (spec.kind === "bars" && spec.rows.length > 12) ||
    (spec.kind === "heat" && spec.columns.length > 14);

  const list = (pairs, kind) =>
    el(
      "dl",
      { class: kind },
      ...pairs.map(([name, value]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, String(value))),
      ),
    );

  function header() {
    const date = new Date(page.made);
    const made = Number.isNaN(date.getTime())
      ? page.made
      : date.toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short" });
    return el(
      "header",
      {},
      el(
        "div",
        { class: "top" },
        el("p", { class: "byline" }, `fedloom report · ${made}`),
        theme.button(),
      ),
      el("h1", {}, page.title),
      ...headline(),
      page.facts.length ? list(page.facts, "facts") : "",
    );
  }

  /** Returns a text whose numbers stay on one line with their units. */
  const unbroken = (text) =>
    text.replace(/(\d) (%|[kMGT]?B\b|points?\b|seeds?\b)/g, "$1\u00a0$2").replace(/p ([=<]) /g, "p\u00a0$1\u00a0");

  /** Returns the sentence that says what the report shows, and what goes with it. */
  function headline() {
    if (!page.headline) return [];
    const { name, details } = page.headline,
      text = unbroken(page.headline.text);
    const starts = name && text.startsWith(name);
    const sentence = el(
      "p",
      { class: "headline", id: "headline" },
      starts ? el("strong", {}, name) : "",
      starts ? text.slice(name.length) : text,
    );
    if (!details.length) return [sentence];
    const several = details.some((line) => line.length > 120);
    return [
      sentence,
      several
        ? el("ul", { class: "details" }, ...details.map((line) => el("li", {}, line)))
        : el("p", { class: "details" }, details.join(" ")),
    ];
  }

  function notice(id, title, items, open) {
    return el(
      "aside",
      { class: "notice", id, "aria-label": title },
      el("details", { open }, el("summary", {}, title), el("ul", {}, ...items)),
    );
  }

  function warnings() {
    const found = page.warnings ?? [];
    if (!found.length) return "";
    const title = found.length === 1 ? "1 warning" : `${found.length} warnings`;
    const items = found.map((line) => el("li", {}, line));
    return notice("warnings", title, items, found.length <= 5);
  }

  function leftOut() {
    const count = page.left_out.length;
    if (!count) return "";
    const items = page.left_out.map(({ folder, reason }) =>
      el("li", {}, el("code", {}, folder), ` ${reason}`),
    );
    const title = `${count} run ${count === 1 ? "folder is" : "folders are"} not in this report`;
    return notice("left-out", title, items, count <= 5);
  }

  function footer() {
    const versions = page.versions ?? [];
    const about = page.versions_differ
      ? "The runs were made with different versions, so their numbers may differ for that reason."
      : "All runs were made with the same versions.";
    return el(
      "footer",
      { id: "versions" },
      page.command
        ? el("p", { class: "again" }, "This page was made by ", el("code", {}, page.command))
        : "",
      versions.length ? el("h2", {}, "Versions") : "",
      versions.length ? el("p", {}, about) : "",
      versions.length ? list(versions, "facts") : "",
      el("p", {}, `This page was written by fedloom ${page.version}.`),
    );
  }

  function tableFigure(spec, heading) {
    const caption = spec.caption && el("figcaption", {}, el("p", {}, spec.caption));
    const figure = el("figure", { id: spec.id, class: "table-figure" });
    if (!spec.closed)
      figure.append(
        el(heading, {}, spec.title),
        ...[makeTable(spec), caption].filter(Boolean), // the note follows the table
      );
    else {
      const more = el("details", {}, el("summary", {}, el(heading, {}, spec.title)));
      more.addEventListener("toggle", () => {
        if (more.open && !more.querySelector(".table"))
          more.append(...[makeTable(spec), caption].filter(Boolean));
      });
      figure.append(more);
    }
    return figure;
  }

  function node(spec, heading) {
    if (spec.kind === "table") return tableFigure(spec, heading);
    if (spec.kind === "note")
      return el("div", { id: spec.id, class: "note" }, el(heading, {}, spec.title), el("p", {}, spec.caption));
    if (spec.kind !== "group") return charts.figure(spec, heading);
    const inner = el("div", { class: "pairs" });
    const shorter = (one) => ({ ...one, title: one.short_title ?? one.title });
    arrange(inner, spec.figures.map(shorter), "h4");
    return el(
      "div",
      { id: spec.id, class: "group" },
      el("h3", {}, spec.title),
      el("p", { class: "caption" }, spec.caption),
      inner,
    );
  }

  /** Adds figures. Small ones form pairs; one without a partner is wide. */
  function arrange(place, specs, heading = "h3") {
    let alone = null;
    for (const spec of specs) {
      const made = node(spec, heading);
      if (isWide(spec)) {
        alone?.classList.add("wide");
        alone = null;
        made.classList.add("wide");
      } else alone = alone ? null : made;
      place.append(made);
    }
    alone?.classList.add("wide");
  }

  function fill(panel, section) {
    arrange(
      panel,
      page.figures.filter((figure) => figure.section === section),
    );
    panel.dataset.filled = "yes";
  }

  const titleOf = (name) => name[0].toUpperCase() + name.slice(1);
  const panels = new Map(
    sections.map((name) => [
      name,
      el(
        "section",
        {
          id: `panel-${name}`,
          class: "panel pairs",
          role: "tabpanel",
          "aria-labelledby": `tab-${name}`,
          hidden: true,
        },
        el("h2", { class: "unseen" }, titleOf(name)),
      ),
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
        titleOf(name),
      ),
    ]),
  );

  function open(name) {
    for (const [other, tab] of tabs) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      panels.get(other).hidden = other !== name;
    }
    tabs.get(name).scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    if (!panels.get(name).dataset.filled) fill(panels.get(name), name); // made when opened
  }

  function follow() {
    const asked = decodeURIComponent(location.hash.slice(1));
    if (panels.has(asked)) return open(asked);
    const inner = (one) => one.id === asked || (one.figures ?? []).some(inner);
    const figure = page.figures.find(inner);
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
  document
    .getElementById("report")
    .append(header(), warnings(), leftOut(), scrollable(tablist), ...panels.values(), footer());
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
