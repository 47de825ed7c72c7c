// Follows a run: asks for what is new about once a second, and keeps what it has.
"use strict";

(() => {
  history.replaceState(null, "", location.pathname + location.hash); // the cookie has the token now; the address need not
  const EVERY = 1000,
    SELDOM = 5000; // milliseconds between questions; seldom when nobody looks, or nothing will come
  const FEW = 40; // clients that get a bar each
  const COUNT = { log: false, unit: "count" },
    SHARE = { log: false, unit: "percent" };
  const place = document.getElementById("watch");
  let view = null,
    timer = 0,
    asked = 0;

  const chosen = () => new URLSearchParams(location.hash.slice(1)).get("run") ?? "";
  const addressOf = (name) => `#${new URLSearchParams({ run: name })}`;

  const notice = el("p", { class: "notice", role: "alert", hidden: true });
  const say = (text) => {
    notice.hidden = !text;
    notice.textContent = text;
  };

  // ---- one run ----
  function runView() {
    const head = el("h1"),
      word = el("span", { class: "word" }),
      progressText = el("span"),
      cause = el("span", { class: "cause" });
    const state = el("div", { class: "state", role: "status" }, word, progressText, cause);
    const bar = el("progress", { "aria-label": "rounds", max: "1", value: "0" }),
      facts = el("dl", { class: "facts" }),
      grid = el("div", { class: "grid", hidden: true });
    const top = el("div", { class: "top" }, el("p", { class: "byline" }, "fedloom watch"), theme.button());
    const back = chosen() ? el("p", { class: "back" }, el("a", { href: "#" }, "All runs")) : "";
    place.replaceChildren(notice, el("header", {}, top, back, head, state, bar, facts), grid);
    const kept = { version: 0, entries: [], clients: [] };
    const figures = {};
    let table = null;

    function figure(spec, wide = false) {
      if (figures[spec.id] && figures[spec.id].spec.kind === spec.kind) return figures[spec.id].update(spec);
      const node = charts.figure(spec);
      if (wide) node.classList.add("wide");
      if (figures[spec.id]) figures[spec.id].element.replaceWith(node);
      else grid.append(node);
      figures[spec.id] = node.chart;
    }

    function curves() {
      const series = new Map();
      const add = (name, x, y) => {
        if (!series.has(name)) series.set(name, { name, color: series.size, x: [], y: [] });
        series.get(name).x.push(x);
        series.get(name).y.push(y);
      };
      for (const entry of kept.entries) {
        const after = entry.stage && entry.stage !== "train" ? `, ${entry.stage}` : "";
        if (known(entry.accuracy)) add(`test${after}`, entry.round, entry.accuracy);
        if (known(entry.val_accuracy)) add(`validation${after}`, entry.round, entry.val_accuracy);
      }
      return {
        id: "accuracy",
        kind: "lines",
        title: "Accuracy",
        caption: "Mean over clients by size, after each round.",
        x: { label: "round", ...COUNT },
        y: { label: "accuracy", ...SHARE },
        series: [...series.values()],
      };
    }

    function traffic() {
      const up = { name: "to the server", color: 0, x: [], y: [] },
        down = { name: "to the clients", color: 1, x: [], y: [] };
      let before = { round: 0, bytes_up: 0, bytes_down: 0 };
      for (const entry of kept.entries) {
        if (!known(entry.bytes_up) || entry.round === before.round) continue;
        const rounds = entry.round - before.round;
        up.x.push(entry.round);
        down.x.push(entry.round);
        up.y.push((entry.bytes_up - before.bytes_up) / rounds);
        down.y.push((entry.bytes_down - before.bytes_down) / rounds);
        before = entry;
      }
      return {
        id: "traffic",
        kind: "lines",
        title: "Traffic of each round",
        caption: "Bytes of all clients, without what only measures. The first round holds what came before it.",
        x: { label: "round", ...COUNT },
        y: { label: "bytes", log: false, unit: "bytes" },
        series: [up, down],
      };
    }

    function perClient() {
      const scored = kept.clients.filter((client) => known(client.accuracy)).sort((a, b) => b.accuracy - a.accuracy);
      const about = { id: "clients", title: "Accuracy of each client", caption: "As evaluated last, the best first." };
      const values = scored.map((client) => client.accuracy),
        names = scored.map((client) => client.id);
      if (scored.length <= FEW)
        return scored.length
          ? { ...about, kind: "bars", rows: names, x: { label: "accuracy", ...SHARE }, series: [{ name: "accuracy", color: 0, values }] }
          : null;
      return {
        ...about,
        kind: "points",
        x: { label: "rank", ...COUNT },
        y: { label: "accuracy", ...SHARE },
        series: [{ name: "clients", color: 0, x: values.map((_, k) => k + 1), y: values, labels: names }],
      };
    }

    function clientTable() {
      const columns = [
        { name: "client", align: "left" },
        { name: "accuracy", align: "right" },
        { name: "absent", align: "right", help: "exchanges that it has missed" },
        { name: "last in round", align: "right" },
        { name: "because", align: "left" },
      ];
      const rows = kept.clients.map((client) => [
        client.id,
        { text: written(client.accuracy, "percent"), sort: client.accuracy },
        client.absences,
        client.last_absent,
        client.cause,
      ]);
      if (table) return table.fill(rows);
      table = makeTable({ title: "Clients", columns, rows });
      grid.append(
        el(
          "figure",
          { class: "wide", id: "client-table" },
          el("figcaption", {}, el("h3", {}, "Clients"), el("p", {}, "Who was absent, how often, and why last.")),
          table,
        ),
      );
    }

    const WORDS = {
      waiting: "Waiting",
      running: "Running",
      silent: "Silent",
      completed: "Completed",
      failed: "Failed",
      stopped: "Stopped",
      damaged: "Damaged",
    };
    function show(told) {
      head.textContent = told.name;
      state.dataset.state = told.state;
      word.textContent = WORDS[told.state] ?? told.state;
      const parts =
        told.state === "waiting"
          ? []
          : [told.planned ? `round ${told.round} of ${told.planned}` : `round ${told.round}`, `${written(told.elapsed, "seconds")} so far`];
      if (known(told.left)) parts.push(`about ${written(told.left, "seconds")} left`);
      if (told.state === "silent") parts.push(`nothing new for ${written(told.silent_for, "seconds")}`);
      progressText.textContent = parts.join(" · ");
      cause.textContent = [told.cause, told.damaged_lines ? `${told.damaged_lines} lines of history.jsonl cannot be read` : ""]
        .filter(Boolean)
        .join("; ");
      bar.value = told.planned ? Math.min(1, told.round / told.planned) : 0;
      document.title =
        told.state === "running"
          ? `${told.round}${told.planned ? `/${told.planned}` : ""} · ${told.name}`
          : `${WORDS[told.state] ?? told.state} · ${told.name}`;
      const shown = [...told.facts];
      if (known(told.accuracy)) shown.push(["accuracy now", written(told.accuracy, "percent")]);
      if (known(told.val_accuracy)) shown.push(["validation now", written(told.val_accuracy, "percent")]);
      if (known(told.bytes_up))
        shown.push(["to the server", written(told.bytes_up, "bytes")], ["to the clients", written(told.bytes_down, "bytes")]);
      if (told.round) shown.push(["absences", whole.format(told.absences)]);
      facts.replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    }

    return {
      question: () => new URLSearchParams({ ...(chosen() ? { run: chosen() } : {}), version: kept.version, from: kept.entries.length }),
      take(told) {
        kept.version = told.version;
        const fresh = told.entries.map((values) => Object.fromEntries(told.fields.map((name, k) => [name, values[k]])));
        kept.entries = kept.entries.slice(0, told.from).concat(fresh);
        if (told.clients) kept.clients = told.clients;
        show(told);
        grid.hidden = !kept.entries.length;
        if (!told.clients || !kept.entries.length) return;
        figure(curves());
        figure(traffic());
        const each = perClient();
        if (each) figure(each, true);
        clientTable();
      },
    };
  }

  // ---- several runs ----
  function listView() {
    const head = el("h1", {}, "Runs"),
      told = el("p", { class: "state", role: "status" });
    const top = el("div", { class: "top" }, el("p", { class: "byline" }, "fedloom watch"), theme.button());
    const columns = [
      { name: "run", align: "left" },
      { name: "state", align: "left" },
      { name: "round", align: "right" },
      { name: "left", align: "right" },
      { name: "accuracy", align: "right" },
      { name: "validation", align: "right" },
      { name: "absences", align: "right" },
      { name: "because", align: "left" },
    ];
    const table = makeTable({ title: "Runs", columns, rows: [] }),
      bar = el("progress", { "aria-label": "runs that have ended", max: "1", value: "0" });
    place.replaceChildren(notice, el("header", {}, top, head, told, bar), table);
    let before = "";
    return {
      question: () => new URLSearchParams(),
      take({ runs }) {
        const counts = new Map();
        for (const run of runs) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
        const states = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
        told.textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"}: ${states}`;
        bar.value = runs.filter((run) => ["completed", "failed", "stopped"].includes(run.state)).length / Math.max(runs.length, 1);
        document.title = told.textContent;
        const rows = runs.map((run) => [
          { text: run.name, sort: run.name, href: addressOf(run.name) },
          run.state,
          { text: run.planned ? `${run.round} of ${run.planned}` : String(run.round), sort: run.round },
          { text: known(run.left) ? written(run.left, "seconds") : "", sort: run.left },
          { text: written(run.accuracy, "percent"), sort: run.accuracy },
          { text: written(run.val_accuracy, "percent"), sort: run.val_accuracy },
          run.absences,
          run.state === "running" ? "" : run.cause,
        ]);
        const now = JSON.stringify(rows);
        if (now !== before) table.fill(rows); // else the row under the pointer, or in focus, would be made anew each second
        before = now;
      },
    };
  }

  // ---- asking ----
  async function ask(turn) {
    let pause = document.hidden ? SELDOM : EVERY;
    try {
      const answer = await fetch(`data?${view.maker.question()}`, { cache: "no-store" });
      if (turn !== asked) return;
      if (answer.status === 403) return say("This page belongs to a watch that has ended. Open the address that fedloom watch prints now.");
      if (answer.status === 404) {
        say("There is no run of that name.");
        pause = SELDOM;
      } else {
        const told = await answer.json();
        if (turn !== asked) return;
        const kind = told.runs ? "list" : "run";
        if (view.kind !== kind) view = { kind, maker: kind === "list" ? listView() : runView() };
        view.maker.take(told);
        say("");
        if (told.behind) pause = 0;
        if (["completed", "failed", "stopped"].includes(told.state)) pause = SELDOM; // it may be resumed
      }
    } catch (error) {
      if (turn !== asked) return;
      if (!(error instanceof TypeError)) throw error; // what fetch fails with when nobody answers
      say("fedloom watch does not answer. Trying again.");
      pause = SELDOM;
    }
    timer = setTimeout(ask, pause, turn);
  }

  function begin() {
    clearTimeout(timer);
    asked += 1;
    view = { kind: "run", maker: runView() };
    ask(asked);
  }
  window.addEventListener("hashchange", begin);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) {
      clearTimeout(timer);
      asked += 1;
      ask(asked);
    }
  });
  begin();
})();
