// The watch page: requests new data about once a second, and keeps the data that it has.
"use strict";

(() => {
  // The cookie has the token now, so the address no longer needs it.
  history.replaceState(null, "", location.pathname + location.hash);
  // Milliseconds between requests. SELDOM applies to hidden pages and finished runs.
  const EVERY = 1000,
    SELDOM = 5000;
  const FEW = 40; // up to this many clients have a bar each
  const COUNT = { log: false, unit: "count" },
    SHARE = { log: false, unit: "percent" };
  const place = document.getElementById("watch");
  let view = null,
    timer = 0,
    asked = 0;

  const chosen = () => new URLSearchParams(location.hash.slice(1)).get("run") ?? "";
  const addressOf = (name) => `#${new URLSearchParams({ run: name })}`;

  const isOver = (run) => ["completed", "failed", "stopped"].includes(run.state);
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
    const top = el(
      "div",
      { class: "top" },
      el("p", { class: "byline" }, "fedloom watch"),
      theme.button(),
    );
    const lead = el("p", { class: "lead", role: "status", hidden: true }),
      warnings = el("aside", { class: "notice", "aria-label": "warnings", hidden: true });
    const back = chosen() ? el("p", { class: "back" }, el("a", { href: "#" }, "All runs")) : "";
    place.replaceChildren(
      notice,
      el("header", {}, top, back, head, state, bar, lead, facts),
      warnings,
      grid,
    );
    const kept = { version: 0, entries: [], clients: [] };
    const figures = {};
    let table = null,
      standing = null,
      others = null;

    function figure(spec) {
      if (figures[spec.id] && figures[spec.id].spec.kind === spec.kind)
        return figures[spec.id].update(spec);
      const node = charts.figure(spec);
      if (figures[spec.id]) figures[spec.id].element.replaceWith(node);
      else grid.append(node);
      figures[spec.id] = node.chart;
    }

    /** Figures form pairs. One without a partner is wide. */
    function arrange() {
      const all = Object.values(figures).map((chart) => chart.element);
      all.forEach((one, k) =>
        one.classList.toggle("wide", all.length % 2 === 1 && k === all.length - 1),
      );
    }

    /** Returns test and validation values by round, with a series for each stage. */
    function curves(id, title, test, validation) {
      const series = new Map();
      const add = (name, x, y) => {
        if (!series.has(name)) series.set(name, { name, color: series.size, x: [], y: [] });
        series.get(name).x.push(x);
        series.get(name).y.push(y);
      };
      for (const entry of kept.entries) {
        const after = entry.stage && entry.stage !== "train" ? `, ${entry.stage}` : "";
        if (known(entry[test])) add(`test${after}`, entry.round, entry[test]);
        if (known(entry[validation])) add(`validation${after}`, entry.round, entry[validation]);
      }
      return {
        id,
        kind: "lines",
        title: `${title[0].toUpperCase()}${title.slice(1)} by round`,
        caption: "Mean over clients, weighted by size.",
        x: { label: "round", ...COUNT },
        y: { label: title, ...SHARE },
        series: [...series.values()],
      };
    }

    function loss() {
      const there = kept.entries.filter((entry) => known(entry.loss));
      if (!there.length) return null;
      const series = {
        name: "training loss",
        color: 2,
        x: there.map((entry) => entry.round),
        y: there.map((entry) => entry.loss),
      };
      return {
        id: "loss",
        kind: "lines",
        title: "Training loss by round",
        caption: "Mean over clients, weighted by training items.",
        x: { label: "round", ...COUNT },
        y: { label: "training loss", log: false, unit: "" },
        series: [series],
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
        caption: "Without evaluation. The first round includes the set-up.",
        x: { label: "round", ...COUNT },
        y: { label: "bytes of all clients", log: false, unit: "bytes" },
        series: [up, down],
        palette: "parts",
      };
    }

    function perClient(data) {
      const scored = kept.clients
        .filter((client) => known(client.score))
        .sort((a, b) => b.score - a.score);
      const label = `test ${data.metric}`;
      const about = {
        id: "clients",
        title: `Test ${data.metric} of each client`,
        caption: `At the best round${isOver(data) ? "" : " so far"} (${data.best_round}).`,
      };
      const values = scored.map((client) => client.score),
        names = scored.map((client) => client.id);
      if (scored.length <= FEW)
        return scored.length
          ? {
              ...about,
              kind: "bars",
              rows: names,
              x: { label, ...SHARE },
              series: [{ name: label, color: 0, values }],
            }
          : null;
      return {
        ...about,
        kind: "points",
        x: { label: "rank", ...COUNT },
        y: { label, ...SHARE },
        series: [
          { name: "clients", color: 0, x: values.map((_, k) => k + 1), y: values, labels: names },
        ],
      };
    }

    function section(id, title, text, content) {
      grid.append(
        el(
          "figure",
          { class: "wide", id },
          el("figcaption", {}, el("h3", {}, title), el("p", {}, text)),
          content,
        ),
      );
    }

    const percentOf = (value) => ({ text: written(value, "percent"), sort: value });

    function clientTable(data) {
      const other = data.selection !== "accuracy";
      const columns = [
        { name: "client", align: "left" },
        ...(other ? [{ name: `test ${data.metric}`, align: "right" }] : []),
        { name: "test accuracy", align: "right" },
        { name: "training loss", align: "right" },
        { name: "absent", align: "right", help: "number of exchanges that the client missed" },
        { name: "last absent in round", align: "right" },
        { name: "cause", align: "left" },
      ];
      const rows = kept.clients.map((client) => [
        client.id,
        ...(other ? [percentOf(client.score)] : []),
        percentOf(client.accuracy),
        { text: known(client.loss) ? client.loss.toFixed(3) : "–", sort: client.loss },
        client.absences,
        client.last_absent,
        client.cause,
      ]);
      if (table) return table.fill(rows);
      table = makeTable({ title: "Clients", columns, rows });
      const text =
        "Scores at the best round, how often clients were absent, and the last cause.";
      section("client-table", "Clients", text, table);
    }

    /** Shows the clients whose updates stand out in the latest round that compares updates. */
    function outliers(found) {
      if (!found) return;
      const columns = [
        { name: "client", align: "left" },
        { name: "phase", align: "left" },
        { name: "norm", align: "right", help: "divided by the median norm of the round" },
        { name: "cosine", align: "right", help: "to the median update of the round" },
        { name: "what happened", align: "left" },
      ];
      const fixed = (value) => ({ text: known(value) ? value.toFixed(2) : "–", sort: value });
      const rows = found.clients.map((one) => [
        one.client,
        one.phase,
        fixed(one.norm),
        fixed(one.cosine),
        one.left_out ? "left out" : one.shortened ? "shortened" : "",
      ]);
      if (!standing) {
        standing = makeTable({ title: "Updates that stand out", columns, rows });
        section("outliers", "Updates that stand out", "", standing);
      } else standing.fill(rows);
      const more = found.standing_out - rows.length;
      grid.querySelector("#outliers p").textContent =
        `Round ${found.round}: ${found.standing_out || "none"} of ${found.compared} updates.` +
        (more ? ` ${more} of them are not shown.` : "");
      standing.hidden = !rows.length;
    }

    /** Shows the baselines of a run, which are runs of their own in its folder. */
    function baselines(data) {
      if (!data.baselines) return;
      const columns = [
        { name: "baseline", align: "left" },
        { name: "state", align: "left" },
        { name: "test accuracy", align: "right" },
        { name: "validation accuracy", align: "right" },
        { name: "best round", align: "right" },
      ];
      const rows = data.baselines.map((run) => [
        run.name,
        run.state,
        percentOf(run.accuracy),
        percentOf(run.val_accuracy),
        run.best_round,
      ]);
      if (others) return others.fill(rows);
      others = makeTable({ title: "Baselines", columns, rows });
      section("baselines", "Baselines", "Other methods on the same federation.", others);
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
    /** Says what the best round so far reaches: the numbers that the report will have. */
    function scores(data) {
      lead.hidden = !known(data.accuracy);
      if (lead.hidden) return;
      const values = [
        `${written(data.accuracy, "percent")} test accuracy`,
        known(data.val_accuracy) && `${written(data.val_accuracy, "percent")} validation accuracy`,
      ];
      if (data.selection !== "accuracy")
        values.unshift(
          known(data.score) && `${written(data.score, "percent")} test ${data.metric}`,
          known(data.val_score) && `${written(data.val_score, "percent")} validation ${data.metric}`,
        );
      const when = `${isOver(data) ? "Best" : "Best so far"} at round ${data.best_round}`;
      const text = `${when}: ${values.filter(Boolean).join(", ")}.`;
      if (lead.textContent !== text) lead.textContent = text; // read aloud only if it is new
      warnings.hidden = !data.warnings.length;
      warnings.replaceChildren(el("ul", {}, ...data.warnings.map((line) => el("li", {}, line))));
    }

    function show(data) {
      head.textContent = data.name;
      state.dataset.state = data.state;
      word.textContent = WORDS[data.state] ?? data.state;
      const parts =
        data.state === "waiting"
          ? []
          : [
              data.planned ? `round ${data.round} of ${data.planned}` : `round ${data.round}`,
              `${written(data.elapsed, "seconds")}${isOver(data) ? "" : " so far"}`,
            ];
      if (known(data.left)) parts.push(`about ${written(data.left, "seconds")} left`);
      if (data.state === "silent")
        parts.push(`nothing new for ${written(data.silent_for, "seconds")}`);
      progressText.textContent = parts.join(" · ");
      cause.textContent = [
        data.cause,
        data.damaged_lines ? `${data.damaged_lines} lines of history.jsonl cannot be read` : "",
      ]
        .filter(Boolean)
        .join("; ");
      bar.value = data.planned ? Math.min(1, data.round / data.planned) : 0;
      document.title =
        data.state === "running"
          ? `${data.round}${data.planned ? `/${data.planned}` : ""} · ${data.name}`
          : `${WORDS[data.state] ?? data.state} · ${data.name}`;
      scores(data);
      const shown = [...data.facts];
      if (known(data.loss)) shown.push(["last training loss", data.loss.toFixed(3)]);
      if (known(data.bytes_up))
        shown.push(
          ["to the server", written(data.bytes_up, "bytes")],
          ["to the clients", written(data.bytes_down, "bytes")],
        );
      if (data.round) shown.push(["absences", whole.format(data.absences)]);
      facts.replaceChildren(
        ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
      );
    }

    return {
      query: () =>
        new URLSearchParams({
          ...(chosen() ? { run: chosen() } : {}),
          version: kept.version,
          from: kept.entries.length,
        }),
      take(data) {
        kept.version = data.version;
        const fresh = data.entries.map((values) =>
          Object.fromEntries(data.fields.map((name, k) => [name, values[k]])),
        );
        kept.entries = kept.entries.slice(0, data.from).concat(fresh);
        if (data.clients) kept.clients = data.clients;
        show(data);
        grid.hidden = !kept.entries.length;
        if (!data.clients || !kept.entries.length) return;
        if (data.selection !== "accuracy")
          figure(curves("selected", data.metric, "score", "val_score"));
        figure(curves("accuracy", "accuracy", "accuracy", "val_accuracy"));
        for (const made of [loss(), traffic()]) if (made) figure(made);
        const each = perClient(data);
        if (each) figure(each);
        arrange();
        outliers(data.outliers);
        clientTable(data);
        baselines(data);
      },
    };
  }

  // ---- several runs ----
  function listView() {
    const head = el("h1", {}, "Runs"),
      status = el("p", { class: "state", role: "status" });
    const top = el(
      "div",
      { class: "top" },
      el("p", { class: "byline" }, "fedloom watch"),
      theme.button(),
    );
    const columns = [
      { name: "run", align: "left" },
      { name: "state", align: "left" },
      { name: "round", align: "right" },
      { name: "test accuracy", align: "right", help: "at the best round so far" },
      { name: "validation accuracy", align: "right", help: "at the best round so far" },
      { name: "best round", align: "right", help: "so far, by the validation score" },
      { name: "time left", align: "right" },
      { name: "absences", align: "right" },
      { name: "cause", align: "left" },
    ];
    const table = makeTable({ title: "Runs", columns, rows: [] }),
      bar = el("progress", { "aria-label": "runs that have ended", max: "1", value: "0" });
    place.replaceChildren(notice, el("header", {}, top, head, status, bar), table);
    let before = "";
    return {
      query: () => new URLSearchParams(),
      take({ runs }) {
        const counts = new Map();
        for (const run of runs) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
        const states = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
        status.textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"}: ${states}`;
        bar.value =
          runs.filter(isOver).length /
          Math.max(runs.length, 1);
        document.title = status.textContent;
        const rows = runs.map((run) => [
          { text: run.name, sort: run.name, href: addressOf(run.name) },
          run.state,
          {
            text: run.planned ? `${run.round} of ${run.planned}` : String(run.round),
            sort: run.round,
          },
          { text: written(run.accuracy, "percent"), sort: run.accuracy },
          { text: written(run.val_accuracy, "percent"), sort: run.val_accuracy },
          run.best_round,
          { text: known(run.left) ? written(run.left, "seconds") : "", sort: run.left },
          run.absences,
          run.state === "running" ? "" : run.cause,
        ]);
        const now = JSON.stringify(rows);
        // Unchanged rows stay, so that they keep the pointer and the focus.
        if (now !== before) table.fill(rows);
        before = now;
      },
    };
  }

  // ---- requests ----
  async function ask(turn) {
    let pause = document.hidden ? SELDOM : EVERY;
    try {
      const answer = await fetch(`data?${view.maker.query()}`, { cache: "no-store" });
      if (turn !== asked) return;
      if (answer.status === 403)
        return say("This page belongs to a watch that has ended. Open its new address.");
      if (answer.status === 404) {
        say("There is no run of that name.");
        pause = SELDOM;
      } else {
        const data = await answer.json();
        if (turn !== asked) return;
        const kind = data.runs ? "list" : "run";
        if (view.kind !== kind) view = { kind, maker: kind === "list" ? listView() : runView() };
        view.maker.take(data);
        say("");
        if (data.behind) pause = 0;
        // A finished run may be resumed.
        if (isOver(data)) pause = SELDOM;
      }
    } catch (error) {
      if (turn !== asked) return;
      // fetch raises TypeError if the server does not answer.
      if (!(error instanceof TypeError)) throw error;
      say("fedloom watch does not answer. The page tries again every 5 seconds.");
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
